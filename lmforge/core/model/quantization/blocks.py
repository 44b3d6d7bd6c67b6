"""Numbers in 4 or 8 bits, in blocks that each have a scale: NF4 (QLoRA, arXiv 2305.14314) and the
dynamic 8-bit code (arXiv 2110.02861), bit for bit those of bitsandbytes 0.50.

A quantized tensor is one tensor of bytes, [rows, row bytes]. A row has whole blocks and all that is
needed to compute their numbers, so any rows are a part of the tensor, and ranks may share them in
any way. Here is only the arithmetic: nothing of models, engines or optimizers.
"""

import math
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from lmforge.core.model.quantization.formats import (
    BLOCK,
    SCALE_BYTES,
    BlockFormat,
)

Codes = Literal["nf4", "int8", "uint8"]  # the last are for numbers that are never negative
# Whose kernels a GPU computes with where it is installed.
_HAS_BITSANDBYTES = find_spec("bitsandbytes") is not None
BINS = 2**16  # what bitsandbytes rounds to on a CPU before it looks up a code of 8 bits
# Numbers that are computed at once, in fp32 and with indices: it limits the memory beside the
# result.
CHUNK_NUMEL = 2**21
# The byte of two zeros in NF4, and what a zero is rounded to in the dynamic code.
_ZEROS = 0x77
_ZERO = 131
# The sixteen quantiles of a normal distribution, as QLoRA has them.
NF4_VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


