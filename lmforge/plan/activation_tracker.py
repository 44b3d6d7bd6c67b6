"""Measures the memory that a forward pass saves for its backward pass.

It tracks storages, not autograd's saved tensors: activation checkpointing keeps some where autograd's hooks do not look.
"""

import gc
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

# Operators of these hold gathered parameters, and gradients that are being reduced.
_COLLECTIVE_NAMESPACES = ("c10d", "fsdp")


class ActivationTracker(TorchDispatchMode):
    """Tracks the memory that operators allocate inside this context, without keeping it alive.

    Parameters, batches and everything else that existed before do not count, nor do gathered parameters. Operators in compiled
    code are not seen: of FlexAttention, which is always compiled, the output counts, but not the log-sum-exp.
    """

    # FlexAttention is one.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """FlexAttention is compiled where blocks are not, and under another mode torch refuses to compile it."""
        return True

    def __init__(self) -> None:
        super().__init__()
        # By address, which is not reused as long as there is a reference to the storage, even a weak one.
        self._created: dict[int, StorageWeakRef] = {}
        self._ignored: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            # What has a gradient function and was not seen before is an output of compiled code.
            self._track(tensor, self._created if tensor.grad_fn is not None else self._ignored)
        result = function(*args, **kwargs)
        for tensor in _tensors(result):
            self._track(tensor, self._ignored if function.namespace in _COLLECTIVE_NAMESPACES else self._created)
        return result

    def _track(self, tensor: Tensor, into: dict[int, StorageWeakRef]) -> None:
        if is_traceable_wrapper_subclass(tensor):  # a DTensor, or one that is being gathered: it has no memory but its parts'
            for part in _tensors([getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]):
                self._track(part, into)
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._created and storage._cdata not in self._ignored:
            into[storage._cdata] = StorageWeakRef(storage)

    def live_bytes(self) -> int:
        """Bytes of the tracked storages that are still referenced."""
        gc.collect()  # reference cycles do not count
        alive = (torch.UntypedStorage._new_with_weak_ptr(weak.cdata) for weak in self._created.values())
        return sum(storage.nbytes() for storage in alive if storage is not None)


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]
