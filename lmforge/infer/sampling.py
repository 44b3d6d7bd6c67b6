"""From logits to a token: greedy, temperature, top-k, top-p. Each row draws from a generator of its own."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """`temperature` 0 is greedy. `top_k` 0 and `top_p` 1 leave the distribution whole."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


def filtered_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities fp32 [rows, vocab] after top-k, then temperature, then top-p (nucleus, arXiv 1904.09751).

    The likeliest token always stays, and so do tokens that tie with the k-th. `temperature` must be above 0.
    """
    scores = logits.float()
    if 0 < sampling.top_k < scores.shape[-1]:
        kth = scores.topk(sampling.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    # The largest becomes 0, which no temperature, however low, makes infinite.
    probabilities = ((scores - scores.amax(-1, keepdim=True)) / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        beyond = ordered.cumsum(-1) - ordered >= sampling.top_p
        probabilities = probabilities.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), 0.0)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities


def choose(logits: Tensor, sampling: Sampling, generators: list[torch.Generator]) -> Tensor:
    """The next token of each row: int64 [rows] from logits [rows, vocab]. Row r draws from `generators[r]` only, so that
    what a row writes does not depend on its neighbours."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    probabilities = filtered_probabilities(logits, sampling).cpu()
    drawn = [torch.multinomial(row, 1, generator=generator) for row, generator in zip(probabilities, generators, strict=True)]
    return torch.cat(drawn).to(logits.device)
