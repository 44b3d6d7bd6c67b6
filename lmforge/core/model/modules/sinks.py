"""Attention with sinks, as gpt-oss has them (arXiv 2508.10925): a learned number for each head stands
beside the scores of all keys, so that a head may attend to nothing.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, flex_attention
from torch.nn.functional import pad

from lmforge.core.model.attention import (
    AttentionMask,
    LayerCache,
    attend_in_chunks,
    causal_mask,
    compiled,
    fold_heads,
    query_ranges,
)
from lmforge.core.model.blocks import Mixer
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.layers import local_weight
from lmforge.core.model.modules.decoder import Attention


class AttentionWithSinks(Attention):
    """sinks: [heads], the score of a key whose value is zero."""

    def __init__(self, config: ModelConfig, mixer: Mixer) -> None:
        super().__init__(config, mixer)
        self.sinks = nn.Parameter(torch.empty(config.num_attention_heads))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, cache: LayerCache | None
    ) -> Tensor:
        if cache is not None:
            k, v = cache.update(k, v)
        scale = self.scale or self.head_dim**-0.5
        attended = attend_with_sinks(q, k, v, mask, scale, local_weight(self.sinks))
        return attended.transpose(1, 2).flatten(2)


def attend_with_sinks(
    queries: Tensor, keys: Tensor, values: Tensor, mask: AttentionMask, scale: float, sinks: Tensor
) -> Tensor:
    """`attention.attend` with one more key of each head, whose score is its sink [heads] and whose
    value is zero. The mask is none of variable-length flash attention.
    """
    if mask.context_parallel is not None:
        keys, values = mask.context_parallel.all_gather_sequence(torch.stack((keys, values)), 3)
    if mask.block_mask is not None:
        compute = flex_attention if torch.compiler.is_compiling() else compiled(flex_attention)
        attended, aux = compute(
            queries,
            keys,
            values,
            block_mask=mask.block_mask,
            scale=scale,
            enable_gqa=queries.shape[1] != keys.shape[1],
            return_aux=AuxRequest(lse=True),
        )
        kept = (aux.lse - sinks[:, None]).sigmoid()
        return attended * kept.unsqueeze(-1).to(attended.dtype)
    if mask.groups and mask.dense_mask is not None:
        parts = (
            attend_with_sinks(
                queries[part],
                keys[part, :, slots],
                values[part, :, slots],
                AttentionMask(mask.dense_mask[part, ..., slots]),
                scale,
                sinks,
            )
            for part, slots in mask.groups
        )
        return torch.cat([*parts])
    seen = mask.dense_mask
    if seen is None:
        slots = torch.arange(keys.shape[2], device=keys.device)
        seen = causal_mask(slots, slots, None)[None, None]
    if queries.shape[2] == 1:
        return _attend_one_query(queries, keys, values, seen, scale, sinks)
    ranges = query_ranges(queries.shape[2], keys.shape[2], mask.context_parallel)
    if queries.is_cuda:  # as in `attend`
        copies = queries.shape[1] // keys.shape[1]
        keys, values = (each.repeat_interleave(copies, dim=1) for each in (keys, values))
    return _attend_with_sink_key(queries, keys, values, seen, ranges, scale, sinks)


def _attend_one_query(
    queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float, sinks: Tensor
) -> Tensor:
    """While decoding: no key is copied, and there are few scores."""
    folded = fold_heads(queries, keys.shape[1])
    scores = folded @ keys.transpose(2, 3)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    scores = scores.masked_fill(~seen, -math.inf)
    of_sinks = sinks.to(scores.dtype).view(1, keys.shape[1], -1, 1)
    scores = torch.cat((scores, of_sinks.expand(len(scores), -1, -1, -1)), dim=-1)
    weights = scores.softmax(-1)[..., :-1]
    return (weights.to(values.dtype) @ values).reshape(queries.shape)


def _attend_with_sink_key(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    ranges: list[tuple[int, int]],
    scale: float,
    sinks: Tensor,
) -> Tensor:
    """The sink is a key before the others; one more channel of queries, which is zero in all other
    keys, gives its score. Arguments as of `attend_in_chunks`.
    """
    width = queries.shape[3]
    more = 8 - width % 8  # fused CUDA kernels take multiples of 8 channels
    of_sinks = (sinks / scale).to(queries.dtype).view(1, -1, 1, 1)
    of_sinks = of_sinks.expand(len(queries), -1, queries.shape[2], -1)
    queries = torch.cat((queries, pad(of_sinks, (0, more - 1))), dim=-1)
    keys = pad(keys, (0, more, 1, 0))
    keys[:, :, 0, width] = 1
    values = pad(values, (0, more, 1, 0))
    seen = pad(seen, (1, 0), value=True)
    shifted = [(first + 1, count) for first, count in ranges]
    return attend_in_chunks(queries, keys, values, seen, shifted, scale)[..., :width]
