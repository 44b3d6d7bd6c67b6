"""Attention: which tokens see which, and the one place where scores are computed.

A mask is made once per forward from the document ids of a batch and passed to every block. A token sees itself and the
earlier tokens of its own document, at most `window` of them. Padding is a document like any other (its id is -1): it
sees itself, so that no row of scores is empty and nothing becomes NaN.
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
    """How each sequence is split over ranks (context parallel), and what attention needs to know of it."""

    def shard_batch(self, batch: Batch) -> Batch:
        """This rank's tokens of each sequence."""

    def local_ranges(self, local_length: int) -> list[tuple[int, int]]:
        """(slot in the full sequence of its first token, tokens) of each contiguous range of the local tokens."""

    def all_gather_sequence(self, local: torch.Tensor, dim: int) -> torch.Tensor:
        """`local` of every rank, concatenated along `dim` in the order of the sequence. Differentiable."""


@dataclass(frozen=True)
class AttentionMask:
    """Which keys each query sees, in the form that the backend of this device takes; one of the two masks is set.

    dense_mask: bool [sequences, 1, queries, keys], True where seen, for torch's scaled_dot_product_attention.
    block_mask: the same for FlexAttention on CUDA, which skips blocks of scores that are masked throughout.
    context_parallel: set where only the keys and values of this rank's tokens are local.
    """

    dense_mask: torch.Tensor | None = None
    block_mask: BlockMask | None = None
    context_parallel: SequenceSharder | None = None


def create_attention_mask(
    document_ids: torch.Tensor, window: int | None, context_parallel: SequenceSharder | None = None
) -> AttentionMask:
    """The mask of one batch, to be made once per forward and window.

    Args:
        document_ids: int32 [sequences, queries], equal within a document, -1 on padding.
        window: how many tokens back a token sees, itself included; None is all of its document.
        context_parallel: set where the queries are a part of each sequence, and the keys are all of it.
    """
    keys = document_ids if context_parallel is None else context_parallel.all_gather_sequence(document_ids, 1)
    (sequences, length), slots = document_ids.shape, torch.arange(keys.shape[1], device=keys.device)
    ranges = _query_ranges(length, len(slots), context_parallel)
    query_slots = torch.cat([slots[first : first + count] for first, count in ranges])
    if document_ids.is_cuda:
        mask_mod = document_mask_mod(document_ids, keys, query_slots, window)
        block_mask = _compiled_create_block_mask()(mask_mod, sequences, None, length, len(slots), device=keys.device)
        return AttentionMask(block_mask=block_mask, context_parallel=context_parallel)
    seen = slots <= query_slots[:, None]
    if window is not None:
        seen &= slots > query_slots[:, None] - window
    seen = (document_ids[:, :, None] == keys[:, None, :]) & seen
    return AttentionMask(dense_mask=seen[:, None], context_parallel=context_parallel)


def create_cache_mask(positions: torch.Tensor, slots: torch.Tensor, window: int | None) -> AttentionMask:
    """The mask of a forward pass with a cache, where the key of a sequence's token at position p is in slot p.

    positions: int64 [sequences, queries]; slots: int64 [keys], their numbers from 0.
    """
    seen = slots <= positions[:, :, None]
    if window is not None:
        seen &= slots > positions[:, :, None] - window
    return AttentionMask(dense_mask=seen[:, None])


def _query_ranges(num_queries: int, num_keys: int, context_parallel: SequenceSharder | None) -> list[tuple[int, int]]:
    """The slots of the queries as ranges (first, count): the last of all keys, or with context parallel some of them."""
    return [(num_keys - num_queries, num_queries)] if context_parallel is None else context_parallel.local_ranges(num_queries)


def attention_backend_name(device: torch.device) -> str:
    """The backend that `create_attention_mask` chooses on this device, for logs."""
    return "FlexAttention, block mask" if device.type == "cuda" else "SDPA, dense mask"


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
    """softmax(q kᵀ / sqrt(head_dim), where the mask allows) v.

    Args:
        queries: [sequences, heads, queries, head_dim].
        keys, values: [sequences, key_value_heads, keys, head_dim]; query head h reads key head h // (heads / key_value_heads).

    Returns: [sequences, heads, queries, head_dim].
    """
    grouped = queries.shape[1] != keys.shape[1]
    if mask.context_parallel is not None:
        keys, values = mask.context_parallel.all_gather_sequence(torch.stack((keys, values)), 3)
    if mask.block_mask is not None:
        compute = flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
        return compute(queries, keys, values, block_mask=mask.block_mask, enable_gqa=grouped)
    assert mask.dense_mask is not None
    if grouped and queries.is_cuda:
        # The fused CUDA kernels that take a mask need as many key heads as query heads; on a CPU grouping is faster.
        copies = queries.shape[1] // keys.shape[1]
        keys, values = (each.repeat_interleave(copies, dim=1) for each in (keys, values))
    # Nothing tells the kernel that the upper triangle is empty. In chunks, each with the keys up to its own end, most of it is
    # never computed: a third of the time at 1,024 tokens on a CPU. Chunks below 256 queries are not faster.
    chunks, done = [], 0
    for first, count in _query_ranges(queries.shape[2], keys.shape[2], mask.context_parallel):
        chunk = max(256, -(-count // 8))
        for start in range(0, count, chunk):
            stop = min(start + chunk, count)
            part, end = slice(done + start, done + stop), first + stop
            q, k, v, seen = queries[:, :, part], keys[:, :, :end], values[:, :, :end], mask.dense_mask[:, :, part, :end]
            chunks.append(scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=grouped))
        done += count
    return torch.cat(chunks, dim=2) if len(chunks) > 1 else chunks[0]


def document_mask_mod(
    query_document_ids: torch.Tensor, key_document_ids: torch.Tensor, query_slots: torch.Tensor, window: int | None
) -> Callable[..., torch.Tensor]:
    """The rule of `create_attention_mask` as FlexAttention takes it; `query_slots` [queries] are the slots of the queries."""

    def seen(sequence: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        same_document = query_document_ids[sequence, query] == key_document_ids[sequence, key]
        allowed = same_document & (query_slots[query] >= key)
        return allowed if window is None else allowed & (key > query_slots[query] - window)

    return seen


@cache
def _compiled_create_block_mask() -> Any:
    return torch.compile(create_block_mask)


@cache
def _compiled_flex_attention() -> Any:
    # Without compilation FlexAttention materializes all scores; compiled blocks inline the plain function.
    return torch.compile(flex_attention)
