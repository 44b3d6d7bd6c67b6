"""Weights that bitsandbytes has stored in NF4, as folders on the hub have them.

A matrix is a tensor of codes, and beside its name are its scales and a small table in JSON. Other
formats of it are refused by name.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NotRequired

import torch
from torch import Tensor
from typing_extensions import TypedDict

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import parse_json
from lmforge.core.model.quantization.blocks import code_values, dequantize, pack_nf4
from lmforge.core.model.quantization.formats import BLOCK, NF4_BLOCK, Bits, BlockFormat
from lmforge.hf.safetensors_file import SafetensorsFile

_STATE = ".quant_state.bitsandbytes__nf4"
_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", _STATE)


class _State(TypedDict):
    """The content of a `quant_state`."""

    blocksize: int
    shape: list[int]
    nested_blocksize: NotRequired[int]
    nested_offset: NotRequired[float]


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix of this shape that a folder has in NF4."""

    name: str
    shape: tuple[int, ...]
    stored: BlockFormat
    _mean: float
    _files: Mapping[str, SafetensorsFile]

    def read(self) -> Tensor:
        """The matrix in bytes, as quantization/blocks.py has them, on the CPU."""
        codes = self._read("").contiguous().view(torch.uint8)
        scales = self._read(".absmax").contiguous()
        if not self.stored.double_quant:
            return pack_nf4(codes, scales.float(), None)
        return pack_nf4(codes, scales, (self._read(".nested_absmax").float(), self._mean))

    def dequantize(self) -> Tensor:
        """The matrix in fp32, on the CPU."""
        return dequantize(self.read(), self.stored, self.shape, torch.float32)

    def _read(self, end: str) -> Tensor:
        return self._files[self.name + end].read(self.name + end)


def stored_matrices(
    file_of: Mapping[str, SafetensorsFile],
) -> tuple[dict[str, StoredMatrix], Collection[str]]:
    """The matrices in NF4 among tensors in files, by name, and the names of all their parts.

    Raises UserError where they have other blocks or other values.
    """
    matrices = {}
    for name in [each.removesuffix(_STATE) for each in file_of if each.endswith(_STATE)]:
        place = f"{file_of[name + _STATE].path}: {name}"
        raw = file_of[name + _STATE].read(name + _STATE)
        _check_dtype(f"{place}{_STATE}", raw.dtype, is_bytes=True)
        state: _State = parse_json(bytes(raw.flatten().tolist()), _State, f"{place}{_STATE}")
        nested = "nested_offset" in state
        for end in ("", *(_PARTS if nested else _PARTS[:2])):
            if name + end not in file_of:
                raise UserError(f"{place}: quantized without {name + end}; copy the folder again")
        scales = file_of[name + ".absmax"].entries[name + ".absmax"]
        _check_dtype(f"{place}.absmax", scales.dtype, is_bytes=nested)
        table = file_of[name + ".quant_map"].read(name + ".quant_map")
        _check_values(place, table, "nf4")
        if nested:
            scales = file_of[name + ".nested_absmax"].entries[name + ".nested_absmax"]
            _check_dtype(f"{place}.nested_absmax", scales.dtype, is_bytes=False)
            table = file_of[name + ".nested_quant_map"].read(name + ".nested_quant_map")
            _check_values(place, table, "int8")
        sizes = {
            "blocksize": (state["blocksize"], NF4_BLOCK),
            "nested_blocksize": (state.get("nested_blocksize", BLOCK), BLOCK),
        }
        for field, (size, expected) in sizes.items():
            if size != expected:
                raise UserError(
                    f"{place}: quantized with {field} {size}, and only {expected} is read; use the"
                    " original model"
                )
        matrices[name] = StoredMatrix(
            name,
            tuple(state["shape"]),
            BlockFormat("nf4", nested),
            state.get("nested_offset", 0.0),
            file_of,
        )
        _check_sizes(place, matrices[name], file_of)
    return matrices, {name + end for name in matrices for end in _PARTS}


def _check_dtype(place: str, dtype: torch.dtype, *, is_bytes: bool) -> None:
    if not (dtype == torch.uint8 if is_bytes else dtype.is_floating_point):
        expected = "bytes" if is_bytes else "floating-point numbers"
        raise UserError(f"{place}: expected {expected}, got {dtype}; copy the folder again")


def _check_values(place: str, table: Tensor, bits: Bits) -> None:
    if not torch.equal(table.float(), code_values(bits, torch.device("cpu"))):
        raise UserError(
            f"{place}: quantized to other values than those of NF4; use the original model"
        )


def _check_sizes(place: str, matrix: StoredMatrix, file_of: Mapping[str, SafetensorsFile]) -> None:
    def stored(end: str) -> Tensor:
        return file_of[matrix.name + end].entries[matrix.name + end].meta

    numbers = stored("").nbytes * 2
    blocks = stored(".absmax").numel()
    count = torch.Size(matrix.shape).numel()
    fits = (
        min(matrix.shape, default=0) > 0
        and numbers == count + count % 2
        and blocks == -(-count // NF4_BLOCK)
    )
    if matrix.stored.double_quant:
        fits &= stored(".nested_absmax").numel() == -(-blocks // BLOCK)
    if not fits:
        raise UserError(
            f"{place}: {numbers} numbers and {blocks} scales do not fit its shape; copy the folder"
            " again"
        )
