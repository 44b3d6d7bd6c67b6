"""What recurrent mixers share: the causal convolution, and how whole sequences come to a rank.

With context and tensor parallelism every rank computes a recurrent mixer for whole sequences, of
which it keeps its own tokens: sums over ranks are those of attention, and the work is not split.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear, pad

from lmforge.core.model.attention import AttentionMask, LayerCache
from lmforge.core.model.layers import apply_linear, local_weight
from lmforge.core.model.rng.token_rng import TokenRng
from lmforge.core.model.rope import RotaryEmbedding


def wide(x: Tensor) -> Tensor:
    """In fp32, or fp64 if it is that."""
    return x if x.dtype == torch.float64 else x.float()


class CausalConvolution(nn.Module):
    """A causal convolution of each channel by itself: weight [channels, 1, width], bias [channels]."""

    def __init__(self, channels: int, width: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def forward(self, x: Tensor, document_ids: Tensor | None, cache: LayerCache | None) -> Tensor:
        """x [sequences, length, channels] → the same shape. Tokens of other documents [sequences,
        length] count as zeros; None: all are of one, which the cache continues, if there is one.
        """
        length = x.shape[1]
        back = self.weight.shape[-1] - 1
        if cache is None:
            earlier = x.new_zeros(len(x), back, x.shape[-1])
        else:
            earlier = cache.window()
        whole = torch.cat((earlier.to(x.dtype), x), dim=1)
        if cache is not None:
            cache.keep_window(whole)
        ids = None if document_ids is None else pad(document_ids, (back, 0), value=-2)
        weight = wide(local_weight(self.weight))[:, 0]  # so that taps are added up in fp32
        total = x * weight[:, -1]
        if self.bias is not None:
            total = total + local_weight(self.bias)
        for steps in range(1, back + 1):
            shifted = whole[:, back - steps : back - steps + length]
            if ids is not None and document_ids is not None:
                same = ids[:, back - steps : back - steps + length] == document_ids
                shifted = shifted * same[..., None]
            total = total + shifted * weight[:, -1 - steps]
        return total.to(x.dtype)


def project(layer: nn.Linear, x: Tensor, token_rng: TokenRng | None) -> Tensor:
    """`layer` of plain hidden states, where tensor parallelism has its weights on every rank."""
    if isinstance(layer.weight, DTensor):
        bias = None if layer.bias is None else local_weight(layer.bias)
        return linear(x, local_weight(layer.weight), bias)
    return apply_linear(layer, x, token_rng)


class RecurrentMixer(nn.Module):
    """A mixer whose tokens read earlier ones of their document through a state of one size."""

    out_proj: nn.Linear

    def forward(
        self,
        x: Tensor,
        rotary: RotaryEmbedding,
        mask: AttentionMask,
        cache: LayerCache | None,
        token_rng: TokenRng | None = None,
    ) -> Tensor:
        """x [sequences, length, width] → the same shape and dtype; positions are in the order of
        the tokens alone.
        """
        parallel = mask.context_parallel
        if parallel is None:
            mixed = self.mix(x, mask.document_ids, cache, token_rng)
            return project(self.out_proj, mixed, token_rng)
        whole_rng = token_rng
        if token_rng is not None:
            keys = parallel.all_gather_sequence(token_rng.rng_keys, 1)
            whole_rng = replace(token_rng, rng_keys=keys)
        mixed = self.mix(parallel.all_gather_sequence(x, 1), mask.document_ids, cache, whole_rng)
        ranges = parallel.local_ranges(mixed.shape[1] // parallel.group.size())
        own = torch.cat([mixed[:, first : first + count] for first, count in ranges], dim=1)
        return project(self.out_proj, own, token_rng)

    def mix(
        self,
        x: Tensor,
        document_ids: Tensor | None,
        cache: LayerCache | None,
        token_rng: TokenRng | None,
    ) -> Tensor:
        """What `out_proj` is given, for whole sequences x [sequences, length, width]."""
        raise NotImplementedError
