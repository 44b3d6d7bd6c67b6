"""From logits to tokens, against the definitions and against counted draws."""

import math
from itertools import accumulate

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from lmforge.serve.decoding.sampling import (
    SamplingParams,
    draw_uniforms,
    sample_tokens,
    sampling_probs,
)
from tests.seeds import fresh_seed

# Apart enough that fp32 tells them apart.
logits_of_one_row = st.lists(
    st.integers(-2000, 2000).map(lambda number: number / 100), min_size=1, max_size=12, unique=True
)


def fresh_generator() -> torch.Generator:
    return torch.Generator().manual_seed(fresh_seed())


def plainly(logits: list[float], sampling: SamplingParams) -> list[float]:
    """Temperature, then the k likeliest, then the fewest likeliest that hold the share p; what
    stays is made to sum to 1.
    """
    weights = {
        token: math.exp((logit - max(logits)) / sampling.temperature)
        for token, logit in enumerate(logits)
    }
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
def test_probabilities_are_those_of_the_definition(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    # A rim of the nucleus that falls on a token may be rounded to either side.
    likeliest_first = sorted(plainly(logits, SamplingParams(temperature, top_k)), reverse=True)
    assume(top_p == 1 or all(abs(rim - top_p) > 1e-4 for rim in accumulate(likeliest_first)))
    sampling = SamplingParams(temperature, top_k, top_p)
    ours = sampling_probs(torch.tensor([logits]), sampling)[0].tolist()
    assert ours == pytest.approx(plainly(logits, sampling), rel=1e-4, abs=1e-7)


def drawn(logits: torch.Tensor, sampling: SamplingParams, seed: int = 0) -> torch.Tensor:
    return sample_tokens(logits, sampling, draw_uniforms(seed, len(logits)))[0]


def test_greedy_takes_the_likeliest_token_and_returns_the_models_own_distribution() -> None:
    logits = torch.randn(50, 30, generator=fresh_generator())
    tokens, probabilities = sample_tokens(
        logits, SamplingParams(0.0, top_k=5, top_p=0.5), draw_uniforms(0, 50)
    )
    assert torch.equal(tokens, logits.argmax(-1))
    assert torch.equal(probabilities, logits.softmax(-1))


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(1.0, top_k=1),
        SamplingParams(1.0, top_p=1e-9),
        SamplingParams(1.0, top_p=1e-60),
        SamplingParams(1e-50),
        SamplingParams(2e-38),
        SamplingParams(1e-30),
        SamplingParams(1e-4),
    ],
)
def test_top_k_top_p_and_temperature_narrow_to_the_likeliest_token(
    sampling: SamplingParams,
) -> None:
    generator = fresh_generator()
    logits = 5 * torch.randn(40, 30, generator=generator)
    tokens, probabilities = sample_tokens(
        logits, sampling, draw_uniforms(generator.initial_seed(), 40)
    )
    assert torch.equal(tokens, logits.argmax(-1))
    assert probabilities.isfinite().all()


@pytest.mark.parametrize("vocab", [5, 128, 300])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(0.0), SamplingParams(0.5, top_k=3, top_p=0.5)]
)
@pytest.mark.parametrize("number", [math.nan, -math.inf, math.inf])
def test_the_probability_is_nan_where_the_logits_are_no_distribution(
    sampling: SamplingParams, vocab: int, number: float
) -> None:
    logits = torch.randn(6, vocab, generator=fresh_generator())
    logits[3] = number
    tokens, probabilities = sample_tokens(logits, sampling, draw_uniforms(0, 6))
    result = probabilities.gather(1, tokens[:, None])[:, 0]
    assert result.isnan().tolist() == [False, False, False, True, False, False]


@pytest.mark.parametrize("vocab", [12, 128, 300])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(0.6),
        SamplingParams(1.7),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.7),
        SamplingParams(1.2, top_k=6, top_p=0.8),
    ],
)
def test_tokens_are_sampled_as_often_as_their_probability(
    sampling: SamplingParams, vocab: int
) -> None:
    generator, draws = fresh_generator(), 4000
    logits = 2 * torch.randn(1, vocab, generator=generator)
    probabilities = torch.tensor(plainly(logits[0].tolist(), sampling))
    tokens = drawn(logits.expand(draws, -1), sampling, generator.initial_seed())
    counts = tokens.bincount(minlength=vocab)
    assert (counts[probabilities == 0] == 0).all()
    # Bernstein's inequality: exceeded at most once in a thousand million times for each token,
    # however rare the token is.
    third = math.log(2e9) / 3
    allowed = third + (third**2 + 6 * third * draws * probabilities * (1 - probabilities)).sqrt()
    assert ((counts - draws * probabilities).abs() <= allowed).all()


def test_the_token_is_where_the_cumulative_probability_exceeds_the_uniform_number() -> None:
    generator = fresh_generator()
    logits = 4 * torch.randn(200, 1000, generator=generator)
    drawing = draw_uniforms(generator.initial_seed(), 200)
    tokens, probabilities = sample_tokens(logits, SamplingParams(), drawing)
    after = probabilities.double().cumsum(-1)
    before = (after - probabilities).gather(1, tokens[:, None])[:, 0]
    after = after.gather(1, tokens[:, None])[:, 0]
    # fp32 probabilities sum to 1 to 1e-7 or so.
    assert ((before <= drawing + 1e-6) & (drawing <= after + 1e-6)).all()


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-53])
def test_the_smallest_and_largest_uniform_numbers_give_possible_tokens(number: float) -> None:
    logits = 3 * torch.randn(300, 700, generator=fresh_generator())
    logits[:, :100] = logits[:, -150:] = -torch.inf
    tokens, probabilities = sample_tokens(
        logits, SamplingParams(), torch.full((300,), number, dtype=torch.float64)
    )
    assert (probabilities.gather(1, tokens[:, None]) > 0).all()


def test_uniform_numbers_are_uniform_and_uncorrelated_between_neighbouring_seeds() -> None:
    seed = fresh_generator().initial_seed()
    rows = torch.stack([draw_uniforms(seed + row, 2000) for row in range(8)])
    assert ((rows >= 0) & (rows < 1)).all()
    assert torch.equal(draw_uniforms(seed, 10), rows[0, :10])
    # Six standard deviations of a mean of 2,000, and of a correlation.
    assert ((rows.mean(-1) - 0.5).abs() < 6 * (12 * 2000) ** -0.5).all()
    assert ((torch.corrcoef(rows) - torch.eye(8)).abs() < 6 * 2000**-0.5).all()


def test_tokens_that_tie_with_the_kth_stay() -> None:
    probabilities = sampling_probs(torch.tensor([[1.0, 3.0, 1.0, 0.0]]), SamplingParams(top_k=2))[0]
    assert (probabilities > 0).tolist() == [True, True, True, False]


def test_a_sequence_depends_on_its_own_uniform_number_only() -> None:
    generator = fresh_generator()
    logits, drawing = (
        torch.randn(8, 20, generator=generator),
        draw_uniforms(generator.initial_seed(), 8),
    )
    together, _ = sample_tokens(logits, SamplingParams(), drawing)
    for row in range(8):
        assert (
            sample_tokens(logits[row : row + 1], SamplingParams(), drawing[row : row + 1])[0]
            == together[row]
        )


def test_masked_logits_are_never_sampled() -> None:
    logits = torch.full((500, 8), -torch.inf)
    logits[:, 3] = 0.0
    assert (drawn(logits, SamplingParams(2.0), fresh_generator().initial_seed()) == 3).all()
