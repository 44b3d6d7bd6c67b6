"""Attention: who sees whom, and the one place where scores are computed.

A mask is made once per forward from the documents of a batch and handed to every block. A token sees itself and the
earlier tokens of its own document, at most `window` of them. Padding is a document like any other (its id is -1): it
sees itself, so no row of scores is empty and nothing becomes NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Mask:
    """Which keys each query sees, in the form that the backend on this device wants; exactly one is set.

    dense: bool [rows, 1, queries, keys], True where seen, for torch's own scaled_dot_product_attention.
    blocks: the same for FlexAttention on CUDA, which skips the blocks of scores that nobody sees.
    """

    dense: torch.Tensor | None = None
    blocks: BlockMask | None = None


def attention_mask(documents: torch.Tensor, window: int | None, seen: torch.Tensor | None = None) -> Mask:
    """The mask of one batch, to be made once per forward and window.

    Args:
        documents: int32 [rows, queries], equal within a document, -1 on padding.
        window: how many tokens back a token sees, itself included; None is all of its document.
        seen: int32 [rows, keys], the documents of all keys when queries are only the last of them (a cache); default
            `documents`.
    """
    if seen is None and documents.is_cuda:
        rows, length = documents.shape
        make = _compiled_create_block_mask()
        return Mask(blocks=make(seen_by(documents, window), rows, None, length, length, device=documents.device))
    keys = documents if seen is None else seen
    key_slots = torch.arange(keys.shape[1], device=keys.device)
    query_slots = key_slots[keys.shape[1] - documents.shape[1] :, None]
    order = key_slots <= query_slots
    if window is not None:
        order &= key_slots > query_slots - window
    return Mask(dense=((documents[:, :, None] == keys[:, None, :]) & order)[:, None])


def backend_name(device: torch.device) -> str:
    """What `attention_mask` chooses on this device, for people to read."""
    return "FlexAttention, block mask" if device.type == "cuda" else "SDPA, dense mask"


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: Mask) -> torch.Tensor:
    """softmax(q kᵀ / sqrt(head_dim), where the mask allows) v.

    Args:
        queries: [rows, heads, queries, head_dim].
        keys, values: [rows, key_value_heads, keys, head_dim]; query head h reads key head h // (heads / key_value_heads).

    Returns: [rows, heads, queries, head_dim].
    """
    grouped = queries.shape[1] != keys.shape[1]
    if mask.blocks is not None:
        compute = flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
        return compute(queries, keys, values, block_mask=mask.blocks, enable_gqa=grouped)
    assert mask.dense is not None
    if grouped and queries.is_cuda:
        # The fused CUDA kernels that take a mask want as many key heads as query heads; on a CPU grouping is quicker.
        keys, values = (_repeated(kept, queries.shape[1]) for kept in (keys, values))
    # Nothing tells the kernel that the upper triangle is empty. In pieces, each with the keys up to its own end, most of
    # that is never computed: a third of the time at 1,024 tokens on a CPU. Smaller pieces than 256 gain nothing more.
    length, before = queries.shape[2], keys.shape[2] - queries.shape[2]
    piece = max(256, -(-length // 8))
    pieces = []
    for start in range(0, length, piece):
        end = before + min(start + piece, length)
        asked, allowed = queries[:, :, start : start + piece], mask.dense[:, :, start : start + piece, :end]
        pieces.append(
            scaled_dot_product_attention(asked, keys[:, :, :end], values[:, :, :end], attn_mask=allowed, enable_gqa=grouped)
        )
    return torch.cat(pieces, dim=2) if len(pieces) > 1 else pieces[0]


def _repeated(kept: torch.Tensor, heads: int) -> torch.Tensor:
    rows, groups, length, width = kept.shape
    return kept[:, :, None].expand(rows, groups, heads // groups, length, width).reshape(rows, heads, length, width)


def seen_by(documents: torch.Tensor, window: int | None) -> Callable[..., torch.Tensor]:
    """The rule of `attention_mask`, slot by slot, as FlexAttention asks for it."""

    def seen(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        allowed = (documents[row, query] == documents[row, key]) & (query >= key)
        return allowed if window is None else allowed & (key > query - window)

    return seen


@cache
def _compiled_create_block_mask() -> Any:
    return torch.compile(create_block_mask)


@cache
def _compiled_flex_attention() -> Any:
    # Without compilation FlexAttention writes all scores out; blocks that are compiled inline the plain function.
    return torch.compile(flex_attention)
