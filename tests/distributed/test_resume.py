"""Law 5, seen from outside: a run that was stopped, in any way, and continued is the run that was not.

One history holds most of it: two ranks, asked to stop, continued, killed without warning, continued to the end.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from lmforge.cli import run as lmforge_here
from lmforge.runs import Run
from tests.distributed.conftest import Recipe, losses, run_cases, weights
from tests.seeds import fresh_random

STEPS = 28
SCHEDULE = ["--train.steps", str(STEPS), "--checkpoint.every_steps", "4", "--checkpoint.keep_last", "20"]
# A validation just before a checkpoint leaves sharded weights gathered, and must not show in what is saved.
SCHEDULE += ["--validation.every_steps", "4"]
# Sums in another order differ by some 1e-7 a step in fp32; 1e-6 of the loss is the house's bound.
LOSS_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it said until then."""

    status: int
    out: str
    errors: str


def started(words: list[str], folder: Path, meanwhile: Callable[[subprocess.Popen[str]], None]) -> Ended:
    """Carry out a command line in processes of their own, doing something to them meanwhile."""
    out, errors = folder / "out.txt", folder / "errors.txt"
    with open(out, "w") as told, open(errors, "w") as complained:
        process = subprocess.Popen([sys.executable, "-m", "lmforge", *words], stdout=told, stderr=complained, text=True)
        try:
            meanwhile(process)
            status = process.wait(timeout=300)
        finally:
            kill_tree(process)
    return Ended(status, out.read_text(), errors.read_text())


def kill_tree(process: subprocess.Popen[str]) -> None:
    """SIGKILL to a process and everything it started: the launcher first, which can then clean up nothing."""
    if process.poll() is None:
        ranks = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for rank in ranks:
            rank.kill()
        process.wait()
        psutil.wait_procs(ranks, timeout=60)


def reach(run: Run, step: int, process: subprocess.Popen[str]) -> None:
    """Wait until the run's metrics tell of a step."""
    while not (records := run.read_metrics()) or records[-1]["step"] < step:
        assert process.poll() is None, f"ended with status {process.returncode} before step {step}"
        time.sleep(0.005)


def heard(run: Run) -> set[int]:
    """The process ids of the ranks that publish what they do."""
    return {json.loads(told)["process"] for file in run.health_folder.glob("rank-?.json") if (told := file.read_text())}


def how_to_continue(ended: Ended) -> list[str]:
    """The words of the command that a stopped run says to type."""
    command = re.search(r"to continue: \S*lmforge (.+)$", ended.out, re.M)
    assert command, ended.out
    return command[1].split()


def assert_identical(run: Run, reference: Run) -> None:
    """Losses and weights to the last bit."""
    assert losses(run) == losses(reference)
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    theirs = weights(reference)
    for name, tensor in weights(run).items():
        assert torch.equal(tensor, theirs[name]), name


@dataclass(frozen=True)
class History:
    """Runs of one recipe: never stopped; stopped, killed and continued; and each continued elsewhere from one checkpoint."""

    unbroken: Run
    broken: Run
    stopped: Ended
    stopped_at: int
    elsewhere: dict[str, Run]


