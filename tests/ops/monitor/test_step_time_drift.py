"""Drift of the step time: a clear slowdown is reported once, and noise is not."""

import math
import random

import pytest

from lmforge.ops.monitor.step_time_drift import DriftDetector
from tests.seeds import fresh_random


@pytest.fixture
def chance() -> random.Random:
    return fresh_random()


def report(series: list[float]) -> list[str]:
    drift = DriftDetector()
    return [
        line
        for number, seconds in enumerate(series)
        for line in drift.update(10 * (number + 1), seconds)
    ]


def noise(chance: random.Random, readings: int) -> list[float]:
    """Step times as log steps show them: a few per cent apart, and now and then one that another
    process disturbed.
    """
    return [
        chance.lognormvariate(0, 0.06) + (chance.expovariate(1) if chance.random() < 0.08 else 0)
        for _ in range(readings)
    ]


def test_noise_is_no_drift(chance: random.Random) -> None:
    assert report(noise(chance, 3000)) == []


@pytest.mark.parametrize("slower", [1.31, 2.0])
def test_a_lasting_slowdown_is_reported_with_the_time_of_faster_steps(
    chance: random.Random, slower: float
) -> None:
    quick = noise(chance, 60)
    slowing = [
        (1 + (slower - 1) * min(1.0, number / 40)) * each
        for number, each in enumerate(noise(chance, 100))
    ]
    lines = report(quick + slowing + noise(chance, 40))
    assert "slower" in lines[0]
    assert "around step" in lines[0]
    assert lines[-1].endswith("no longer slow")
    # Once, and once more for each fifth of the baseline on top.
    assert len(lines) - 1 <= math.ceil((slower - 1) / 0.2)


def test_steps_that_are_taken_again_after_a_rollback_do_no_harm() -> None:
    drift = DriftDetector()
    for step, seconds in [
        (10, 1.0),
        (20, 1.0),
        (100, 1.0),
        (70, 1.0),
        (80, 1.05),
        (90, 1.05),
        (100, 1.05),
        (110, 1.0),
    ]:
        assert drift.update(step, seconds) == []
