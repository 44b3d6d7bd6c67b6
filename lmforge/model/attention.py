"""Attention: who sees whom, and the one place where scores are computed.

A mask is made once per forward from the documents of a batch and handed to every block. A token sees itself and the
earlier tokens of its own document, at most `window` of them. Padding is a document like any other (its id is -1): it
sees itself, so no row of scores is empty and nothing becomes NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from lmforge.data.batch import Batch


class SequenceSharder(Protocol):
    """How each row is shared out over ranks (context parallel), and what attention needs to know of it."""

    def shard_batch(self, batch: Batch) -> Batch:
        """This rank's tokens of each row."""

    def local_ranges(self, local_length: int) -> list[tuple[int, int]]:
        """(slot of its first token in the whole row, tokens) of each contiguous stretch of the `length` tokens here."""

    def all_gather_sequence(self, local: torch.Tensor, dim: int) -> torch.Tensor:
        """`part` of every rank along `dimension`, put together in the order of the row. Differentiable."""


@dataclass(frozen=True)
class AttentionMask:
    """Which keys each query sees, in the form that the backend on this device wants; `dense` or `blocks` is set.

    dense: bool [rows, 1, queries, keys], True where seen, for torch's own scaled_dot_product_attention.
    blocks: the same for FlexAttention on CUDA, which skips the blocks of scores that nobody sees.
    context: set where keys and values are here for the tokens of this rank only.
    """

    dense_mask: torch.Tensor | None = None
    block_mask: BlockMask | None = None
    context_parallel: SequenceSharder | None = None


def create_attention_mask(
    document_ids: torch.Tensor, window: int | None, context_parallel: SequenceSharder | None = None
) -> AttentionMask:
    """The mask of one batch, to be made once per forward and window.

    Args:
        documents: int32 [rows, queries], equal within a document, -1 on padding.
        window: how many tokens back a token sees, itself included; None is all of its document.
        context: set where the queries are a share of each row, and the keys are all of it.
    """
    keys = document_ids if context_parallel is None else context_parallel.all_gather_sequence(document_ids, 1)
    slots = torch.arange(keys.shape[1], device=keys.device)
    asked = torch.cat(
        [slots[first : first + count] for first, count in _query_ranges(document_ids.shape[1], slots.numel(), context_parallel)]
    )
    if document_ids.is_cuda:
        rows, length = document_ids.shape
        make = _compiled_create_block_mask()
        rule = document_mask_mod(document_ids, keys, asked, window)
        return AttentionMask(
            block_mask=make(rule, rows, None, length, slots.numel(), device=document_ids.device),
            context_parallel=context_parallel,
        )
    order = slots <= asked[:, None]
    if window is not None:
        order &= slots > asked[:, None] - window
    return AttentionMask(
        dense_mask=((document_ids[:, :, None] == keys[:, None, :]) & order)[:, None], context_parallel=context_parallel
    )


def create_cache_mask(positions: torch.Tensor, slots: torch.Tensor, window: int | None) -> AttentionMask:
    """The mask of a forward pass with a cache, in which the key of a row's token at position p is in slot p.

    positions: int64 [rows, queries]; slots: int64 [keys], their numbers from 0.
    """
    seen = slots <= positions[:, :, None]
    if window is not None:
        seen &= slots > positions[:, :, None] - window
    return AttentionMask(dense_mask=seen[:, None])


def _query_ranges(num_queries: int, num_keys: int, context_parallel: SequenceSharder | None) -> list[tuple[int, int]]:
    """Which slots the queries are at, as stretches of (first, count): the last of all keys, or a share of them."""
    return [(num_keys - num_queries, num_queries)] if context_parallel is None else context_parallel.local_ranges(num_queries)


def attention_backend_name(device: torch.device) -> str:
    """What `attention_mask` chooses on this device, for people to read."""
    return "FlexAttention, block mask" if device.type == "cuda" else "SDPA, dense mask"


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
    """softmax(q kᵀ / sqrt(head_dim), where the mask allows) v.

    Args:
        queries: [rows, heads, queries, head_dim].
        keys, values: [rows, key_value_heads, keys, head_dim]; query head h reads key head h // (heads / key_value_heads).

    Returns: [rows, heads, queries, head_dim].
    """
    grouped = queries.shape[1] != keys.shape[1]
    if mask.context_parallel is not None:
        keys, values = mask.context_parallel.all_gather_sequence(torch.stack((keys, values)), 3)
    if mask.block_mask is not None:
        compute = flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
        return compute(queries, keys, values, block_mask=mask.block_mask, enable_gqa=grouped)
    assert mask.dense_mask is not None
    if grouped and queries.is_cuda:
        # The fused CUDA kernels that take a mask want as many key heads as query heads; on a CPU grouping is quicker.
        keys, values = (_repeat_kv(kept, queries.shape[1]) for kept in (keys, values))
    # Nothing tells the kernel that the upper triangle is empty. In pieces, each with the keys up to its own end, most of
    # that is never computed: a third of the time at 1,024 tokens on a CPU. Smaller pieces than 256 gain nothing more.
    pieces, done = [], 0
    for first, count in _query_ranges(queries.shape[2], keys.shape[2], mask.context_parallel):
        piece = max(256, -(-count // 8))
        for start in range(0, count, piece):
            stop = min(start + piece, count)
            here, end = slice(done + start, done + stop), first + stop
            asked, allowed = queries[:, :, here], mask.dense_mask[:, :, here, :end]
            pieces.append(
                scaled_dot_product_attention(asked, keys[:, :, :end], values[:, :, :end], attn_mask=allowed, enable_gqa=grouped)
            )
        done += count
    return torch.cat(pieces, dim=2) if len(pieces) > 1 else pieces[0]


def _repeat_kv(keys_or_values: torch.Tensor, num_heads: int) -> torch.Tensor:
    rows, groups, length, width = keys_or_values.shape
    return (
        keys_or_values[:, :, None]
        .expand(rows, groups, num_heads // groups, length, width)
        .reshape(rows, num_heads, length, width)
    )


def document_mask_mod(
    query_document_ids: torch.Tensor, key_document_ids: torch.Tensor, query_slots: torch.Tensor, window: int | None
) -> Callable[..., torch.Tensor]:
    """The rule of `attention_mask`, query by key, as FlexAttention asks for it; `slots` [queries] says where queries are."""

    def seen(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        allowed = (query_document_ids[row, query] == key_document_ids[row, key]) & (query_slots[query] >= key)
        return allowed if window is None else allowed & (key > query_slots[query] - window)

    return seen


@cache
def _compiled_create_block_mask() -> Any:
    return torch.compile(create_block_mask)


@cache
def _compiled_flex_attention() -> Any:
    # Without compilation FlexAttention writes all scores out; blocks that are compiled inline the plain function.
    return torch.compile(flex_attention)
