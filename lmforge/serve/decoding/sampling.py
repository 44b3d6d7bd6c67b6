"""Sampling of tokens from logits: greedy, temperature, top-k, top-p, min-p.

They are as asked for, or as the model says. One uniform number per sequence decides what is drawn.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lmforge.core.data.order import splitmix64
from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import quoted
from lmforge.core.model.config_json import NEUTRAL_SAMPLING

# A request's numbers are the SplitMix64 stream of its seed: a counter with this increment,
# scrambled by `splitmix64`.
_SPLITMIX_INCREMENT = 0x9E3779B97F4A7C15
# The token is searched in blocks of this size: a cumulative sum over the whole vocabulary takes ten
# times as long.
_SEARCH_BLOCK = 128
# Below this temperature only one token can be drawn, and fp32 soon rounds it to zero.
MIN_TEMPERATURE = 1e-30
# Fields of a generation_config.json, and the values that transformers takes where it lacks them.
TRANSFORMERS_SAMPLING = {
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


@dataclass(frozen=True)
class SamplingParams:
    """The options of sampling. A `temperature` below MIN_TEMPERATURE is greedy.

    `top_k` 0, `top_p` 1, `min_p` 0 and `repetition_penalty` 1 leave the distribution unchanged.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE


def choose_sampling(
    generation_config: Mapping[str, Any] | None,
    path: Path,
    default_temperature: float,
    **given: float | None,
) -> SamplingParams:
    """The options that are `given` and not None, else those of generation_config.json.

    Without such a file only the temperature is set, to its default. A file that says how to sample
    is read as transformers does: greedy without do_sample, and with that library's defaults. Raises
    UserError, naming the file in the folder `path`, for what is not computed here.
    """
    stated = {name: value for name, value in (generation_config or {}).items() if value is not None}
    for name, neutral in NEUTRAL_SAMPLING.items():
        value = stated.get(name)
        if value and value != neutral:
            files = (path / "generation_config.json", path / "config.json")
            place = next((file for file in files if file.is_file()), path)
            raise UserError(f"{place}: {name}: {quoted(value)} is not supported; remove it there")
    chosen: dict[str, Any] = {"temperature": default_temperature}
    if stated.get("do_sample") is False or TRANSFORMERS_SAMPLING.keys() & stated.keys():
        chosen = {
            name: stated.get(name, default) for name, default in TRANSFORMERS_SAMPLING.items()
        }
        if not stated.get("do_sample"):
            chosen["temperature"] = 0.0
    return SamplingParams(
        **chosen | {name: value for name, value in given.items() if value is not None}
    )


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits [batch, vocab], where those that are `seen` are less likely (arXiv 1909.05858).

    seen: bool [batch, vocab].
    """
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def draw_uniforms(seed: int, count: int) -> Tensor:
    """Uniform numbers fp64 [count], one for each token of a request, in order.

    Each is 0 ≤ u < 1 with 53 random bits.
    """
    first = splitmix64(np.full(1, seed % 2**64, np.uint64))
    words = splitmix64(first + np.arange(count, dtype=np.uint64) * np.uint64(_SPLITMIX_INCREMENT))
    return torch.from_numpy((words >> np.uint64(11)) * 2.0**-53)


def sampling_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities fp32 [batch, vocab] after top-k, temperature, top-p and min-p.

    See arXiv 1904.09751 (top-p, or nucleus) and 2407.01082 (min-p). The likeliest token always
    stays, and so do tokens that tie with the k-th. With greedy sampling it is the model's own
    distribution; top-k and top-p are ignored.
    """
    scores = logits.float()
    if params.is_greedy:
        return scores.softmax(-1)
    if 0 < params.top_k < scores.shape[-1]:
        kth = scores.topk(params.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    # The largest score becomes 0, which no temperature makes infinite.
    probabilities = ((scores - scores.amax(-1, keepdim=True)) / params.temperature).softmax(-1)
    if params.top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        beyond = ordered.cumsum(-1) - ordered >= params.top_p
        beyond[:, 0] = False  # even if top_p rounds to 0 in fp32
        probabilities = probabilities.masked_fill(
            torch.zeros_like(beyond).scatter(-1, order, beyond), 0.0
        )
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    if params.min_p:
        least = params.min_p * probabilities.amax(-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities


def sample_tokens(
    logits: Tensor, params: SamplingParams, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """The next token of each sequence, int64 [batch], and the distribution it was drawn from.

    The distribution is fp32 [batch, vocab]. Greedy takes the first of the largest logits. Otherwise
    it is the token at which the cumulative probability exceeds `uniforms`, fp64 [batch] in [0, 1).
    If the logits are NaN or all -inf, the probability of the returned token is NaN.
    """
    probabilities = sampling_probs(logits, params)
    if params.is_greedy:
        return logits.argmax(-1), probabilities
    return _invert_cdf(probabilities, uniforms), probabilities


def _invert_cdf(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """The token at which the cumulative probability exceeds `uniforms`.

    First its block of tokens is found, then the token in it. Sums are fp64: in fp32 a sum over a
    large vocabulary loses the unlikely tokens to rounding.
    """
    blocks = pad(probabilities, (0, -probabilities.shape[-1] % _SEARCH_BLOCK)).unflatten(
        -1, (-1, _SEARCH_BLOCK)
    )
    sums = blocks.sum(-1, dtype=torch.float64)
    reached = sums.cumsum(-1)
    goal = uniforms[:, None] * reached[:, -1:]
    # No comparison with NaN is true, so the last block is taken, and the caller finds that the
    # probability is NaN.
    block = torch.searchsorted(reached, goal, right=True).clamp(max=reached.shape[-1] - 1)
    within = blocks[torch.arange(len(uniforms), device=uniforms.device), block[:, 0]].cumsum(
        -1, dtype=torch.float64
    )
    # Summed in another order, the same numbers may end slightly below the target, by rounding.
    rest = torch.minimum(
        goal - (reached - sums).gather(1, block), within[:, -1:] * (1 - 2**-52)
    ).clamp(min=0)
    token = (block * _SEARCH_BLOCK + torch.searchsorted(within, rest, right=True))[:, 0]
    return token.clamp(max=probabilities.shape[-1] - 1)
