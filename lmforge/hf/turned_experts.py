"""Experts that are stored stacked, but not as a model has them: [experts, inputs, outputs], with gates
and other factors by turns (family.Family.interleaved_experts); or in MXFP4, as gpt-oss is published.

MXFP4 (OCP Microscaling Formats, version 1.0): of a stack NAME, NAME_blocks uint8 [experts, outputs,
inputs / 32, 16] has two numbers of 4 bits in a byte, the low ones first, and NAME_scales uint8
[experts, outputs, inputs / 32] the exponents of 2 that 32 numbers are multiplied by, plus 127.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from lmforge.core.errors import UserError
from lmforge.core.model.config import ModelConfig
from lmforge.hf.safetensors_file import SafetensorsFile

_OWNER = ".mlp.experts."
_INTERLEAVED = ("gate_up_proj", "gate_up_proj_bias")
_OUTPUTS = ".gate_up_proj.lora_B.weight"
_ROUTER_NAMES = (".mlp.gate.", ".mlp.router.")
_BLOCKS = "_blocks"
_SCALES = "_scales"
_BLOCK = 32  # numbers of a block
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_POSITIVE, *(-each for each in _POSITIVE))


def is_turned(name: str, config: ModelConfig) -> bool:
    """Whether the tensor of this name is not on disk as the model has it."""
    return config.family.interleaved_experts and _OWNER in name


def turned(name: str, stack: Tensor) -> Tensor:
    """A stack of the model, or its biases, as it is on disk."""
    if name.endswith(_INTERLEAVED):
        stack = _interleave(stack)
    return stack.transpose(1, 2) if stack.ndim == 3 else stack


def _interleave(stack: Tensor) -> Tensor:
    return stack.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def _separate(stack: Tensor) -> Tensor:
    return stack.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def adapters_beside_folder(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Adapters of a model as they are beside the folder that it is stored in."""
    if not _has_turned_adapters(config):
        return {**tensors}
    return {
        name.replace(*_ROUTER_NAMES): _interleave(each) if name.endswith(_OUTPUTS) else each
        for name, each in tensors.items()
    }


def adapters_of_model(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The reverse of `adapters_beside_folder`."""
    if not _has_turned_adapters(config):
        return {**tensors}
    return {
        name.replace(*_ROUTER_NAMES[::-1]): _separate(each) if name.endswith(_OUTPUTS) else each
        for name, each in tensors.items()
    }


def _has_turned_adapters(config: ModelConfig) -> bool:
    return config.implementation == "lmforge" and config.family.interleaved_experts


@dataclass(frozen=True)
class TurnedStack:
    """A stack of a folder, or its biases, with the name and the shape that the model gives it."""

    name: str
    shape: tuple[int, ...]
    is_mxfp4: bool
    file_of: Mapping[str, SafetensorsFile]

    def read(self, target: Tensor, part: tuple[slice, ...]) -> None:
        """Fill `target`, of any float dtype and device, with a part of it."""
        experts, *rest = part
        for row, expert in zip(target, range(experts.start, experts.stop), strict=True):
            row.copy_(self._read_expert(expert)[tuple(rest)])

    def _read_expert(self, expert: int) -> Tensor:
        if self.is_mxfp4:
            blocks = self._read(self.name + _BLOCKS, expert)
            value = _dequantize(blocks, self._read(self.name + _SCALES, expert))
        else:
            value = self._read(self.name, expert)
            value = value.t() if value.ndim == 2 else value
        return _separate(value[None])[0] if self.name.endswith(_INTERLEAVED) else value

    def _read(self, name: str, expert: int) -> Tensor:
        file = self.file_of[name]
        entry = file.entries[name]
        rest = entry.shape[1:]
        out = torch.empty((1, *rest), dtype=entry.dtype)
        part = (slice(expert, expert + 1), *(slice(0, size) for size in rest))
        file.read_parts([(name, out, part)])
        return out[0]


def _dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks uint8 [rows, blocks of a row, 16], scales uint8 [rows, blocks of a row] → fp32 [rows,
    inputs]. Every number is one of bf16.
    """
    values = embedding(blocks.int(), _values_of_bytes()).flatten(2)
    return torch.ldexp(values, scales.int().unsqueeze(-1) - 127).flatten(1)


@cache
def _values_of_bytes() -> Tensor:
    """The two numbers of each byte: fp32 [256, 2]."""
    return torch.tensor([(_VALUES[byte & 15], _VALUES[byte >> 4]) for byte in range(256)])


def turned_stacks(file_of: Mapping[str, SafetensorsFile]) -> dict[str, TurnedStack | None]:
    """The stacks among tensors in files, by the names of these; None of scales.

    Raises UserError where blocks and scales do not belong together.
    """
    result: dict[str, TurnedStack | None] = {}
    for stored, file in file_of.items():
        if _OWNER not in stored:
            continue
        shape = file.entries[stored].shape
        name = stored.removesuffix(_BLOCKS)
        if stored.endswith(_SCALES):
            result[stored] = None
        elif name != stored:
            _check_scales(name, file_of)
            in_model = (*shape[:2], shape[2] * _BLOCK)
            result[stored] = TurnedStack(name, in_model, True, file_of)
        elif len(shape) in (2, 3):
            result[stored] = TurnedStack(name, shape[:1] + shape[:0:-1], False, file_of)
    return result


def _check_scales(name: str, file_of: Mapping[str, SafetensorsFile]) -> None:
    blocks = file_of[name + _BLOCKS].entries[name + _BLOCKS]
    place = f"{file_of[name + _BLOCKS].path}: {name}"
    expected: dict[str, Any] = {
        _BLOCKS: (*blocks.shape[:3], _BLOCK // 2),
        _SCALES: blocks.shape[:3],
    }
    for end, shape in expected.items():
        if name + end not in file_of:
            raise UserError(f"{place}: in MXFP4 without {name}{end}; copy the folder again")
        entry = file_of[name + end].entries[name + end]
        if entry.shape != shape or entry.dtype != torch.uint8 or len(blocks.shape) != 4:
            raise UserError(
                f"{place}{end}: is {entry.dtype} {list(entry.shape)} and should be torch.uint8"
                f" {list(shape)} in MXFP4; copy the folder again"
            )
