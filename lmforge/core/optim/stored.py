"""What an optimizer keeps between steps in fewer bits than it computes with: states in 8 bits, and
bf16 weights that are rounded stochastically.

Both are parts of full tensors: how a number is stored depends on its tensor, its place in it and
the step, and so is the same on any number of ranks. Blocks of 8-bit states end with a row
(core/model/quantization/blocks.py), which no strategy cuts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lmforge.core.model.init_weights import local_part, part_runs
from lmforge.core.model.quantization.blocks import Codes, pack_rows, row_bytes, unpack_rows
from lmforge.core.model.rng.splitmix import splitmix64_stream, wrap_int64
from lmforge.core.parallel.parallel_model import local_tensor


def zeros_8bit(parameter: Tensor) -> Tensor:
    """A state of zeros for a matrix, or a stack of them, in 8 bits: uint8 [..., rows, row bytes],
    sharded as it is.
    """
    *rows, columns = parameter.shape
    local = local_tensor(parameter)
    packed = torch.zeros(*local.shape[:-1], row_bytes(columns), dtype=torch.uint8, device=local.device)
    if not isinstance(parameter, DTensor):
        return packed
    shape = torch.Size([*rows, row_bytes(columns)])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(packed, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride)


@dataclass(frozen=True)
class Stored8Bit:
    """A state in 8 bits, uint8 [rows, row bytes], of a matrix with so many columns, as a flat
    tensor of fp32.
    """

    packed: Tensor
    columns: int
    codes: Codes

    @classmethod
    def of(cls, state: Tensor, parameter: Tensor, codes: Codes) -> "Stored8Bit":
        """This rank's part."""
        return cls(local_tensor(state).view(-1, state.shape[-1]), parameter.shape[-1], codes)

    def numel(self) -> int:
        return self.packed.shape[0] * self.columns

    def split(self, size: int) -> Iterator["Stored8Bit"]:
        """Parts of `size` numbers, which are whole rows."""
        return (replace(self, packed=each) for each in self.packed.split(size // self.columns))

    def float(self) -> Tensor:
        return unpack_rows(self.packed, self.columns, self.codes).reshape(-1)

    def store(self, numbers: Tensor, skip: Tensor) -> None:
        """Store other numbers, unless `skip`: packed again, the same might have other bytes."""
        packed = pack_rows(numbers.view(-1, self.columns), self.codes)
        torch.where(skip, self.packed, packed, out=self.packed)


@dataclass(frozen=True)
class StochasticBF16:
    """This rank's part of a bf16 weight, flat.

    What is stored is rounded up or down at random, with the number itself as the expected value: a
    step that is smaller than half the spacing of bf16 is not lost, but taken with its probability.

    key: of the tensor, 64 bits. step: steps done, a scalar on the device. starts, length: as in
    HeldPart. first: the place of the first of these numbers in the part.
    """

    weight: Tensor
    key: int
    step: Tensor
    starts: Tensor
    length: int
    first: int = 0

    @classmethod
    def of(cls, parameter: Tensor, key: int, step: Tensor) -> "StochasticBF16":
        local, part = local_part(parameter)
        with local.device:  # the host would wait for a copy
            starts, length = part_runs(part, parameter.shape)
        return cls(local.view(-1), key, step, starts, length)

    def numel(self) -> int:
        return self.weight.numel()

    def split(self, size: int) -> Iterator["StochasticBF16"]:
        return (replace(self, weight=each, first=n * size) for n, each in enumerate(self.weight.split(size)))

    def float(self) -> Tensor:
        return self.weight.float()

    def store(self, numbers: Tensor, skip: Tensor) -> None:
        """Numbers that bf16 has stay as they are, as do all where a step was skipped."""
        places = torch.arange(self.first, self.first + len(numbers), device=numbers.device)
        indices = self.starts[places // max(1, self.length)] + places % max(1, self.length)
        key = splitmix64_stream(wrap_int64(self.key), self.step.long())
        noise = (splitmix64_stream(key, indices) & 2**16 - 1).int()
        self.weight.copy_(((numbers.view(torch.int32) + noise) & -(2**16)).view(torch.float32))
