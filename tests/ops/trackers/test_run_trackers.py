"""A tracker that is slow, hangs or fails does not touch the run, which says what was not sent."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from lmforge.cli import run as command
from lmforge.core.records.runs import Run
from lmforge.ops.trackers import run_trackers
from tests.conftest import Refusal
from tests.support.grids import parametrize
from tests.support.tools import need

Train = Callable[..., int]


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plugin") / "plugin.py"
    path.write_text(
        'import lmforge\nlmforge.register("tracker", "recording",'
        ' "tests.ops.trackers.recording:open_run")\n'
    )
    return path


@pytest.fixture
def train(
    tiny_options: list[str], plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Train:
    """`train(steps, fault)`: a run with a tracker that records what it is told."""

    def start(steps: int, fault: str = "") -> int:
        monkeypatch.setenv("LMFORGE_TEST_TRACKER", fault)
        where = [
            "--run.folder",
            str(tmp_path),
            "--run.name",
            "a",
            "--log.trackers",
            "recording",
            "--plugins",
            str(plugin),
        ]
        return command(
            [
                "pretrain",
                *tiny_options,
                *where,
                "--schedule.name",
                "constant",
                "--train.steps",
                str(steps),
            ]
        )

    return start


def recorded(tmp_path: Path) -> list[list[Any]]:
    return [
        json.loads(line)
        for line in (tmp_path / "a" / "trackers" / "recorded.jsonl").read_text().splitlines()
    ]


def test_a_resumed_run_continues_with_its_id_and_sends_each_record_once(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(2) == train(4) == 0
    run = Run(tmp_path / "a")
    records = recorded(tmp_path)
    assert [each[:2] for each in records if each[0] != "metrics"] == [
        ["open", None],
        ["attach", "report.html"],
        ["close", "done"],
        ["open", "id-of-a"],
        ["attach", "report.html"],
        ["close", "done"],
    ]
    metrics = [[each[1], each[2]] for each in records if each[0] == "metrics"]
    assert metrics == [
        [
            record["step"],
            {name: value for name, value in record.items() if name != "step" and value is not None},
        ]
        for record in run.read_metrics()
    ]
    printed = capsys.readouterr()
    assert printed.out.count("recording  http://example.org/run\n") == 2
    assert printed.err == ""


UNSENT = "lmforge: recording: not sent{}: {}; the run's own files have everything\n"
END = "the report, the end of the run"


@parametrize(
    ("place", "unsent"),
    [
        ("open", f"3 records, {END}"),
        ("metrics 2", f"2 records, {END}"),
        ("close", "the end of the run"),
    ],
    fast=(1,),
)
def test_a_tracker_that_hangs_delays_no_step_and_the_end_by_a_bounded_time_and_gets_all_in_the_next_attempt(
    train: Train,
    tmp_path: Path,
    place: str,
    unsent: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_trackers, "FINISH_SECONDS", 3.0)
    assert train(3, f"hang {place}") == 0
    assert capsys.readouterr().err == UNSENT.format(" within 3 s", unsent)
    monkeypatch.undo()
    assert train(4) == 0
    assert [each[1] for each in recorded(tmp_path) if each[0] == "metrics"] == [1, 2, 3, 4]
    assert recorded(tmp_path)[-3:] == [
        ["metrics", 4, ANY],
        ["attach", "report.html"],
        ["close", "done"],
    ]


@pytest.mark.parametrize("kind", ["fail", "exit"])
def test_a_tracker_that_cannot_be_opened_is_reported_in_two_lines(
    train: Train, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(6, f"{kind} open") == 0
    error = {"fail": "ConnectionError: no route to the server", "exit": "SystemExit: 3"}[kind]
    first, last = (
        f"lmforge: recording: {error}; the run continues\n",
        UNSENT.format("", f"6 records, {END}"),
    )
    assert capsys.readouterr().err == first + last
    assert not (tmp_path / "a" / "trackers" / "recorded.jsonl").exists()


def test_records_after_one_that_a_tracker_refuses_are_sent(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(6, "fail metrics 2") == 0
    assert [each[1] for each in recorded(tmp_path) if each[0] == "metrics"] == [1, 3, 4, 5, 6]
    printed = capsys.readouterr()
    assert printed.out.count("recording  http://example.org/run\n") == 1
    first = "lmforge: recording: ConnectionError: no route to the server; the run continues\n"
    assert printed.err == first + UNSENT.format("", "1 record")


@pytest.mark.slow
def test_what_a_tracker_was_too_slow_for_is_sent_later_and_what_it_refused_is_counted(
    train: Train,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert train(6, "outage metrics") == 0
    first = "lmforge: recording: ConnectionError: no route to the server; the run continues\n"
    assert capsys.readouterr().err == first + UNSENT.format("", "2 records")
    assert [each[1] for each in recorded(tmp_path) if each[0] == "metrics"] == [1, 4, 5, 6]
    monkeypatch.setattr(run_trackers, "FINISH_SECONDS", 1.0)
    assert train(20, "slow metrics") == 0
    assert "lmforge: recording: not sent within 1 s: " in capsys.readouterr().err
    monkeypatch.undo()
    assert train(21) == 0
    assert {each[1] for each in recorded(tmp_path) if each[0] == "metrics"} == {1, *range(4, 22)}


@parametrize("kind", ["exit-hang", "pool-hang"], fast=())
def test_the_process_of_a_run_ends_though_a_client_waits_at_its_exit_or_in_a_pool_of_threads(
    tiny_options: list[str], plugin: Path, tmp_path: Path, kind: str
) -> None:
    where = [
        "--run.folder",
        str(tmp_path),
        "--run.name",
        "a",
        "--log.trackers",
        "recording",
        "--plugins",
        str(plugin),
    ]
    program = (
        "import sys\nfrom lmforge import cli\nfrom lmforge.ops.trackers import run_trackers\n"
        "run_trackers.FINISH_SECONDS = cli.EXIT_SECONDS = 1.0\ncli.main()\n"
    )
    words = [sys.executable, "-c", program, "pretrain", *tiny_options, *where, "--train.steps", "2"]
    variables = os.environ | {"LMFORGE_TEST_TRACKER": f"{kind} close"}
    ended = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=120)
    assert ended.stderr == UNSENT.format(" within 1 s", "the end of the run")
    assert ended.returncode == 0


@pytest.fixture
def stalled_server() -> Iterator[str]:
    """The address of a server that takes connections and answers none."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.slow
