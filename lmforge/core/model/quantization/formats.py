"""How matrices of a model are stored in 4 or 8 bits, without the computation (blocks.py)."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

Bits = Literal["nf4", "int8"]
SCALE_BYTES = 4  # a scale is in fp32
NF4_BLOCK = 64  # numbers
BLOCK = 256  # numbers, and with `double_quant` scales


@dataclass(frozen=True)
class BlockFormat:
    """How numbers are stored.

    bits: "nf4", 16 values in blocks of 64, or "int8", 256 values in blocks of 256.
    double_quant: of NF4, the scales of 256 blocks, less the mean of all scales, are in 8 bits too:
        4.13 bits a number instead of 4.5. The mean is in every row.
    """

    bits: Bits
    double_quant: bool = False

    def describe(self) -> str:
        return self.bits + (" with scales in 8 bits" if self.double_quant else "")

    @property
    def block(self) -> int:
        return NF4_BLOCK if self.bits == "nf4" else BLOCK

    @property
    def blocks_per_row(self) -> int:
        return BLOCK if self.double_quant else 1

    @property
    def row_numel(self) -> int:
        """The numbers of a row."""
        return self.block * self.blocks_per_row

    @property
    def code_bytes(self) -> int:
        """The bytes of a row that have its numbers; its scales follow."""
        return self.row_numel // 2 if self.bits == "nf4" else self.row_numel

    @property
    def row_bytes(self) -> int:
        return self.code_bytes + (BLOCK + 2 * SCALE_BYTES if self.double_quant else SCALE_BYTES)

    def stored_shape(self, numel: int) -> torch.Size:
        """The shape of the bytes of so many numbers; those that are missing in the last row are
        0.
        """
        return torch.Size([-(-numel // self.row_numel), self.row_bytes])


class StoredMatrix(Protocol):
    """What the bytes of a quantized parameter stand for; matrices.QuantizedMatrix is one."""

    @property
    def stored(self) -> BlockFormat:
        """The format of the bytes."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the matrix, as the model has it without quantization."""

    @property
    def stored_shape(self) -> torch.Size:
        """The shape of the bytes."""

    def quantize(self, matrix: Tensor) -> Tensor:
        """The bytes of a whole matrix of any float dtype: uint8 [rows, row bytes]."""

    def dequantize(self, packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix of these bytes."""


def quantized_matrices(model: nn.Module) -> dict[str, StoredMatrix]:
    """What the quantized parameters of a model stand for, by name."""
    return {
        f"{owner}.{name}": matrix
        for owner, module in model.named_modules()
        for name, matrix in getattr(module, "quantized", {}).items()
    }
