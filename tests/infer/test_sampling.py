"""From logits to tokens, against the definitions written out plainly and against counted draws."""

import math
import secrets
from itertools import accumulate

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from lmforge.infer.sampling import Sampling, choose, filtered_probabilities

# Apart enough that fp32 tells them apart.
logits_of_one_row = st.lists(st.integers(-2000, 2000).map(lambda number: number / 100), min_size=1, max_size=12, unique=True)


def fresh_generator() -> torch.Generator:
    seed = secrets.randbelow(2**31)
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


def plainly(logits: list[float], sampling: Sampling) -> list[float]:
    """Temperature, then the k likeliest, then the fewest likeliest that hold the share p; what stays is made to sum to 1."""
    weights = {token: math.exp((logit - max(logits)) / sampling.temperature) for token, logit in enumerate(logits)}
    order = sorted(weights, key=lambda token: -weights[token])
    if sampling.top_k:
        order = order[: sampling.top_k]
    total = sum(weights[token] for token in order)
    kept: list[int] = []
    held = 0.0
    for token in order:
        if held < sampling.top_p or not kept:
            kept.append(token)
        held += weights[token] / total
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(logits))]


@given(
    logits=logits_of_one_row,
    temperature=st.floats(0.3, 3),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([1.0, 0.999, 0.8, 0.5, 0.1, 1e-6]),
)
def test_probabilities_are_those_of_the_definition(logits: list[float], temperature: float, top_k: int, top_p: float) -> None:
    # A rim of the nucleus that falls on a token may be rounded to either side.
    likeliest_first = sorted(plainly(logits, Sampling(temperature, top_k)), reverse=True)
    assume(top_p == 1 or all(abs(rim - top_p) > 1e-4 for rim in accumulate(likeliest_first)))
    sampling = Sampling(temperature, top_k, top_p)
    ours = filtered_probabilities(torch.tensor([logits]), sampling)[0].tolist()
    assert ours == pytest.approx(plainly(logits, sampling), rel=1e-4, abs=1e-7)


def test_without_temperature_the_likeliest_token_is_chosen() -> None:
    logits = torch.randn(50, 30, generator=fresh_generator())
    assert torch.equal(choose(logits, Sampling(0.0, top_k=5, top_p=0.5), []), logits.argmax(-1))


@pytest.mark.parametrize("sampling", [Sampling(1.0, top_k=1), Sampling(1.0, top_p=1e-9), Sampling(2e-38), Sampling(1e-4)])
def test_every_way_of_narrowing_ends_in_the_likeliest_token(sampling: Sampling) -> None:
    generator = fresh_generator()
    logits = 5 * torch.randn(40, 30, generator=generator)
    assert torch.equal(choose(logits, sampling, [generator] * 40), logits.argmax(-1))


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(0.6), Sampling(1.7), Sampling(top_k=4), Sampling(top_p=0.7), Sampling(1.2, top_k=6, top_p=0.8)],
)
def test_tokens_are_drawn_as_often_as_their_probability_says(sampling: Sampling) -> None:
    generator, draws = fresh_generator(), 4000
    logits = 2 * torch.randn(1, 12, generator=generator)
    probabilities = torch.tensor(plainly(logits[0].tolist(), sampling))
    tokens = choose(logits.expand(draws, -1), sampling, [generator] * draws)
    counts = tokens.bincount(minlength=12)
    assert (counts[probabilities == 0] == 0).all()
    # Six standard deviations: once in 500 million for each of the 12 tokens.
    allowed = 6 * (draws * probabilities * (1 - probabilities)).sqrt() + 1
    assert ((counts - draws * probabilities).abs() <= allowed).all()


def test_tokens_that_tie_with_the_kth_stay() -> None:
    probabilities = filtered_probabilities(torch.tensor([[1.0, 3.0, 1.0, 0.0]]), Sampling(top_k=2))[0]
    assert (probabilities > 0).tolist() == [True, True, True, False]


def test_a_row_draws_from_its_own_generator_only() -> None:
    logits = torch.randn(8, 20, generator=fresh_generator())
    together = choose(logits, Sampling(), [torch.Generator().manual_seed(row) for row in range(8)])
    for row in range(8):
        assert choose(logits[row : row + 1], Sampling(), [torch.Generator().manual_seed(row)]) == together[row]


def test_masked_logits_are_never_drawn() -> None:
    logits = torch.full((500, 8), -torch.inf)
    logits[:, 3] = 0.0
    assert (choose(logits, Sampling(2.0), [fresh_generator()] * 500) == 3).all()