def quantize(values: Tensor, stored: BlockFormat) -> Tensor:
    """The bytes [rows, row bytes] of a whole tensor of any shape and float dtype, on its device."""
    flat = values.detach().reshape(-1)
    rows = stored.stored_shape(flat.numel())[0]
    codes = []
    scales = []
    for chunk in flat.split(CHUNK_NUMEL):  # which are whole rows, but for the last
        numbers = pad(chunk.float(), (0, -chunk.numel() % stored.row_numel)).view(-1, stored.block)
        code, scale = (
            quantize_blocks(numbers, stored.bits)
            if stored.bits == "nf4"
            else _quantize_by_bins(numbers)
        )
        codes.append(code[:, ::2] << 4 | code[:, 1::2] if stored.bits == "nf4" else code)
        scales.append(scale)
    packed = torch.cat(codes).view(rows, -1)
    scale = torch.cat(scales)
    if not stored.double_quant:
        return torch.cat([packed, _bytes(scale[:, None])], dim=1)
    used = scale[: -(-flat.numel() // stored.block)]
    mean = _mean(used)
    deviations = pad(used - mean, (0, len(scale) - len(used))).view(rows, -1)
    nested, nested_scale = _quantize_by_bins(deviations)
    return torch.cat(
        [packed, nested, _bytes(nested_scale[:, None]), _bytes(mean.repeat(rows, 1))], dim=1
    )


def pack_nf4(codes: Tensor, scales: Tensor, nested: tuple[Tensor, float] | None) -> Tensor:
    """The bytes [rows, row bytes] that `quantize` makes, from what bitsandbytes keeps in separate
    tensors.

    codes: uint8, two numbers a byte. scales: of each block, in fp32; or with `nested` their 8-bit
    codes, where nested has the scales of these, fp32, and the mean.
    """
    stored = BlockFormat("nf4", nested is not None)
    rows = stored.stored_shape(2 * codes.numel())[0]
    packed = pad(codes.flatten(), (0, rows * stored.code_bytes - codes.numel()), value=_ZEROS).view(
        rows, -1
    )
    if nested is None:
        return torch.cat([packed, _bytes(scales.view(rows, 1))], dim=1)
    scale, mean = nested
    of_blocks = pad(scales.flatten(), (0, rows * BLOCK - scales.numel()), value=_ZERO).view(
        rows, -1
    )
    return torch.cat(
        [packed, of_blocks, _bytes(scale.view(rows, 1)), _bytes(torch.full((rows, 1), mean))], dim=1
    )


def dequantize(
    packed: Tensor, stored: BlockFormat, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """The numbers of bytes [rows, row bytes], as a tensor of this shape and dtype.

    They are computed in fp32.
    """
    numel = len(packed) * stored.row_numel
    if stored.bits == "nf4" and packed.is_cuda and _HAS_BITSANDBYTES:
        import bitsandbytes  # noqa: F401  (its operators)

        scales = _scales(packed, stored)
        codes = packed[:, : stored.code_bytes].reshape(-1, 1)
        result = torch.ops.bitsandbytes.dequantize_4bit(
            codes, scales, stored.block, "nf4", [numel], dtype
        )
        return result[: math.prod(shape)].view(*shape)
    result = torch.empty(numel, dtype=dtype, device=packed.device)
    rows = max(1, CHUNK_NUMEL // stored.row_numel)
    for part, out in zip(packed.split(rows), result.split(rows * stored.row_numel), strict=True):
        scales = _scales(part, stored)
        codes = part[:, : stored.code_bytes].reshape(
            len(scales), stored.code_bytes // stored.blocks_per_row
        )
        if stored.bits == "nf4":
            out.view(-1, stored.block).copy_(
                _pairs(packed.device)[codes.int()].flatten(1).mul_(scales[:, None])
            )
        else:
            out.view(-1, stored.block).copy_(
                dequantize_blocks(codes, scales, code_values("int8", packed.device))
            )
    return result[: math.prod(shape)].view(*shape)


def quantize_blocks(blocks: Tensor, bits: Codes) -> tuple[Tensor, Tensor]:
    """The nearest codes for numbers fp32 [..., numbers] that are divided by the largest of their
    block: uint8 of the same shape, and these largest, fp32 [...].
    """
    scaled, largest = _scaled(blocks)
    return torch.bucketize(scaled, _bounds(code_values(bits, blocks.device)), out_int32=True).to(
        torch.uint8
    ), largest


def _quantize_by_bins(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The same in 8 bits as bitsandbytes computes it on a CPU: the code of the nearest of 65,536
    numbers between -1 and 1. On a GPU it takes the nearest code, which is another one for about a
    number in a thousand.
    """
    scaled, largest = _scaled(blocks)
    codes = _codes_of_bins(blocks.device)[
        ((scaled.nan_to_num_() + 1) * 0.5 * (BINS - 1) + 0.5).int()
    ]
    return codes.masked_fill_((largest == 0)[:, None], 0), largest


def _scaled(blocks: Tensor) -> tuple[Tensor, Tensor]:
    largest = blocks.abs().amax(dim=-1)
    return (blocks * (1.0 / largest.clamp(min=1e-38)).unsqueeze(-1)).clamp_(-1, 1), largest


def _bounds(values: Tensor) -> Tensor:
    return (values[:-1] + values[1:]) / 2


@cache
def _codes_of_bins(device: torch.device) -> Tensor:
    middles = -1.0 + 2.0 * torch.arange(BINS, device=device).float() / (BINS - 1)
    return torch.bucketize(middles, _bounds(code_values("int8", device))).to(torch.uint8)


def dequantize_blocks(codes: Tensor, scales: Tensor, values: Tensor) -> Tensor:
    """The numbers fp32 [blocks, numbers] of what `quantize_blocks` returned."""
    return values[codes.int()].mul_(scales[:, None])


def row_bytes(columns: int) -> int:
    """The bytes of a row of so many numbers by `pack_rows`."""
    return columns + SCALE_BYTES * -(-columns // BLOCK)


def pack_rows(rows: Tensor, codes: Codes) -> Tensor:
    """Numbers fp32 [..., columns] in 8 bits: uint8 [..., row bytes].

    Blocks begin with each row and end with it, so that any rows of a tensor are packed as in the
    whole. Each number becomes the nearest code.
    """
    columns = rows.shape[-1]
    blocks = pad(rows, (0, -columns % BLOCK)).unflatten(-1, (-1, BLOCK))
    packed, scales = quantize_blocks(blocks, codes)
    return torch.cat([packed.flatten(-2)[..., :columns], _bytes(scales)], dim=-1)


def unpack_rows(packed: Tensor, columns: int, codes: Codes) -> Tensor:
    """The numbers fp32 [..., columns] of what `pack_rows` returned. Bytes of zeros are zeros."""
    blocks = pad(packed[..., :columns], (0, -columns % BLOCK)).unflatten(-1, (-1, BLOCK))
    numbers = code_values(codes, packed.device)[blocks.int()].mul_(
        _floats(packed[..., columns:]).unsqueeze(-1)
    )
    return numbers.flatten(-2)[..., :columns]


@cache
def code_values(bits: Codes, device: torch.device) -> Tensor:
    """What the codes stand for, fp32, in ascending order: 16 or 256 numbers between -1 and 1."""
    return torch.tensor(
        NF4_VALUES if bits == "nf4" else dynamic_values(signed=bits == "int8"), device=device
    )


def dynamic_values(signed: bool = True) -> list[float]:
    """The 256 numbers of the dynamic code: for each power of ten from 1e-6 to 1, twice as many as
    for the one below.
    """
    numbers = [0.0, 1.0]
    for power in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (power if signed else power + 1) + 1)
        middles = 10 ** (power - 6) * (edges[:-1] + edges[1:]) / 2
        numbers += middles.tolist() + ((-middles).tolist() if signed else [])
    return sorted(numbers)


@cache
def _pairs(device: torch.device) -> Tensor:
    """What the two numbers of each byte of NF4 stand for: fp32 [256, 2], the upper half first."""
    values = code_values("nf4", device)
    byte = torch.arange(256, device=device)
    return torch.stack([values[byte >> 4], values[byte & 15]], dim=1)


def _scales(part: Tensor, stored: BlockFormat) -> Tensor:
    """The scale of each block of these rows, fp32 [blocks]."""
    if not stored.double_quant:
        return _floats(part[:, stored.code_bytes :]).flatten()
    nested, scale, mean = part[:, stored.code_bytes :].split(
        [BLOCK, SCALE_BYTES, SCALE_BYTES], dim=1
    )
    deviations = dequantize_blocks(
        nested, _floats(scale).flatten(), code_values("int8", part.device)
    )
    return (deviations + _floats(mean)).flatten()


def _mean(numbers: Tensor) -> Tensor:
    """The mean, as a scalar: by one thread of the CPU, so that its rounding is the same wherever it
    is computed.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return numbers.cpu().mean().to(numbers.device)
    finally:
        torch.set_num_threads(threads)


def _bytes(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.uint8)


def _floats(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.float32)
