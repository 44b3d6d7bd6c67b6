"""Attention: which tokens attend to which, the computation of attention, and the KV cache.

A mask is made once per forward from the document ids of a batch and passed to every block. A token
sees itself and the earlier tokens of its own document, at most `window` of them. Padding is treated
as a document with id -1 that sees itself, so that no row of scores is empty, which would give NaN.

Context parallelism: each rank has a part of every sequence, and attention gathers keys and values
of the other ranks. All-gather rather than a ring: with grouped heads keys and values are few,
documents and windows need no special case, and it is one collective a block (Llama 3, arXiv
2407.21783, section 3.3.2). A sequence is cut into twice as many pieces as there are ranks; rank r
gets the r-th from either end. Under a causal mask that is equal work for all ranks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from lmforge.core.data.batch import Batch
from lmforge.core.distributed.memory import check_fits
from lmforge.core.model.attention_backend import (
    DENSE,
    VARLEN,
    VARLEN_OPTIONS,
    attention_backend,
    stores_attention_weights,
)
from lmforge.core.model.config import ModelConfig

# Differentiable, and works when compiled. Its name changed with torch 2.13.
_all_gather: Any = (
    getattr(collectives, "all_gather_single_autograd", None)
    or collectives.all_gather_tensor_autograd
)


_reduce_scatter: Any = (
    getattr(collectives, "reduce_scatter_single_autograd", None)
    or collectives.reduce_scatter_tensor_autograd
)


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that split sequences."""

    group: dist.ProcessGroup

    def shard_batch(self, batch: Batch) -> Batch:
        """This rank's tokens of each sequence: [sequences, length / ranks].

        The length divides by twice the ranks.
        """
        full = replace(batch, document_starts=None)  # they describe full sequences
        return full.map(lambda tensor: self.own_tokens(tensor, 1))

    def own_tokens(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor of full sequences along `dim`."""
        ranges = self.local_ranges(whole.shape[dim] // self.group.size())
        return torch.cat([whole.narrow(dim, first, count) for first, count in ranges], dim)

    def local_ranges(self, local_length: int) -> list[tuple[int, int]]:
        """(index of the first token in the full sequence, number of tokens) of this rank's two
        pieces.
        """
        piece = local_length // 2
        rank = self.group.rank()
        return [(rank * piece, piece), ((2 * self.group.size() - 1 - rank) * piece, piece)]

    def all_gather_sequence(self, local: Tensor, dim: int) -> Tensor:
        """The `local` tensors of all ranks along `dim`, in the order of the full sequence.

        Gradients are summed over ranks.
        """
        gathered = _all_gather(local.contiguous(), dim, self.group)
        pieces = gathered.unflatten(dim, (self.group.size(), 2, -1))
        from_start, from_end = pieces.unbind(dim + 1)
        ordered = torch.cat([from_start, from_end.flip(dim)], dim=dim)
        return ordered.flatten(dim, dim + 1)

    def reduce_scatter_sequence(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part along `dim` of the sum over ranks of tensors of full sequences."""
        pieces = whole.unflatten(dim, (2, self.group.size(), -1))
        from_start, from_end = pieces.unbind(dim)
        by_rank = torch.stack([from_start, from_end.flip(dim)], dim + 1)
        ordered = by_rank.flatten(dim, dim + 2).contiguous()
        result: Tensor = _reduce_scatter(ordered, "sum", dim, self.group)
        return result


@dataclass(frozen=True)
class AttentionMask:
    """Which keys each query sees, in the form that the attention backend takes.

    At most one of the masks is set. Without a mask, attention is causal over all tokens.

    dense_mask: bool [sequences, 1, queries, keys], True where seen, for torch's
    scaled_dot_product_attention.
    block_mask: the same for FlexAttention on CUDA, which skips blocks of scores that are masked
    throughout.
    cu_seqlens: for variable-length flash attention, as of `cumulative_lengths`; a token sees at
    most `window` of its document.
    context_parallel: set where only the keys and values of this rank's tokens are local.
    document_ids: int32 of whole sequences, for recurrent layers; None: each is one document.
    groups: (sequences, slots) of the keys that are read for them, where those of other slots are
    masked; () reads all.
    """

    dense_mask: Tensor | None = None
    block_mask: BlockMask | None = None
    cu_seqlens: Tensor | None = None
    window: int | None = None
    context_parallel: ContextParallel | None = None
    document_ids: Tensor | None = None
    groups: tuple[tuple[slice, slice], ...] = ()


def create_attention_mask(
    document_ids: Tensor,
    window: int | None,
    context_parallel: ContextParallel | None = None,
    *,
    document_starts: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 64,
    sinks: bool = False,
) -> AttentionMask:
    """The mask of one batch, to be made once per forward and window.

    Args:
        document_ids: int32 [sequences, queries], equal within a document, -1 on padding.
        window: how many tokens back a token sees, itself included; None is all of its document.
        context_parallel: set where the queries are a part of each sequence, and the keys are all of
        it.
        document_starts: as in Batch; without them variable-length flash attention is not used.
        dtype, head_dim: of the queries and keys that it is for, which decide the backend on a GPU,
        as does whether attention has `sinks`.
    """
    backend = attention_backend(
        document_ids.device,
        dtype,
        head_dim,
        context_parallel=context_parallel is not None,
        sinks=sinks,
    ).name
    if backend == VARLEN and document_starts is not None:
        return AttentionMask(
            cu_seqlens=cumulative_lengths(document_starts, document_ids.shape[1]), window=window
        )
    keys = (
        document_ids
        if context_parallel is None
        else context_parallel.all_gather_sequence(document_ids, 1)
    )
    (sequences, length), slots = document_ids.shape, torch.arange(keys.shape[1], device=keys.device)
    ranges = query_ranges(length, len(slots), context_parallel)
    query_slots = torch.cat([slots[first : first + count] for first, count in ranges])
    if backend != DENSE:
        mask_mod = document_mask_mod(document_ids, keys, query_slots, window)
        block_mask = compiled(create_block_mask)(
            mask_mod, sequences, None, length, len(slots), device=keys.device
        )
        return AttentionMask(block_mask=block_mask, context_parallel=context_parallel)
    seen = (document_ids[:, :, None] == keys[:, None, :]) & causal_mask(query_slots, slots, window)
    return AttentionMask(dense_mask=seen[:, None], context_parallel=context_parallel)


def cumulative_lengths(document_starts: Tensor, length: int) -> Tensor:
    """Where the documents of a batch begin among all its tokens, then their number: int32
    [sequences · documents + 1].

    `document_starts` int32 [sequences, documents], as in Batch; `length` of the sequences. What
    pads a sequence's starts becomes empty documents at its end, so that the length depends on the
    shape alone: nothing is recompiled for a batch.
    """
    sequences = len(document_starts)
    firsts = torch.arange(
        0, sequences * length, length, dtype=torch.int32, device=document_starts.device
    )
    starts = document_starts.clamp(max=length) + firsts[:, None]
    cu_seqlens = torch.cat([starts.flatten(), starts.new_full((1,), sequences * length)])
    torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)
    return cu_seqlens


