"""Stragglers, drift and the disk: what is clear is named, once, and what is noise is not."""

import math
import random
from pathlib import Path

import pytest

from lmforge.monitor.disk import DiskMonitor
from lmforge.monitor.step_time_drift import DriftDetector
from lmforge.monitor.stragglers import COMPARED_PHASES, StragglerDetector
from tests.seeds import fresh_random


@pytest.fixture
def chance() -> random.Random:
    return fresh_random()


def own(chance: random.Random, ranks: int, forward: dict[int, float] | None = None) -> list[list[float]]:
    """Own seconds of each rank over ten steps of some 0.5 s, with what ranks differ by in health."""
    usual = {"data": 0.01, "forward": 0.15, "backward": 0.3, "optimizer": 0.03}
    table = []
    for rank in range(ranks):
        times = {phase: seconds * chance.lognormvariate(0, 0.05) for phase, seconds in usual.items()}
        times["forward"] *= (forward or {}).get(rank, 1.0)
        table.append([10 * times.get(phase, 0.0) for phase in COMPARED_PHASES])
    return table


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_slow_rank_is_named_once_and_again_when_it_is_quick(chance: random.Random, ranks: int) -> None:
    judge, slow = StragglerDetector(), chance.randrange(ranks)
    parts = [0] * ranks
    lines = [line for _ in range(10) for line in judge.update(own(chance, ranks, {slow: 1.9}), parts, 10, 0.5)]
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


def told(series: list[float]) -> list[str]:
    drift = DriftDetector()
    return [line for number, seconds in enumerate(series) for line in drift.update(10 * (number + 1), seconds)]


def noise(chance: random.Random, readings: int) -> list[float]:
    """Step times as log steps show them: a spread of a few per cent, and now and then a neighbour's moment."""
    return [chance.lognormvariate(0, 0.06) + (chance.expovariate(1) if chance.random() < 0.08 else 0) for _ in range(readings)]


def test_noise_is_no_drift(chance: random.Random) -> None:
    assert told(noise(chance, 3000)) == []


@pytest.mark.parametrize("slower", [1.31, 2.0])
def test_a_run_that_becomes_slower_and_stays_so_is_told_of_with_when_it_was_quicker(
    chance: random.Random, slower: float
) -> None:
    quick = noise(chance, 60)
    slowing = [(1 + (slower - 1) * min(1.0, number / 40)) * each for number, each in enumerate(noise(chance, 100))]
    lines = told(quick + slowing + noise(chance, 40))
    assert "slower" in lines[0]
    assert "around step" in lines[0]
    assert lines[-1].endswith("no longer slow")
    # Once, and once more for each fifth of the baseline on top.
    assert len(lines) - 1 <= math.ceil((slower - 1) / 0.2)


def test_a_disk_without_room_for_the_next_checkpoint_is_told_of_once_and_again_when_there_is(tmp_path: Path) -> None:
    needed = [0]
    disk = DiskMonitor(tmp_path, lambda: needed[0])
    assert disk.check() == []
    needed[0] = 2**62
    [line] = disk.check()
    assert "GiB free, and the next checkpoint needs" in line
    assert disk.check() == []
    needed[0] = 1
    [line] = disk.check()
    assert "enough for the next checkpoint" in line
    assert disk.check() == []
