"""From logits to a token: greedy, temperature, top-k, top-p. What a row draws is decided by one number of its own."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lmforge.data.order import mix

# A request's numbers are the stream of SplitMix64 that its seed begins: a counter in these steps, scattered by `mix`.
_STEP = 0x9E3779B97F4A7C15
# So many tokens are summed at once to find the one that is drawn: adding them up one by one takes ten times as long.
_STRETCH = 128
# Below, a temperature leaves one token to be drawn, and fp32 would soon take it for zero.
COLDEST = 1e-30


@dataclass(frozen=True)
class Sampling:
    """`temperature` 0 is greedy, and so is one below COLDEST. `top_k` 0 and `top_p` 1 leave the distribution whole."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def greedy(self) -> bool:
        return self.temperature < COLDEST


def uniforms(seed: int, count: int) -> Tensor:
    """fp64 [count], each 0 ≤ u < 1 with 53 random bits: what the tokens of a request are drawn with, one after another."""
    first = mix(np.full(1, seed % 2**64, np.uint64))
    words = mix(first + np.arange(count, dtype=np.uint64) * np.uint64(_STEP))
    return torch.from_numpy((words >> np.uint64(11)) * 2.0**-53)


def distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities fp32 [rows, vocab] after top-k, then temperature, then top-p (nucleus, arXiv 1904.09751).

    The likeliest token always stays, and so do tokens that tie with the k-th. Where the sampling is greedy it is the
    model's own distribution, whatever else is asked.
    """
    scores = logits.float()
    if sampling.greedy:
        return scores.softmax(-1)
    if 0 < sampling.top_k < scores.shape[-1]:
        kth = scores.topk(sampling.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    # The largest becomes 0, which no temperature, however low, makes infinite.
    probabilities = ((scores - scores.amax(-1, keepdim=True)) / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        beyond = ordered.cumsum(-1) - ordered >= sampling.top_p
        beyond[:, 0] = False  # whatever becomes of top_p in fp32
        probabilities = probabilities.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), 0.0)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities


def choose(logits: Tensor, sampling: Sampling, drawing: Tensor) -> tuple[Tensor, Tensor]:
    """The next token of each row, int64 [rows], and the distribution that it was drawn from, fp32 [rows, vocab].

    Greedy takes the first of the largest logits; else the token at which the probabilities, added up, pass the row's
    number in `drawing`, fp64 [rows] in [0, 1). Where the logits are no distribution (NaN, all of them -inf) some token is
    chosen, whose probability is NaN.
    """
    probabilities = distribution(logits, sampling)
    if sampling.greedy:
        return logits.argmax(-1), probabilities
    return _drawn(probabilities, drawing), probabilities


def _drawn(probabilities: Tensor, drawing: Tensor) -> Tensor:
    """The token at which each row's sum passes its number: first the stretch of tokens, then the token in it.

    Sums are fp64: in fp32 those over a large vocabulary lose the unlikely tokens to rounding.
    """
    stretches = pad(probabilities, (0, -probabilities.shape[-1] % _STRETCH)).unflatten(-1, (-1, _STRETCH))
    sums = stretches.sum(-1, dtype=torch.float64)
    reached = sums.cumsum(-1)
    goal = drawing[:, None] * reached[:, -1:]
    # Nothing passes a NaN: the last one is taken, for whoever reads its probability to find out.
    stretch = torch.searchsorted(reached, goal, right=True).clamp(max=reached.shape[-1] - 1)
    within = stretches[torch.arange(len(drawing), device=drawing.device), stretch[:, 0]].cumsum(-1, dtype=torch.float64)
    # The same numbers summed in another order may stay a rounding below the goal.
    rest = torch.minimum(goal - (reached - sums).gather(1, stretch), within[:, -1:] * (1 - 2**-52)).clamp(min=0)
    token = (stretch * _STRETCH + torch.searchsorted(within, rest, right=True))[:, 0]
    return token.clamp(max=probabilities.shape[-1] - 1)
