"""Another training on this machine is found by its command line, and a run's own ranks are not
another training.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lmforge.cli import run
from lmforge.ops.monitor.usage.other_trainings import other_trainings

SLEEP = "import time; time.sleep(600)"
# Starts a rank, prints what it finds, and waits.
LAUNCHER = f"""
import subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", {SLEEP!r}, "-m", "lmforge", "pretrain"])
from lmforge.ops.monitor.usage.other_trainings import other_trainings
print(other_trainings(), flush=True)
sys.stdin.read()
rank.kill()
"""


@contextmanager
def running(code: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", code, *words]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.stdin:
            process.stdin.close()
        if code == SLEEP:
            process.kill()
        process.wait(timeout=60)


def found(process: subprocess.Popen[str]) -> bool:
    """Whether it is found, within a minute: its command line changes when it has been started."""
    deadline = time.monotonic() + 60
    while "lmforge" not in Path(f"/proc/{process.pid}/cmdline").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process.pid in other_trainings()


def test_another_training_is_found_and_other_commands_are_not() -> None:
    with running(SLEEP, "-m", "lmforge", "sft", "recipe.toml") as training:
        assert found(training)
    with running(SLEEP, "-m", "lmforge", "chat", "runs/sft") as chat:
        assert not found(chat)


@pytest.mark.slow
def test_ranks_are_one_training_with_what_started_them() -> None:
    with (
        running(LAUNCHER, "-m", "lmforge", "pretrain") as launcher,
        running(SLEEP, "lmforge", "align") as other,
    ):
        assert launcher.stdout
        assert found(other)
        seen_by_launcher = json.loads(launcher.stdout.readline())
        rank = int(Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text())
        assert not {launcher.pid, rank} & set(seen_by_launcher)
        trainings = other_trainings()
        assert launcher.pid in trainings
        assert rank not in trainings


def test_a_run_says_that_it_shares_the_machine(
    tiny_options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(SLEEP, "-m", "lmforge", "pretrain") as other:
        assert found(other)
        assert (
            run(
                [
                    "pretrain",
                    *tiny_options,
                    "--train.steps",
                    "2",
                    "--run.folder",
                    str(tmp_path),
                    "--run.name",
                    "a",
                ]
            )
            == 0
        )
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("shared ")]
    assert line.startswith(
        "shared     other trainings use these cores too, so each is slower: process "
    )
    assert str(other.pid) in line
