"""A window of steps is traced, without changing the training."""

import json
from collections import Counter
from pathlib import Path

import pytest

from lmforge.cli import run as command
from lmforge.core.records.runs import Run
from tests.conftest import Refusal


@pytest.mark.parametrize(("window", "last"), [("3:4", 4), ("5:99", 6)])
def test_the_steps_of_the_window_are_in_the_trace_and_no_others(
    tmp_path: Path,
    tiny_options: list[str],
    tiny_run: Path,
    capsys: pytest.CaptureFixture[str],
    window: str,
    last: int,
) -> None:
    line = [
        "pretrain",
        *tiny_options,
        "--run.folder",
        tmp_path,
        "--run.name",
        "a",
        "--log.profile_steps",
        window,
    ]
    assert command([str(word) for word in line]) == 0
    run, first = Run(tmp_path / "a"), int(window.partition(":")[0])
    events = json.loads((run.path / "profile" / "rank-0.json").read_text())["traceEvents"]
    steps = Counter(event["name"] for event in events if str(event.get("name")).startswith("step "))
    assert steps == {f"step {number}": 1 for number in range(first, last + 1)}
    assert any("aten::mm" in str(event.get("name")) for event in events)
    assert (
        f"profile    steps {first} to {last}: {run.path / 'profile'} (open a file with Perfetto)"
        in capsys.readouterr().out
    )
    assert [each["loss"] for each in run.read_metrics()] == [
        each["loss"] for each in Run(tiny_run).read_metrics()
    ]


@pytest.mark.parametrize("window", ["3", "0:2", "5:4", "a:b", ":", "1:2:3"])
def test_what_is_no_window_is_refused(
    tiny_options: list[str], refused: Refusal, window: str
) -> None:
    message = refused("pretrain", *tiny_options, "--log.profile_steps", window)
    assert "log.profile_steps = " in message
    assert message.endswith("expected FIRST:LAST, two steps from 1 on, such as 10:13")


def test_allocations_are_recorded_on_a_gpu_only(
    tmp_path: Path, tiny_options: list[str], refused: Refusal
) -> None:
    line = [
        "pretrain",
        *tiny_options,
        "--run.folder",
        tmp_path,
        "--run.name",
        "a",
        "--log.memory_snapshot",
        "true",
    ]
    assert (
        refused(*line)
        == "log.memory_snapshot: only for a GPU, and this run is on a cpu; leave it out"
    )
    assert not (tmp_path / "a" / "recipe.toml").exists()