def test_a_server_that_never_answers_stalls_no_run(
    tiny_options: list[str],
    tmp_path: Path,
    stalled_server: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    need("mlflow")
    monkeypatch.setattr(run_trackers, "FINISH_SECONDS", 3.0)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", stalled_server)
    where = ["--run.folder", str(tmp_path), "--run.name", "a", "--log.trackers", "mlflow"]
    assert command(["pretrain", *tiny_options, *where, "--train.steps", "3"]) == 0
    assert capsys.readouterr().err == UNSENT.format(" within 3 s", f"3 records, {END}").replace(
        "recording", "mlflow"
    )


def test_a_tracker_has_options_in_the_recipe_and_gets_the_completions_of_alignment(
    tiny_run: Path, tmp_path: Path
) -> None:
    prompts = [{"prompt": [{"role": "user", "content": "The king"}]}] * 8
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps(prompt) + "\n" for prompt in prompts)
    )
    held_out = {"prompt": [{"role": "user", "content": "My lord"}]}
    (tmp_path / "held_out.jsonl").write_text(json.dumps(held_out) + "\n")
    (tmp_path / "mine.py").write_text(
        "import lmforge\n"
        "class Own(lmforge.Options):\n"
        '    place: str = lmforge.option("here", "where it goes")\n'
        'lmforge.register("tracker", "noting", "tests.ops.trackers.recording:open_run", options=Own)\n'
        '@lmforge.register("reward", "long")\n'
        "def long(prompts, completions, **columns):\n"
        "    return [float(len(each)) for each in completions]\n"
    )
    words = [
        "--method",
        "grpo",
        "--plugins",
        "mine.py",
        "--rollout.reward_functions",
        "long",
        "--data.files",
        "prompts.jsonl",
    ]
    words += [
        "--rollout.num_generations",
        "4",
        "--rollout.max_completion_length",
        "8",
        "--rollout.log_completions_every",
        "2",
    ]
    words += [
        "--data.sequence_length",
        "64",
        "--train.steps",
        "3",
        "--train.global_batch_size",
        "8",
        "--run.name",
        "a",
    ]
    words += [
        "--train.device",
        "cpu",
        "--train.compile",
        "off",
        "--train.threads",
        "1",
        "--model.source",
        str(tiny_run),
    ]
    words += [
        "--log.trackers",
        "noting",
        "--log.noting.place",
        "there",
        "--data.validation_files",
        "held_out.jsonl",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.delenv("LMFORGE_TEST_TRACKER", raising=False)
        assert command(["align", *words, "--run.folder", str(tmp_path)]) == 0
    records = recorded(tmp_path)
    assert ["options", {"place": "there"}] in records
    tables = {
        (name, step): (columns, rows)
        for kind, step, name, columns, rows in (row for row in records if row[0] == "table")
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


def test_a_tracker_that_does_not_exist_is_refused(
    tiny_options: list[str], tmp_path: Path, refused: Refusal
) -> None:
    printed = refused(
        "pretrain",
        *tiny_options,
        "--run.folder",
        tmp_path,
        "--run.name",
        "a",
        "--log.trackers",
        "x",
    )
    assert printed.startswith("--log.trackers: expected tensorboard, wandb, trackio")
    assert printed.endswith('got "x"; a plugin may add it (--plugins FILE.py)')
    assert not (tmp_path / "a" / "recipe.toml").exists()
