"""Numbers of initial weights: a function of key and index with the right distribution, for any
number of values at once.
"""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lmforge.core.data.order import derive_key
from lmforge.core.model.rng import weight_rng
from lmforge.core.model.rng.weight_rng import (
    Distribution,
    fill_random,
    random_int32,
    standard_normal,
    standard_uniform,
)

COUNT = 1 << 22
GOLDEN_BITS = [[-1612583632, 1617662940, 2018427879, -863400344]]
GOLDEN_NORMAL = [
    "0x1.8862980000000p+0",
    "0x1.ab7dc80000000p-2",
    "-0x1.69cb6c0000000p-4",
    "-0x1.574cc00000000p-3",
]
GOLDEN_ENDS = ["-0x0.0p+0", "-0x1.95a11a0000000p+2", "0x1.95a11a0000000p+2", "0x0.0p+0"]


def drawn(
    key: int, count: int, distribution: Distribution = standard_normal, start: int = 0
) -> Tensor:
    values = torch.empty(1, count)
    fill_random(values, torch.tensor([start]), key, distribution)
    return values[0]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def correlation(a: Tensor, b: Tensor) -> float:
    """In standard errors: of independent numbers it is normally distributed with variance 1."""
    return float((a.double() * b.double()).mean() * a.numel() ** 0.5)


def test_numbers_are_those_that_were_once_recorded() -> None:
    assert (
        random_int32(derive_key(0, "weights", "lm_head.weight"), torch.tensor([5]), 4).tolist()
        == GOLDEN_BITS
    )
    assert [each.hex() for each in drawn(1, 4).tolist()] == GOLDEN_NORMAL
    # The ends of the distribution: the lowest, the two in the middle, the highest.
    ends = standard_normal(torch.tensor([-(1 << 31), -1, 0, (1 << 31) - 1], dtype=torch.int32))
    assert [each.hex() for each in ends.tolist()] == GOLDEN_ENDS


def test_a_normal_number_is_the_quantile_of_its_probability() -> None:
    bits = torch.cat(
        [
            random_int32(3, torch.tensor([0]), 1 << 20)[0],
            torch.arange(-5000, 5000, dtype=torch.int32),
        ]
    )
    probability = (bits.double() + 0.5).abs() / 2**32
    expected = -torch.special.ndtri(probability)
    # To the resolution of fp32: near 0 that of the probability, 2⁻²⁵, and 2⁻²² at 4.
    assert (standard_normal(bits).double().abs() - expected).abs().max() < 5e-7
    assert torch.equal(standard_normal(bits).signbit(), bits < 0)


def test_moments_are_those_of_the_normal_and_of_the_uniform_distribution(
    draw: random.Random,
) -> None:
    values = drawn(draw.getrandbits(64), COUNT).double()
    # Each within six standard errors.
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)):
        assert abs(values.pow(power).mean() - expected) < 6 * (variance / COUNT) ** 0.5, power
    for bound, share in ((1.0, 0.317310508), (3.0, 0.002699796), (4.5, 6.795346e-6)):
        assert abs((values.abs() > bound).double().mean() - share) < 6 * (share / COUNT) ** 0.5, (
            bound
        )
    values = drawn(draw.getrandbits(64), COUNT, standard_uniform).double()
    assert values.abs().max() <= 1
    for power, expected, variance in ((1, 0, 1 / 3), (2, 1 / 3, 4 / 45), (4, 1 / 5, 16 / 225)):
        assert abs(values.pow(power).mean() - expected) < 6 * (variance / COUNT) ** 0.5, power


def test_rows_parameters_and_seeds_are_not_correlated(draw: random.Random) -> None:
    seed = draw.randrange(1 << 30)
    values = drawn(derive_key(seed, "weights", "a"), COUNT)
    for distance in (1, 2, 3, 64, 1024, 4096):  # neighbours, and neighbouring rows
        assert abs(correlation(values[:-distance], values[distance:])) < 6, distance
    for others in (
        (seed + 1, "weights", "a"),
        (seed, "weights", "b"),
        (seed, "weights", "a.weight"),
    ):
        other = drawn(derive_key(*others), COUNT)
        assert abs(correlation(values, other)) < 6
        assert abs(correlation(values.square() - 1, other.square() - 1)) < 12  # of variance 4


@pytest.mark.parametrize("distribution", [standard_normal, standard_uniform])
def test_any_part_has_the_bits_of_the_full_tensor(
    distribution: Distribution,
    draw: random.Random,
    monkeypatch: pytest.MonkeyPatch,
    two_threads: None,
) -> None:
    key, rows, columns = draw.getrandbits(64), draw.randint(40, 60), draw.randint(30, 45)
    full = torch.empty(1, rows * columns)
    fill_random(full, torch.tensor([0]), key, distribution, loc=0.5, scale=0.02)
    monkeypatch.setattr(weight_rng, "_CHUNK_PER_THREAD", draw.randint(1, 300))
    torch.set_num_threads(1)
    for _ in range(20):
        top, left = draw.randrange(rows), draw.randrange(columns)
        part = torch.empty(draw.randint(0, rows - top), draw.randint(0, columns - left))
        fill_random(
            part,
            torch.arange(top, top + len(part)) * columns + left,
            key,
            distribution,
            loc=0.5,
            scale=0.02,
        )
        assert torch.equal(
            part, full.view(rows, columns)[top : top + len(part), left : left + part.shape[1]]
        )
    # Beyond 2³¹ numbers.
    far = (1 << 40) + 1
    assert torch.equal(
        drawn(key, 1000, distribution, far)[7:], drawn(key, 993, distribution, far + 7)
    )


def test_memory_in_use_does_not_grow_with_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0

    def watched(key: int, starts: Tensor, length: int) -> Tensor:
        nonlocal largest
        largest = max(largest, len(starts) * length)
        return random_int32(key, starts, length)

    monkeypatch.setattr(weight_rng, "random_int32", watched)
    for shape in ((1, 1 << 21), (1 << 21, 1), (1 << 10, 1 << 11)):
        fill_random(
            torch.empty(shape), torch.zeros(shape[0], dtype=torch.int64), 1, standard_uniform
        )
    assert largest <= (1 << 16) * torch.get_num_threads()
