"""Bytes of live tensors at the peak of a step on a CPU, as requested from its allocator: without memory that the allocator
caches, and without the rest of the process. For GPUs torch counts them itself."""

import gc
from collections.abc import Sequence
from typing import Any

import torch


def live_bytes() -> int:
    """Bytes of all tensors on the CPU that Python can see between two steps.

    The buckets of DDP are among them: its reducer keeps the gradients that are views of them, and a gradient that Python has
    seen once, as optimizers do, stays visible.
    """
    tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    storages = {}
    for tensor in tensors:
        if tensor.device.type == "cpu" and type(tensor) in (torch.Tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def peak_bytes(events: Sequence[Any], live_before: int) -> int:
    """The maximum of live bytes, from the events of a profiler that recorded memory; `live_before` bytes were live before."""
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    live = peak = live_before
    for _, nbytes in changes:
        live += nbytes
        peak = max(peak, live)
    return peak