def causal_mask(queries: Tensor, slots: Tensor, window: int | None) -> Tensor:
    """bool [..., queries, slots]: a token in slot `queries` [...] sees the `slots` [slots] up to
    its own, at most `window`.
    """
    seen = slots <= queries[..., None]
    return seen if window is None else seen & (slots > queries[..., None] - window)


def query_ranges(
    num_queries: int, num_keys: int, context_parallel: ContextParallel | None
) -> list[tuple[int, int]]:
    """The slots of the queries as ranges (first, count): the last of all keys, or with context
    parallel some of them.
    """
    return (
        [(num_keys - num_queries, num_queries)]
        if context_parallel is None
        else context_parallel.local_ranges(num_queries)
    )


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: AttentionMask, scale: float | None = None
) -> Tensor:
    """softmax(scale · q kᵀ, where the mask allows) v; by default `scale` is 1 / sqrt(head_dim).

    Args:
        queries: [sequences, heads, queries, head_dim].
        keys, values: [sequences, key_value_heads, keys, head_dim]; query head h reads key head h //
        (heads / key_value_heads).

    Returns: [sequences, heads, queries, head_dim].
    """
    grouped = queries.shape[1] != keys.shape[1]
    if mask.cu_seqlens is not None:
        from torch.nn.attention.varlen import varlen_attn  # imported when this backend was chosen

        length = queries.shape[2]
        left = -1 if mask.window is None else mask.window - 1
        q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (queries, keys, values))
        attended: Any = varlen_attn(
            q,
            k,
            v,
            mask.cu_seqlens,
            mask.cu_seqlens,
            length,
            length,
            scale=scale,
            window_size=(left, 0),
            **VARLEN_OPTIONS,
        )
        return attended.unflatten(0, (-1, length)).transpose(1, 2)
    if mask.context_parallel is not None:
        keys, values = mask.context_parallel.all_gather_sequence(torch.stack((keys, values)), 3)
    if mask.block_mask is not None:
        # Without compilation FlexAttention materializes all scores; compiled blocks inline the
        # plain function.
        compute = flex_attention if torch.compiler.is_compiling() else compiled(flex_attention)
        return compute(
            queries, keys, values, block_mask=mask.block_mask, scale=scale, enable_gqa=grouped
        )
    if mask.groups and mask.dense_mask is not None:
        parts = (
            attend(
                queries[part],
                keys[part, :, slots],
                values[part, :, slots],
                AttentionMask(mask.dense_mask[part, ..., slots]),
                scale,
            )
            for part, slots in mask.groups
        )
        return torch.cat([*parts])
    if grouped and queries.shape[2] == 1 and mask.dense_mask is not None:
        # Decoding: each key is read once and none is copied.
        folded = fold_heads(queries, keys.shape[1])
        seen = mask.dense_mask.expand(-1, -1, folded.shape[2], -1)
        return scaled_dot_product_attention(
            folded, keys, values, attn_mask=seen, scale=scale
        ).reshape(queries.shape)
    if (
        grouped
        and queries.is_cuda
        and (mask.dense_mask is not None or queries.dtype == torch.float32)
    ):
        # The fused CUDA kernels that take a mask, or fp32, need as many key heads as query heads;
        # on a CPU grouping is faster.
        copies = queries.shape[1] // keys.shape[1]
        grouped = False
        keys, values = (each.repeat_interleave(copies, dim=1) for each in (keys, values))
    if mask.dense_mask is None:
        return scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=scale, enable_gqa=grouped
        )
    ranges = query_ranges(queries.shape[2], keys.shape[2], mask.context_parallel)
    return attend_in_chunks(queries, keys, values, mask.dense_mask, ranges, scale)


