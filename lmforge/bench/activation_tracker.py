"""What a forward pass leaves in memory for its backward pass, read from the tensors themselves.

Storages are watched, not autograd's saved tensors: activation checkpointing keeps some where autograd's hooks do not look.
"""

import gc
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# What these fill or hold is gathered parameters and gradients under way.
_COLLECTIVE_NAMESPACES = ("c10d", "fsdp")


class ActivationTracker(TorchDispatchMode):
    """While it is entered, remembers the memory that operators make, without keeping it alive.

    Parameters, batches and whatever else was there before are not among it, nor what is gathered. Operators inside of
    compiled blocks are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        # By address, which is not given to another storage as long as somebody refers to the first one, weakly too.
        self._created: dict[int, StorageWeakRef] = {}
        self._ignored: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._track((args, kwargs), self._ignored)
        result = function(*args, **kwargs)
        self._track(result, self._ignored if function.namespace in _COLLECTIVE_NAMESPACES else self._created)
        return result

    def _track(self, values: Any, into: dict[int, StorageWeakRef]) -> None:
        for value in tree_leaves(values):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in self._created and storage._cdata not in self._ignored:
                    into[storage._cdata] = StorageWeakRef(storage)

    def live_bytes(self) -> int:
        """Of all that was made since this was entered, what somebody still holds."""
        gc.collect()  # what only a circle of references holds is nobody's
        alive = (torch.UntypedStorage._new_with_weak_ptr(weak.cdata) for weak in self._created.values())
        return sum(storage.nbytes() for storage in alive if storage is not None)
