"""From logits to a token: greedy, temperature, top-k, top-p. What a row draws is decided by one number of its own."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lmforge.data.order import splitmix64

# A request's numbers are the stream of SplitMix64 that its seed begins: a counter in these steps, scattered by `mix`.
_SPLITMIX_INCREMENT = 0x9E3779B97F4A7C15
# So many tokens are summed at once to find the one that is drawn: adding them up one by one takes ten times as long.
_SEARCH_BLOCK = 128
# Below, a temperature leaves one token to be drawn, and fp32 would soon take it for zero.
MIN_TEMPERATURE = 1e-30


@dataclass(frozen=True)
class SamplingParams:
    """`temperature` 0 is greedy, and so is one below COLDEST. `top_k` 0 and `top_p` 1 leave the distribution whole."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE


def draw_uniforms(seed: int, count: int) -> Tensor:
    """fp64 [count], each 0 ≤ u < 1 with 53 random bits: what the tokens of a request are drawn with, one after another."""
    first = splitmix64(np.full(1, seed % 2**64, np.uint64))
    words = splitmix64(first + np.arange(count, dtype=np.uint64) * np.uint64(_SPLITMIX_INCREMENT))
    return torch.from_numpy((words >> np.uint64(11)) * 2.0**-53)


def sampling_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities fp32 [rows, vocab] after top-k, then temperature, then top-p (nucleus, arXiv 1904.09751).

    The likeliest token always stays, and so do tokens that tie with the k-th. Where the sampling is greedy it is the
    model's own distribution, whatever else is asked.
    """
    scores = logits.float()
    if params.is_greedy:
        return scores.softmax(-1)
    if 0 < params.top_k < scores.shape[-1]:
        kth = scores.topk(params.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    # The largest becomes 0, which no temperature, however low, makes infinite.
    probabilities = ((scores - scores.amax(-1, keepdim=True)) / params.temperature).softmax(-1)
    if params.top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        beyond = ordered.cumsum(-1) - ordered >= params.top_p
        beyond[:, 0] = False  # whatever becomes of top_p in fp32
        probabilities = probabilities.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), 0.0)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities


def sample_tokens(logits: Tensor, params: SamplingParams, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The next token of each row, int64 [rows], and the distribution that it was drawn from, fp32 [rows, vocab].

    Greedy takes the first of the largest logits; else the token at which the probabilities, added up, pass the row's
    number in `drawing`, fp64 [rows] in [0, 1). Where the logits are no distribution (NaN, all of them -inf) some token is
    chosen, whose probability is NaN.
    """
    probabilities = sampling_probs(logits, params)
    if params.is_greedy:
        return logits.argmax(-1), probabilities
    return _invert_cdf(probabilities, uniforms), probabilities


def _invert_cdf(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """The token at which each row's sum passes its number: first the stretch of tokens, then the token in it.

    Sums are fp64: in fp32 those over a large vocabulary lose the unlikely tokens to rounding.
    """
    stretches = pad(probabilities, (0, -probabilities.shape[-1] % _SEARCH_BLOCK)).unflatten(-1, (-1, _SEARCH_BLOCK))
    sums = stretches.sum(-1, dtype=torch.float64)
    reached = sums.cumsum(-1)
    goal = uniforms[:, None] * reached[:, -1:]
    # Nothing passes a NaN: the last one is taken, for whoever reads its probability to find out.
    stretch = torch.searchsorted(reached, goal, right=True).clamp(max=reached.shape[-1] - 1)
    within = stretches[torch.arange(len(uniforms), device=uniforms.device), stretch[:, 0]].cumsum(-1, dtype=torch.float64)
    # The same numbers summed in another order may stay a rounding below the goal.
    rest = torch.minimum(goal - (reached - sums).gather(1, stretch), within[:, -1:] * (1 - 2**-52)).clamp(min=0)
    token = (stretch * _SEARCH_BLOCK + torch.searchsorted(within, rest, right=True))[:, 0]
    return token.clamp(max=probabilities.shape[-1] - 1)
