"""`lmforge bench`: what is told of a recipe's step, and a sweep of which every row is there, refused ones too."""

import json
from pathlib import Path
from typing import Any

import pytest

from lmforge.bench.step_timing import sweep_combinations
from lmforge.bench.trial import TIMED_PHASES
from lmforge.cli import run
from tests.conftest import Command

SHORT = ["--bench.steps", "3", "--bench.warmup_steps", "1"]


def timed(capsys: pytest.CaptureFixture[str], *words: object) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert run(["bench", *map(str, words), *SHORT, "--bench.output", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_recipe_is_timed_on_its_own_data(
    capsys: pytest.CaptureFixture[str], tiny_options: list[str], tiny_tokens: Path
) -> None:
    [row] = timed(capsys, *tiny_options)
    step = row["step_seconds"]
    assert step["steps"] == 3
    assert 0 < step["min"] <= step["median"] <= step["max"]
    assert row["tokens_per_second"] == pytest.approx(4 * 48 / step["median"])
    assert set(row["phase_seconds"]) == set(TIMED_PHASES)
    assert all(seconds > 0 for seconds in row["phase_seconds"].values())
    assert row["communication_seconds"] == 0.0
    assert row["data"] == str(tiny_tokens)
    assert 0 < row["mfu"] < 1
    assert "FLOPs per token" in row["convention"]


def test_a_recipe_whose_data_is_not_there_is_timed_on_random_tokens_and_traced(
    capsys: pytest.CaptureFixture[str], tiny_options: list[str], tmp_path: Path
) -> None:
    trace = tmp_path / "traces" / "step.json"
    [row] = timed(capsys, *tiny_options, "--data.folder", tmp_path / "absent", "--model.preset", "nano", "--trace", trace)
    assert row["data"] == "random tokens"
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert "aten::mm" in names


def test_a_sweep_has_a_row_for_every_combination_and_says_what_was_refused(lmforge: Command, tiny_options: list[str]) -> None:
    sweep = ["--sweep", "parallel.sharding=full-shard,grad-shard", "parallel.shard_degree=none,3", "--launch.processes", "2"]
    done = lmforge("bench", *tiny_options, *SHORT, *sweep, "--bench.output", "json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    swept = [tuple(row["swept"].values()) for row in rows]
    assert swept == [("full-shard", "none"), ("full-shard", "3"), ("grad-shard", "none"), ("grad-shard", "3")]
    assert [row.get("engine") for row in rows] == ["fsdp2 full-shard", None, "fsdp2 grad-shard", None]
    assert "shard_degree = 3" in rows[1]["failed"]
    assert rows[0]["ranks"] == 2
    assert rows[0]["communication_seconds"] > 0


def test_combinations_are_of_all_values_in_order() -> None:
    assert sweep_combinations(("train.seed=1,2", "run.name=x")) == [
        {"train.seed": "1", "run.name": "x"},
        {"train.seed": "2", "run.name": "x"},
    ]


@pytest.mark.parametrize("axis", ["a.b", "a.b=", "a.b=1,,2"])
def test_a_sweep_that_does_not_read_as_one_is_refused(capfd: pytest.CaptureFixture[str], axis: str) -> None:
    assert run(["bench", "--sweep", axis]) == 2
    assert f"--sweep {axis}: expected section.option=value,value" in capfd.readouterr().err
