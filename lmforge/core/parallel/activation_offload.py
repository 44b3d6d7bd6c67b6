"""Activation offload: what the backward pass of a block needs waits in host memory, and comes back
one block ahead.

Copies run on a stream of their own. In the forward pass a block's activations are copied out while
the next block computes, and freed on the device when that is done; in the backward pass those of
the block before are copied back while a block computes. So the device holds the activations of two
blocks, whatever the depth. What autograd saves is intercepted where a block is called, outside of
its compiled code and of its checkpointing, whose saved inputs are offloaded too.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lmforge.core.model.layers import LanguageModel
from lmforge.core.parallel.parallel_model import local_tensor

# Smaller tensors are not worth a copy.
MIN_BYTES = 1024


class CopyStream(Protocol):
    """Copies between a device and the host that run beside what the device computes."""

    def empty_on_host(self, like: Tensor) -> Tensor:
        """Host memory for a copy of `like`."""

    def copy(self, pairs: list[tuple[Tensor, Tensor]]) -> Any:
        """Begin to copy from the first to the second of each pair, after what the device computes
        now. Returns what to `wait` for.
        """

    def wait(self, copied: Any) -> None:
        """Let what the device computes from now on begin after those copies."""


class CudaCopyStream:
    """Copies from and to page-locked memory on a CUDA stream; the host does not wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def empty_on_host(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def copy(self, pairs: list[tuple[Tensor, Tensor]]) -> torch.cuda.Event:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def wait(self, copied: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(copied)


class HostCopyStream:
    """Plain copies in host memory, for a CPU: they save nothing and show that the values are
    right.
    """

    def empty_on_host(self, like: Tensor) -> Tensor:
        return torch.empty_like(like)

    def copy(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        for source, target in pairs:
            target.copy_(source)

    def wait(self, copied: None) -> None:
        """Does nothing, since copies have been made when `copy` returns."""


@dataclass
class _Storage:
    """The bytes of a tensor's storage: on the device until it is copied out, and from when it is
    asked for to its last use.
    """

    on_device: Tensor | None
    num_views: int = 0
    on_host: Tensor | None = None


@dataclass
class _View:
    """A tensor that autograd saved: where it lies in which storage of which call."""

    call: "_BlockCall"
    storage: _Storage
    dtype: torch.dtype
    layout: tuple[Any, torch.Size, tuple[int, ...]]
    spec: Any  # of a DTensor


@dataclass
class _BlockCall:
    """One forward pass of a block. previous: the call whose backward pass follows that of this
    one.
    """

    previous: "_BlockCall | None"
    storages: dict[int, _Storage] = field(default_factory=dict)
    copied_out: Any = None
    copied_in: Any = None
    is_asked_for: bool = False
    is_waited_for: bool = False


class ActivationOffload:
    """Offloads what blocks save for their backward pass.

    `num_bytes` counts what was copied to the host so far.
    """

    def __init__(
        self, device: torch.device, *, stream: CopyStream | None = None, min_bytes: int = MIN_BYTES
    ) -> None:
        self._device = device
        self._min_bytes = min_bytes
        self._stream = stream or (
            CudaCopyStream(device) if device.type == "cuda" else HostCopyStream()
        )
        self._last: _BlockCall | None = None
        self.num_bytes = 0

    @contextmanager
    def saving(self, block: nn.Module, is_first: bool, shared: Any) -> Iterator[None]:
        """Around a call of `block`, the first of a forward pass or another one.

        `shared`: tensors, at any depth of lists, that other blocks save too, and that stay where
        they are.
        """
        if not torch.is_grad_enabled():
            yield
            return
        call = _BlockCall(None if is_first else self._last)
        stays = {_storage_id(each) for each in tree_leaves(shared) if isinstance(each, Tensor)}
        owned: list[Mapping[str, Tensor | None]] = [
            tensors
            for module in block.modules()
            for tensors in (module._parameters, module._buffers)
            if tensors
        ]

        def pack(tensor: Tensor) -> Tensor | _View:
            local = local_tensor(tensor)
            if (
                type(local) is not Tensor
                or local.device.type != self._device.type
                or not local.is_floating_point()
            ):
                return tensor
            storage = _storage_id(local)
            # Weights are looked up each time: FSDP gathers them into other memory, those of experts
            # in the middle of a block.
            if storage in stays or (
                storage not in call.storages and storage in _storage_ids(owned)
            ):
                return tensor
            return self._pack(call, tensor, local)

        with saved_tensors_hooks(pack, self._unpack):
            yield
        self._copy_out(call)

    def _pack(self, call: _BlockCall, tensor: Tensor, local: Tensor) -> Tensor | _View:
        storage = local.untyped_storage()
        if storage.nbytes() < self._min_bytes:
            return tensor
        if storage._cdata not in call.storages:
            call.storages[storage._cdata] = _Storage(
                local.new_empty(0, dtype=torch.uint8).set_(storage)
            )
        saved = call.storages[storage._cdata]
        saved.num_views += 1
        spec = tensor._spec if isinstance(tensor, DTensor) else None
        return _View(
            call, saved, local.dtype, (local.storage_offset(), local.shape, local.stride()), spec
        )

    def _copy_out(self, call: _BlockCall) -> None:
        """Begin to copy a block's activations out, and free those of the block before, which were
        copied meanwhile.
        """
        pairs = []
        for storage in call.storages.values():
            assert storage.on_device is not None
            storage.on_host = self._stream.empty_on_host(storage.on_device)
            self.num_bytes += storage.on_host.nbytes
            pairs.append((storage.on_device, storage.on_host))
        call.copied_out = self._stream.copy(pairs)
        if self._last is not None and not self._last.is_asked_for:
            self._stream.wait(self._last.copied_out)
            for storage in self._last.storages.values():
                storage.on_device = None
        self._last = call

    def _copy_in(self, call: _BlockCall) -> None:
        """Begin to copy back what is no longer on the device, once."""
        if call.is_asked_for:
            return
        call.is_asked_for = True
        pairs = []
        for storage in call.storages.values():
            if storage.on_device is None and storage.on_host is not None:
                storage.on_device = torch.empty_like(storage.on_host, device=self._device)
                pairs.append((storage.on_host, storage.on_device))
        call.copied_in = self._stream.copy(pairs)

    def _unpack(self, saved: Tensor | _View) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        call = saved.call
        storage = saved.storage
        self._copy_in(call)
        if not call.is_waited_for:
            self._stream.wait(call.copied_in)
            call.is_waited_for = True
        if call.previous is not None:
            self._copy_in(call.previous)
        assert storage.on_device is not None, "a second backward pass"
        tensor = storage.on_device.new_empty(0, dtype=saved.dtype).set_(
            storage.on_device.untyped_storage(), *saved.layout
        )
        storage.num_views -= 1
        if not storage.num_views:
            storage.on_device = storage.on_host = None
        return tensor if saved.spec is None else DTensor(tensor, saved.spec, requires_grad=False)


def _storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _storage_ids(owned: Iterable[Mapping[str, Tensor | None]]) -> set[int]:
    return {
        _storage_id(local_tensor(each))
        for tensors in owned
        for each in tensors.values()
        if each is not None
    }


def offload_activations(model: LanguageModel, device: torch.device) -> None:
    """Let the blocks of a model keep on the host what they save for their backward pass."""
    model.activation_offload = ActivationOffload(device)
