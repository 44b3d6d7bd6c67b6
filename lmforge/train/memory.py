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
_OF_COLLECTIVES = ("c10d", "fsdp")


class Activations(TorchDispatchMode):
    """While it is entered, remembers the memory that operators make, without keeping it alive.

    Parameters, batches and whatever else was there before are not among it, nor what is gathered. Operators inside of
    compiled blocks are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        # By address, which is not given to another storage as long as somebody refers to the first one, weakly too.
        self._made: dict[int, StorageWeakRef] = {}
        self._other: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._remember((args, kwargs), self._other)
        result = function(*args, **kwargs)
        self._remember(result, self._other if function.namespace in _OF_COLLECTIVES else self._made)
        return result

    def _remember(self, values: Any, among: dict[int, StorageWeakRef]) -> None:
        for value in tree_leaves(values):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in self._made and storage._cdata not in self._other:
                    among[storage._cdata] = StorageWeakRef(storage)

    def bytes_alive(self) -> int:
        """Of all that was made since this was entered, what somebody still holds."""
        gc.collect()  # what only a circle of references holds is nobody's
        alive = (torch.UntypedStorage._new_with_weak_ptr(weak.cdata) for weak in self._made.values())
        return sum(storage.nbytes() for storage in alive if storage is not None)
