"""Law 5, at random: some faults of `python -m tests.chaos`, which does hundreds (`make chaos`)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.seeds import fresh_seed

FAULTS = 10


@pytest.mark.slow
def test_runs_that_are_killed_stopped_filled_up_and_damaged_end_as_if_nothing_had_been(
    tmp_path: Path,
) -> None:
    seed = fresh_seed(32)
    print(f"to repeat: python -m tests.chaos --faults {FAULTS} --seed {seed}")
    output = tmp_path / "chaos.json"
    command = [
        sys.executable,
        "-m",
        "tests.chaos",
        "--faults",
        str(FAULTS),
        "--seed",
        str(seed),
        "--output",
        str(output),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    report = json.loads(output.read_text())
    assert report["faults"] >= FAULTS
    for nothing in (
        "wrong_losses",
        "wrong_weights",
        "unnamed_hangs",
        "corrupt_loaded",
        "unsound_under_final_names",
    ):
        assert report[nothing] == 0, done.stdout
    assert report["lives"] >= 1
    assert report["steps_trained"] >= 60


@pytest.mark.slow
def test_rollouts_whose_servers_environments_and_trainers_fail_lose_no_group_and_learn_none_twice(
    tmp_path: Path,
) -> None:
    seed = fresh_seed(32)
    print(f"to repeat: python -m tests.chaos.rollouts --faults {FAULTS} --seed {seed}")
    output = tmp_path / "chaos.json"
    more = ["--faults", str(FAULTS), "--seed", str(seed), "--output", str(output)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.rollouts", *more],
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    report = json.loads(output.read_text())
    assert report["faults"] >= FAULTS
    assert report["findings"] == []
