"""Stragglers: a clearly slow rank is reported once, and noise is not."""

import random

import pytest

from lmforge.ops.monitor.stragglers import COMPARED_PHASES, StragglerDetector
from tests.seeds import fresh_random


@pytest.fixture
def chance() -> random.Random:
    return fresh_random()


def own(
    chance: random.Random, ranks: int, forward: dict[int, float] | None = None
) -> list[list[float]]:
    """Own seconds of each rank over ten steps of some 0.5 s, with what ranks differ by in
    health.
    """
    usual = {"data": 0.01, "forward": 0.15, "backward": 0.3, "optimizer": 0.03}
    table = []
    for rank in range(ranks):
        times = {
            phase: seconds * chance.lognormvariate(0, 0.05) for phase, seconds in usual.items()
        }
        times["forward"] *= (forward or {}).get(rank, 1.0)
        table.append([10 * times.get(phase, 0.0) for phase in COMPARED_PHASES])
    return table


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_slow_rank_is_named_once_and_again_when_it_is_quick(
    chance: random.Random, ranks: int
) -> None:
    judge, slow = StragglerDetector(), chance.randrange(ranks)
    parts = [0] * ranks
    lines = [
        line
        for _ in range(10)
        for line in judge.update(own(chance, ranks, {slow: 1.9}), parts, 10, 0.5)
    ]
    assert len(lines) == 1
    assert lines[0].startswith(f"rank {slow}: forward takes ")
    lines = [line for _ in range(10) for line in judge.update(own(chance, ranks), parts, 10, 0.5)]
    assert len(lines) == 1
    assert lines[0].startswith(f"rank {slow}: forward takes as long as elsewhere again")


def test_healthy_ranks_and_a_single_slow_interval_are_not_named(chance: random.Random) -> None:
    judge = StragglerDetector()
    for number in range(200):
        slow = {chance.randrange(8): 3.0} if number % 7 == 0 else None
        assert judge.update(own(chance, 8, slow), [0] * 8, 10, 0.5) == []


def test_ranks_of_another_part_of_the_model_are_not_compared(chance: random.Random) -> None:
    judge, uneven = StragglerDetector(), {0: 1.0, 1: 1.0, 2: 2.5, 3: 2.5}
    for _ in range(20):
        assert judge.update(own(chance, 4, uneven), [0, 0, 1, 1], 10, 0.5) == []


def test_steps_that_are_taken_again_after_a_rollback_do_no_harm(chance: random.Random) -> None:
    detector = StragglerDetector()
    for steps, seconds in [(10, 0.01), (-30, 0.5), (20, 2.0), (10, 0.5), (10, 0.5)]:
        assert detector.update(own(chance, 4), [0] * 4, steps, seconds) == []