def attend_in_chunks(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    ranges: Sequence[tuple[int, int]],
    scale: float | None,
) -> Tensor:
    """Attention on a CPU in chunks of queries, where `seen` bool [sequences, 1, queries, keys];
    `ranges` are the slots of the queries; else as `attend`.

    The kernel does not know that the upper triangle is masked. With chunks of queries, each with
    the keys up to its end, most of it is skipped: a third of the time at 1,024 tokens on a CPU.
    Chunks below 256 queries are not faster.
    """
    grouped = queries.shape[1] != keys.shape[1]
    compiling = torch.compiler.is_compiling()
    stores_weights = stores_attention_weights(
        queries.dtype, keys.shape[2], on_gpu=queries.is_cuda, compiled=compiling
    )
    chunks = []
    done = 0
    for first, count in ranges:
        chunk = max(256, -(-count // 8))
        for start in range(0, count, chunk):
            stop = min(start + chunk, count)
            part = slice(done + start, done + stop)
            end = first + stop
            q = queries[:, :, part]
            k = keys[:, :, :end]
            v = values[:, :, :end]
            mask = seen[:, :, part, :end]
            if stores_weights:
                folded = fold_heads(q, k.shape[1])
                chunks.append(
                    _AttendStoringWeights.apply(
                        folded, k, v, mask, scale or q.shape[-1] ** -0.5
                    ).reshape(q.shape)
                )
            else:
                chunks.append(
                    scaled_dot_product_attention(
                        q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped
                    )
                )
        done += count
    return torch.cat(chunks, dim=2) if len(chunks) > 1 else chunks[0]


def fold_heads(queries: Tensor, num_key_heads: int) -> Tensor:
    """The query heads of a key head as queries of one head: [sequences, key_value_heads, heads of
    each · queries, head_dim].
    """
    return queries.reshape(len(queries), num_key_heads, -1, queries.shape[3])


class _AttendStoringWeights(torch.autograd.Function):
    """softmax(q kᵀ · scale, where seen) v, with the weights in bf16 stored for the backward pass: a
    product less than flash.

    Queries as of `fold_heads`; keys and values [sequences, key_value_heads, keys, head_dim]; `seen`
    [sequences, 1, queries, keys]. Scores are rounded to bf16, by no more than rounding queries and
    keys has changed them.
    """

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float
    ) -> Tensor:
        scores = (queries @ keys.transpose(2, 3)).unflatten(2, (-1, seen.shape[2])).float() * scale
        weights = (
            scores.masked_fill(~seen[:, :, None], -math.inf)
            .softmax(-1)
            .to(values.dtype)
            .flatten(2, 3)
        )
        ctx.save_for_backward(queries, keys, values, weights)
        ctx.scale = scale
        return weights @ values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        queries, keys, values, weights = ctx.saved_tensors
        of_weights = (gradient @ values.transpose(2, 3)).float()
        mean = (weights * of_weights).sum(-1, keepdim=True)
        of_scores = ((of_weights - mean) * weights * ctx.scale).to(weights.dtype)
        return (
            of_scores @ keys,
            of_scores.transpose(2, 3) @ queries,
            weights.transpose(2, 3) @ gradient,
            None,
            None,
        )


def document_mask_mod(
    query_document_ids: Tensor, key_document_ids: Tensor, query_slots: Tensor, window: int | None
) -> Callable[..., Tensor]:
    """The rule of `create_attention_mask` as FlexAttention takes it; `query_slots` [queries] are
    the slots of the queries.
    """

    def seen(sequence: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same_document = query_document_ids[sequence, query] == key_document_ids[sequence, key]
        allowed = same_document & (query_slots[query] >= key)
        return allowed if window is None else allowed & (key > query_slots[query] - window)

    return seen


@cache
def compiled(function: Callable[..., Any]) -> Any:
    """The function, compiled when it is first called."""
    return torch.compile(function)


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences start … stop − 1, which have `shortest` to `longest` tokens before this step."""

    start: int
    stop: int
    shortest: int
    longest: int


class LayerCache:
    """What one layer keeps of the sequences of a forward pass: keys and values of earlier tokens, or
    the states of a recurrent layer.

    A plain object: FSDP's mixed precision casts the tensors of dataclasses, and what is kept must be
    written into the cache itself.
    """

    def __init__(
        self,
        kept: Sequence[Tensor],
        part: slice,
        sequences: Tensor,
        positions: Tensor,
        end: int,
        groups: Sequence[DecodeGroup],
        lengths: Tensor | None,
    ) -> None:
        """kept: what `KVCache` has for the layer, of which `part` are these sequences, with the
        numbers `sequences` [sequences, 1] there. `end` and `lengths` as in `KVCache.view`.
        """
        self._kept = kept
        self._part = part
        self._sequences = sequences
        self._positions = positions
        self._end = end
        self._groups = groups
        self._lengths = lengths

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values of new tokens, [sequences, key_value_heads, length, head_dim].

        Returns views of all tokens so far.
        """
        kept_keys, kept_values = (each[self._part, :, : self._end] for each in self._kept)
        for kept, new in ((kept_keys, keys), (kept_values, values)):
            kept[self._sequences, :, self._positions] = new.transpose(1, 2).to(kept.dtype)
        return kept_keys, kept_values

    def window(self) -> Tensor:
        """The tokens [sequences, tokens, channels] that a convolution still sees; zeros for new
        sequences.
        """
        return self._kept[0][self._part] * (self._positions[:, 0] > 0)[:, None, None]

    def state(self) -> Tensor:
        """The state of a recurrent layer; zeros for new sequences."""
        return self._kept[1][self._part] * (self._positions[:, 0] > 0)[:, None, None, None]

    def keep_window(self, whole: Tensor) -> None:
        """Keep the last tokens that are not padding of `whole` [sequences, tokens, channels]: those
        of `window`, then new ones.
        """
        kept = self._kept[0]
        width = kept.shape[1]
        lengths = torch.full_like(self._positions[:, 0], whole.shape[1] - width)
        if self._lengths is not None:
            lengths = self._lengths
        last = lengths[:, None] + torch.arange(width, device=whole.device)
        kept[self._part] = whole.gather(1, last[..., None].expand(-1, -1, whole.shape[2])).to(
            kept.dtype
        )

    def keep_state(self, state: Tensor) -> None:
        self._kept[1][self._part] = state

    def is_token(self) -> Tensor:
        """bool [sequences, length]: which tokens are not padding."""
        length = self._positions.shape[1]
        if self._lengths is None:
            return torch.ones_like(self._positions, dtype=torch.bool)
        return torch.arange(length, device=self._lengths.device) < self._lengths[:, None]

    def mask(self, window: int | None) -> AttentionMask:
        """A token sees the slots of its sequence up to its own, at most `window` of them."""
        # New sequences have no earlier tokens.
        if window is None and self._positions.shape[1] == self._end:
            return AttentionMask()
        slots = torch.arange(self._end, device=self._positions.device)
        first_slots = (
            0 if window is None else max(0, each.shortest + 1 - window) for each in self._groups
        )
        groups = tuple(
            (slice(each.start, each.stop), slice(first, each.longest + 1))
            for each, first in zip(self._groups, first_slots, strict=True)
        )
        return AttentionMask(
            dense_mask=causal_mask(self._positions, slots, window)[:, None], groups=groups
        )


class KVCache:
    """What layers keep of earlier tokens, so that generation computes each token once: keys and
    values, or the states of recurrent layers.

    `max_length` slots for each of `batch_size` sequences, allocated at once and filled by the
    model's forward: keys and values of the token at position p are in slot p. Sequences have
    different lengths, and those in use are always the first ones, so that a decoding step reads and
    writes one block of memory. Raises UserError where the model cannot compute that many tokens
    (learned positions), or the device has no memory for them.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        max_length: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        config.check_length(max_length)
        heads = config.num_key_value_heads, max_length, config.head_dim
        # States are at least fp32.
        wide = torch.promote_types(dtype, torch.float32)
        shapes = [
            ((heads, dtype),) * 2
            if block.attends
            else [*zip(block.states, (dtype, wide), strict=False)]
            for block in config.blocks
        ]
        needed = sum(math.prod(shape) * each.itemsize for layer in shapes for shape, each in layer)
        what = f"a KV cache of {batch_size:,} sequences of {max_length:,} tokens"
        way = "generate fewer tokens, or decode fewer sequences at once"
        check_fits(batch_size * needed, torch.device(device), what, way)
        # Zeros: attention still multiplies masked slots, by 0.
        self.layers = [
            [torch.zeros((batch_size, *shape), device=device, dtype=each) for shape, each in layer]
            for layer in shapes
        ]
        self.max_length = max_length

    def view(
        self,
        first: int,
        positions: Tensor,
        end: int,
        groups: Sequence[DecodeGroup] = (),
        lengths: Tensor | None = None,
    ) -> list[LayerCache]:
        """The cache of each block for a forward pass over tokens at `positions` int64 [sequences,
        length] of the sequences from `first` on.

        `end` is one more than the largest position. The positions of a sequence are consecutive;
        what pads a shorter one at the right is written to slots that its later tokens overwrite.
        `lengths` int64 [sequences]: without padding; None: there is none. `groups`, if any, are all
        sequences: attention reads the keys of each up to its longest only.
        """
        if end > self.max_length:
            raise ValueError(f"the cache has {self.max_length} slots and {end} tokens")
        part = slice(first, first + len(positions))
        sequences = torch.arange(len(positions), device=positions.device)[:, None]
        return [
            LayerCache(kept, part, sequences, positions, end, groups, lengths)
            for kept in self.layers
        ]

    def copy_sequences(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy sequences over other sequences."""
        for kept in self.layers:
            for each in kept:
                each[list(targets)] = each[list(sources)]
