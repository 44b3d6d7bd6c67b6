"""Bounds that are measured, and the settings of processors under which they are: they hold, and a
small fault breaks each.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import processors
from tests.support.rounding import FAULT, PLANTED, TIMES, assert_rounding_apart

ROOT = Path(__file__).parents[1]


def test_a_distance_of_a_few_roundings_is_allowed_and_a_larger_one_is_named() -> None:
    assert_rounding_apart({"loss": 1e-7, "weights": TIMES * 1e-6}, {"loss": 0.0, "weights": 1e-6})
    assert_rounding_apart({"acc": 0.0}, {"acc": 0.0})
    with pytest.raises(
        AssertionError,
        match=r"^more than rounding: loss: 1.00e-04 apart, 8.00e-06 allowed; weights: nan apart",
    ):
        assert_rounding_apart(
            {"loss": FAULT, "weights": float("nan")}, {"loss": 1e-6, "weights": 1e-6}
        )


def test_the_files_that_compare_numbers_are_those_of_their_folders_but_for_some() -> None:
    chosen = processors.files()
    assert all((ROOT / "tests" / name).exists() for name in processors.WITHOUT_NUMBERS)
    assert {nodeid.partition("::")[0] for nodeid in processors.JUDGED} <= {*chosen}
    assert len({*chosen}) == len(chosen) > 50


@pytest.mark.slow
@pytest.mark.parametrize("nodeid", processors.JUDGED)
def test_a_gradient_that_is_off_by_one_in_ten_thousand_breaks_each_bound_that_is_measured(
    nodeid: str,
) -> None:
    words = [sys.executable, "-m", "pytest", "--show-capture=no", nodeid]
    done = subprocess.run(
        words, cwd=ROOT, env={**os.environ, **PLANTED}, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stdout
    [message] = [
        line
        for line in done.stdout.splitlines()
        if line.startswith("E ") and "more than rounding: " in line
    ]
    assert all(name in message for name in processors.JUDGED[nodeid]), message
