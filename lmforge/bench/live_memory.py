"""Bytes of live tensors at the peak of a step on a CPU, as its allocator is asked for them: without what it keeps, and without
the process. For GPUs torch counts them itself."""

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


def held_bytes(model: torch.nn.Module) -> int:
    """Bytes of all tensors on the CPU that Python can see between two steps, and of DDP's buckets, which it cannot."""
    tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    storages = {}
    for tensor in tensors:
        if tensor.device.type == "cpu" and type(tensor) in (torch.Tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    # With gradient_as_bucket_view; after zero_grad only the reducer holds them.
    buckets = sum(
        parameter.nbytes
        for module in model.modules()
        if isinstance(module, DistributedDataParallel)
        for parameter in module.parameters()
        if parameter.requires_grad and parameter.grad is None
    )
    return sum(storages.values()) + buckets


def peak_bytes(events: Sequence[Any], held: int) -> int:
    """The most that was live, from the events of a profiler that recorded memory; `held` bytes were there before."""
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    live = most = held
    for _, nbytes in changes:
        live += nbytes
        most = max(most, live)
    return most
