"""Attention with a dense mask, in chunks of queries: the path of CPUs. attention.py chooses it."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lmforge.model.attention_backend import stores_attention_weights


def attend_in_chunks(
    queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, ranges: Sequence[tuple[int, int]], scale: float | None
) -> Tensor:
    """As `attention.attend`, where `seen` bool [sequences, 1, queries, keys]; `ranges` are the slots of the queries.

    The kernel does not know that the upper triangle is masked. With chunks of queries, each with the keys up to its end, most
    of it is skipped: a third of the time at 1,024 tokens on a CPU. Chunks below 256 queries are not faster.
    """
    grouped, compiling = queries.shape[1] != keys.shape[1], torch.compiler.is_compiling()
    stores_weights = stores_attention_weights(queries.dtype, keys.shape[2], on_gpu=queries.is_cuda, compiled=compiling)
    chunks, done = [], 0
    for first, count in ranges:
        chunk = max(256, -(-count // 8))
        for start in range(0, count, chunk):
            stop = min(start + chunk, count)
            part, end = slice(done + start, done + stop), first + stop
            q, k, v, mask = queries[:, :, part], keys[:, :, :end], values[:, :, :end], seen[:, :, part, :end]
            if stores_weights:
                folded = fold_heads(q, k.shape[1])
                chunks.append(_AttendStoringWeights.apply(folded, k, v, mask, scale or q.shape[-1] ** -0.5).reshape(q.shape))
            else:
                chunks.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped))
        done += count
    return torch.cat(chunks, dim=2) if len(chunks) > 1 else chunks[0]


def fold_heads(queries: Tensor, num_key_heads: int) -> Tensor:
    """The query heads of a key head as queries of one head: [sequences, key_value_heads, heads of each · queries, head_dim]."""
    return queries.reshape(len(queries), num_key_heads, -1, queries.shape[3])


class _AttendStoringWeights(torch.autograd.Function):
    """softmax(q kᵀ · scale, where seen) v, with the weights in bf16 stored for the backward pass: a product less than flash.

    Queries as of `fold_heads`; keys and values [sequences, key_value_heads, keys, head_dim]; `seen` [sequences, 1, queries,
    keys]. Scores are rounded to bf16, by no more than rounding queries and keys has changed them.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
        scores = (queries @ keys.transpose(2, 3)).unflatten(2, (-1, seen.shape[2])).float() * scale
        weights = scores.masked_fill(~seen[:, :, None], -math.inf).softmax(-1).to(values.dtype).flatten(2, 3)
        ctx.save_for_backward(queries, keys, values, weights)
        ctx.scale = scale
        return weights @ values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        queries, keys, values, weights = ctx.saved_tensors
        of_weights = (gradient @ values.transpose(2, 3)).float()
        mean = (weights * of_weights).sum(-1, keepdim=True)
        of_scores = ((of_weights - mean) * weights * ctx.scale).to(weights.dtype)
        return of_scores @ keys, of_scores.transpose(2, 3) @ queries, weights.transpose(2, 3) @ gradient, None, None
