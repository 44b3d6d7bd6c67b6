"""A tracker that is slow, fails or dies does not touch the run; what it missed is sent when the run is resumed."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from lmforge.cli import run as command
from lmforge.runs import Run
from lmforge.trackers import processes
from tests.conftest import Refusal

Train = Callable[..., int]


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plugin") / "plugin.py"
    path.write_text('import lmforge\nlmforge.register("tracker", "recording", "tests.trackers.recording:open_run")\n')
    return path


@pytest.fixture
def train(tiny_options: list[str], plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """`train(steps, fault)`: a run with a tracker that records what it is told."""

    def start(steps: int, fault: str = "") -> int:
        monkeypatch.setenv("LMFORGE_TEST_TRACKER", fault)
        where = ["--run.folder", str(tmp_path), "--run.name", "a", "--log.trackers", "recording", "--plugins", str(plugin)]
        return command(["pretrain", *tiny_options, *where, "--schedule.name", "constant", "--train.steps", str(steps)])

    return start


def recorded(tmp_path: Path) -> list[list[Any]]:
    return [json.loads(line) for line in (tmp_path / "a" / "trackers" / "recorded.jsonl").read_text().splitlines()]


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "lmforge.trackers" in " ".join(child.cmdline())]


def test_a_resumed_run_continues_with_its_id_and_sends_each_record_once(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(2) == train(4) == 0
    run = Run(tmp_path / "a")
    records = recorded(tmp_path)
    assert [each[:2] for each in records if each[0] != "metrics"] == [
        *(["open", None], ["attach", "report.html"], ["close", "done"]),
        *(["open", "id-of-a"], ["attach", "report.html"], ["close", "done"]),
    ]
    metrics = [[each[1], each[2]] for each in records if each[0] == "metrics"]
    assert metrics == [
        [record["step"], {name: value for name, value in record.items() if name != "step" and value is not None}]
        for record in run.read_metrics()
    ]
    printed = capsys.readouterr()
    assert printed.out.count("recording  http://example.org/run\n") == 2
    assert printed.err == ""


@pytest.mark.parametrize("place", ["open", "metrics 2"])
def test_a_tracker_that_hangs_delays_no_step_and_misses_no_record(
    train: Train, tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "FINISH_SECONDS", 3.0)
    assert train(3, f"hang {place}") == 0
    warning = "lmforge: recording had not sent everything 3 s after the end; what is missing is sent when the run is resumed\n"
    assert capsys.readouterr().err == warning
    assert children() == []
    monkeypatch.undo()
    assert train(4) == 0
    assert [each[1] for each in recorded(tmp_path) if each[0] == "metrics"] in ([1, 2, 3, 4], [1, 1, 2, 3, 4])


def test_a_tracker_without_a_network_is_reported_in_one_line(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(6, "fail open") == 0
    error = "lmforge: recording: ConnectionError: no route to the server; the run continues, and recording is tried again\n"
    assert capsys.readouterr().err == error
    assert not (tmp_path / "a" / "trackers" / "recorded.jsonl").exists()


def test_where_people_see_a_run_is_said_though_nothing_can_be_sent_there(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(6, "fail metrics 1") == 0
    printed = capsys.readouterr()
    assert printed.out.count("recording  http://example.org/run\n") == 1
    assert printed.err.startswith("lmforge: recording: ConnectionError: no route to the server; ")


@pytest.mark.parametrize("steps", [2, 400])  # it dies after the end of the run, or in it
def test_a_tracker_whose_process_dies_is_reported_in_one_line(
    train: Train, tmp_path: Path, steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(steps, "die open") == 0
    log = tmp_path / "a" / "trackers" / "recording.log"
    assert capsys.readouterr().err == f"lmforge: recording: its process has ended, see {log}; the run continues without it\n"


def test_what_others_print_in_the_process_of_a_tracker_is_no_report_and_ends_no_training(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    lines = ["welcome", "7", '{"info": 1}', '{"other": "x"}', "[" * 2000, "x" * 200_000, "half a line"]
    (folder / "sitecustomize.py").write_text(f'print("""{chr(10).join(lines)}""", end="", flush=True)\n')
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    assert train(50) == 0
    assert len([each for each in recorded(tmp_path) if each[0] == "metrics"]) == 50
    printed = capsys.readouterr()
    assert printed.out.count("recording  http://example.org/run\n") == 1
    assert printed.err == ""


def test_a_tracker_has_options_in_the_recipe_and_gets_the_completions_of_alignment(tiny_run: Path, tmp_path: Path) -> None:
    prompts = [{"prompt": [{"role": "user", "content": "The king"}]}] * 8
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    held_out = {"prompt": [{"role": "user", "content": "My lord"}]}
    (tmp_path / "held_out.jsonl").write_text(json.dumps(held_out) + "\n")
    (tmp_path / "mine.py").write_text(
        "import lmforge\n"
        "class Own(lmforge.Options):\n"
        '    place: str = lmforge.option("here", "where it goes")\n'
        'lmforge.register("tracker", "noting", "tests.trackers.recording:open_run", options=Own)\n'
        '@lmforge.register("reward", "long")\n'
        "def long(prompts, completions, **columns):\n"
        "    return [float(len(each)) for each in completions]\n"
    )
    words = ["--method", "grpo", "--plugins", "mine.py", "--rollout.reward_functions", "long", "--data.files", "prompts.jsonl"]
    words += ["--rollout.num_generations", "4", "--rollout.max_completion_length", "8", "--rollout.log_completions_every", "2"]
    words += ["--data.sequence_length", "64", "--train.steps", "3", "--train.global_batch_size", "8", "--run.name", "a"]
    words += ["--train.device", "cpu", "--train.compile", "off", "--train.threads", "1", "--model.source", str(tiny_run)]
    words += ["--log.trackers", "noting", "--log.noting.place", "there", "--data.validation_files", "held_out.jsonl"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.delenv("LMFORGE_TEST_TRACKER", raising=False)
        assert command(["align", *words, "--run.folder", str(tmp_path)]) == 0
    records = recorded(tmp_path)
    assert ["options", {"place": "there"}] in records
    tables = {
        (name, step): (columns, rows) for kind, step, name, columns, rows in (row for row in records if row[0] == "table")
    }
    # A set is of one step; every second one is written.
    assert sorted(tables) == [("completions", 0), ("completions", 2), ("val/completions", 3)]
    columns, rows = tables["completions", 2]
    assert columns == ["step", "prompt", "text", "reward", "tokens", "ended"]
    assert len(rows) == 8
    for row in rows:
        assert row[:2] == [2, "user: The king"]
        assert row[3] == len(row[2])
    [validated] = tables["val/completions", 3][1]
    assert validated[:2] == [3, "user: My lord"]


TRAINING = """
import sys, time
from pathlib import Path
from lmforge.runs import Run
from lmforge.trackers.processes import TrackerProcesses
from lmforge.plugins import load_plugins
load_plugins([sys.argv[2]])
TrackerProcesses(print, print).start(Run(Path(sys.argv[1])), ["recording"], "ours")
print("started", flush=True)
time.sleep(600)
"""


def test_the_tracker_of_a_training_that_is_killed_sends_what_there_is_and_ends(
    train: Train, plugin: Path, tmp_path: Path
) -> None:
    assert train(2) == 0
    (tmp_path / "a" / "trackers" / "recording.json").unlink()
    (tmp_path / "a" / "trackers" / "recorded.jsonl").unlink()
    with subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(tmp_path / "a"), str(plugin)], stdout=subprocess.PIPE
    ) as training:
        assert training.stdout is not None
        assert training.stdout.readline() == b"started\n"
        [child] = psutil.Process(training.pid).children()
        training.kill()
    child.wait(timeout=60)
    assert [each[:2] for each in recorded(tmp_path)] == [
        *(["open", None], ["metrics", 1], ["metrics", 2], ["attach", "report.html"], ["close", "failed"])
    ]


def test_a_tracker_that_does_not_exist_is_refused(tiny_options: list[str], tmp_path: Path, refused: Refusal) -> None:
    printed = refused("pretrain", *tiny_options, "--run.folder", tmp_path, "--run.name", "a", "--log.trackers", "x")
    assert printed.startswith("--log.trackers: expected tensorboard, wandb, trackio")
    assert printed.endswith('got "x"; a plugin may add it (--plugins FILE.py)')
    assert not (tmp_path / "a" / "recipe.toml").exists()
