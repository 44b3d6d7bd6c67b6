"""Tensors that may be DTensors: the part on this rank, and the full tensor."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: the tensor itself where it is not a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor, gathered from all ranks that hold a part: all of them must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