@pytest.fixture(scope="module")
def history(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> History:
    folder = tmp_path_factory.mktemp("resume")
    chance = fresh_random()
    broken = Run(folder / "broken")

    def ask_to_stop(process: subprocess.Popen[str]) -> None:
        reach(broken, 2, process)
        # The launcher asks its ranks to stop for either.
        process.send_signal(chance.choice((signal.SIGTERM, signal.SIGUSR1)))

    stopped = started(["pretrain", *recipe(folder, "broken", *SCHEDULE, "--launch.processes", "2")], folder, ask_to_stop)
    assert stopped.status == 128 + signal.SIGTERM, stopped
    stopped_at = broken.checkpoint_steps()[-1]
    assert stopped_at < STEPS - 4, "stopped too late for what follows"
    places = {"single": (1, []), "ddp on 2": (2, ["--parallel.engine", "ddp"]), "fsdp2 on 3": (3, [])}
    for place in places:
        shutil.copytree(broken.path, folder / place, ignore=shutil.ignore_patterns(".lock"))

    def kill(process: subprocess.Popen[str]) -> None:
        reach(broken, chance.randrange(stopped_at + 1, STEPS - 1), process)
        time.sleep(chance.uniform(0, 0.1))
        kill_tree(process)

    killed = started(how_to_continue(stopped), folder, kill)
    assert killed.status == -signal.SIGKILL, killed
    print(f"killed after step {max(losses(broken))}, with checkpoints {broken.checkpoint_steps()}")

    lines: dict[int, list[list[str]]] = {
        1: [],
        2: [recipe(folder, "unbroken", *SCHEDULE), recipe(folder, "broken", *SCHEDULE)],
        3: [],
    }
    for place, (ranks, more) in places.items():
        lines[ranks].append(recipe(folder, place, *SCHEDULE, *more))
    for ranks, cases in lines.items():
        run_cases(ranks, cases, folder)
    return History(Run(folder / "unbroken"), broken, stopped, stopped_at, {place: Run(folder / place) for place in places})


def test_asked_to_stop_ranks_finish_the_step_save_and_say_how_to_go_on(history: History) -> None:
    said = history.stopped.out.splitlines()[-1]
    assert said.startswith(f"stopped by SIGTERM after step {history.stopped_at}, which is saved; to continue: ")
    assert history.stopped.errors == ""
    assert max(losses(history.elsewhere["single"])) == STEPS


def test_stopped_killed_and_continued_gives_the_same_bits(history: History) -> None:
    assert_identical(history.broken, history.unbroken)


@pytest.mark.parametrize("kills", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_after_a_rank_is_killed_the_launcher_starts_all_again_and_the_end_is_the_same_bits(
    history: History, recipe: Recipe, tmp_path: Path, kills: int
) -> None:
    """At random moments: in a step, in a save, or while the ranks start."""
    chance = fresh_random()
    run = Run(tmp_path / "restarted")

    def kill_ranks(process: subprocess.Popen[str]) -> None:
        lost: set[int] = set()
        for step in sorted(chance.sample(range(2, STEPS - 8), kills)):
            reach(run, step, process)
            time.sleep(chance.uniform(0, 0.1))
            # The step may be one that ranks of before had reached: those that are starting now have to show themselves.
            while len(ranks := heard(run) - lost) < 2:
                assert process.poll() is None, f"ended with status {process.returncode} before its ranks had begun"
                time.sleep(0.005)
            os.kill(chance.choice(sorted(ranks)), signal.SIGKILL)
            lost |= ranks

    words = ["pretrain", *recipe(tmp_path, "restarted", *SCHEDULE, "--launch.processes", "2", "--run.overwrite")]
    ended = started(words, tmp_path, kill_ranks)
    assert ended.status == 0, ended
    assert ended.errors.count("was killed by SIGKILL\n") == kills, ended
    assert f"all ranks are started again ({kills} of 3)" in ended.errors
    assert_identical(run, history.unbroken)


@pytest.mark.parametrize("place", ["single", "ddp on 2", "fsdp2 on 3"])
def test_continued_on_other_ranks_and_strategies_losses_agree(history: History, place: str) -> None:
    ours, theirs = losses(history.elsewhere[place]), losses(history.unbroken)
    assert ours.keys() == theirs.keys()
    for step, loss in theirs.items():
        assert ours[step] == pytest.approx(loss, rel=LOSS_TOLERANCE), step


def test_three_ranks_under_ddp_go_on_to_the_same_bits(recipe: Recipe, tmp_path: Path) -> None:
    """Of three, the order of a sum shows: it follows from where DDP puts a gradient in its buckets."""
    more = ["--parallel.engine", "ddp", "--schedule.name", "constant"]
    cases = [recipe(tmp_path, "unbroken", *more), *(recipe(tmp_path, "broken", *more, "--train.steps", n) for n in ("4", "10"))]
    run_cases(3, cases, tmp_path)
    broken, unbroken = Run(tmp_path / "broken"), Run(tmp_path / "unbroken")
    for name in ("loss", "grad_norm"):
        assert losses(broken, name) == losses(unbroken, name), name
    theirs = weights(unbroken)
    for name, tensor in weights(broken).items():
        assert torch.equal(tensor, theirs[name]), name


def test_interrupted_a_single_process_saves_and_goes_on_to_the_same_bits(recipe: Recipe, tmp_path: Path) -> None:
    """At the keyboard, or by a scheduler that warns before the time is up."""
    number = fresh_random().choice((signal.SIGINT, signal.SIGUSR1))
    print(f"interrupted by {number.name}")
    broken, unbroken = Run(tmp_path / "broken"), Run(tmp_path / "unbroken")

    def interrupt(process: subprocess.Popen[str]) -> None:
        reach(broken, 2, process)
        process.send_signal(number)

    ended = started(["pretrain", *recipe(tmp_path, "broken", *SCHEDULE)], tmp_path, interrupt)
    assert ended.status == 128 + number
    assert ended.errors == ""
    assert broken.checkpoint_steps()[-1] < STEPS
    assert f"stopped by {number.name} after step {broken.checkpoint_steps()[-1]}, which is saved" in ended.out.splitlines()[-1]
    assert lmforge_here(how_to_continue(ended)) == 0
    assert lmforge_here(["pretrain", *recipe(tmp_path, "unbroken", *SCHEDULE)]) == 0
    assert_identical(broken, unbroken)
