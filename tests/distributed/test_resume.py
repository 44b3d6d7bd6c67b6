"""Law 5 as users see it: a run that was stopped in any way and resumed equals an uninterrupted run.

One history holds most of it: two ranks, of which one is killed, which the launcher starts again,
asked to stop, continued, killed without warning, continued to the end.
"""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from lmforge.cli import run as lmforge_here
from lmforge.core.distributed.processes import STOP_SIGNALS, signal_name
from lmforge.core.records.runs import Run
from lmforge.lab.bench.bounds import FP32
from tests.distributed.conftest import HERE, RECIPE_STEPS, Recipe, losses, run_cases, weights
from tests.seeds import fresh_random
from tests.support.preloaded import Forked, preloaded, rank_variables

PACED_RUN = HERE / "faults" / "paced_run.py"
STEPS = 20
SCHEDULE = [
    "--train.steps",
    str(STEPS),
    "--checkpoint.every_steps",
    "4",
    "--checkpoint.keep_last",
    "20",
]
# A validation just before a checkpoint leaves sharded weights gathered, and must not show in what
# is saved.
SCHEDULE += ["--validation.every_steps", "4"]


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it said until then."""

    status: int
    out: str
    errors: str


class Pace:
    """The steps that ranks of `paced_run.py` may take."""

    def __init__(self, folder: Path, last_step: int) -> None:
        self._file = folder / "pace"
        self.variables = {"PACE": str(self._file)}
        self.allow(last_step)

    def allow(self, last_step: int) -> None:
        self._file.write_text(str(last_step))


def started(
    words: list[str], folder: Path, meanwhile: Callable[[Forked], None], pace: Pace | None = None
) -> Ended:
    """Carry out a command line in processes of their own, doing something to them meanwhile."""
    process = preloaded().start(
        words,
        folder,
        script=PACED_RUN if pace else None,
        variables=pace.variables if pace else None,
    )
    try:
        meanwhile(process)
        status = process.wait(timeout=300)
    finally:
        if process.poll() is None:
            for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                each.kill()
    return Ended(status, process.out.read_text(), process.errors.read_text())


def reach(run: Run, step: int, *processes: Forked) -> None:
    """Wait until the run's metrics have a step."""
    while not (records := run.read_metrics()) or records[-1]["step"] < step:
        for process in processes:
            assert process.poll() is None, (
                f"ended with status {process.poll()} before step {step}:"
                f" {process.errors.read_text()}"
            )
        time.sleep(0.005)


def heard(run: Run) -> set[int]:
    """The process ids of the ranks that publish what they do."""
    return {
        json.loads(text)["process"]
        for file in run.health_folder.glob("rank-?.json")
        if (text := file.read_text())
    }


def lose_rank(run: Run, step: int, process: Forked, pace: Pace, lost: set[int]) -> set[int]:
    """Kill one of two ranks at a random moment from `step` on, in the steps after it, in a save or
    while it waits.

    Returns all that have then run; `lost` are those of before.
    """
    chance = fresh_random()
    pace.allow(step + 3)
    reach(run, step, process)
    time.sleep(chance.uniform(0, 0.1))
    ranks = starting_ranks(run, process, lost)
    os.kill(chance.choice(sorted(ranks)), signal.SIGKILL)
    return lost | ranks


def starting_ranks(run: Run, process: Forked, lost: set[int]) -> set[int]:
    """The two ranks that run, once both publish what they do: what is there may still be of those
    before them, `lost`.
    """
    while len(ranks := heard(run) - lost) < 2:
        assert process.poll() is None, (
            f"ended with status {process.poll()} before its ranks had begun"
        )
        time.sleep(0.005)
    return ranks


def kill_both_ranks(
    words: list[str], folder: Path, run: Run, step: int, seconds: float
) -> list[int]:
    """Carry out a command line on two ranks, and kill both `seconds` after `step`.

    Returns their statuses.
    """
    folder.mkdir()
    pace = Pace(folder, STEPS - 1)  # it is not over when it is to be killed
    ranks = [
        preloaded().start(
            words, folder, script=PACED_RUN, variables={**variables, **pace.variables}
        )
        for variables in rank_variables(2)
    ]
    try:
        reach(run, step, *ranks)
        time.sleep(seconds)
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.wait(timeout=60) for rank in ranks]


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
    """Runs of one recipe: never stopped; stopped, killed and continued; and each continued
    elsewhere from one checkpoint.
    """

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
    asked_by = chance.choice([number for number in STOP_SIGNALS if number != signal.SIGINT])

    pace = Pace(folder, 0)

    def lose_a_rank_and_ask_to_stop(process: Forked) -> None:
        step = chance.randrange(2, 5)
        lost = lose_rank(broken, step, process, pace, set())
        starting_ranks(broken, process, lost)
        pace.allow(step + 5)
        reach(broken, step + 4, process)
        # The launcher asks its ranks to stop for either.
        process.send_signal(asked_by)
        allowed = step + 5
        while process.poll() is None:
            allowed += 1
            pace.allow(allowed)
            time.sleep(0.5)  # the launcher passes the signal on in a moment

    words = ["pretrain", *recipe(folder, "broken", *SCHEDULE, "--launch.processes", "2")]
    stopped = started(words, folder, lose_a_rank_and_ask_to_stop, pace)
    assert stopped.status == 128 + asked_by, stopped
    stopped_at = broken.checkpoint_steps()[-1]
    assert stopped_at < STEPS - 3
    places = {
        "single": (1, []),
        "ddp on 2": (2, ["--parallel.engine", "ddp"]),
        "fsdp2 on 3": (3, []),
    }
    for place in places:
        shutil.copytree(broken.path, folder / place, ignore=shutil.ignore_patterns(".lock"))

    killed_after = chance.randrange(stopped_at + 1, STEPS - 1)
    killed = kill_both_ranks(
        how_to_continue(stopped), folder / "killed", broken, killed_after, chance.uniform(0, 0.1)
    )
    assert killed == [-signal.SIGKILL] * 2
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
    return History(
        Run(folder / "unbroken"),
        broken,
        stopped,
        stopped_at,
        {place: Run(folder / place) for place in places},
    )


@pytest.mark.slow
def test_asked_to_stop_ranks_finish_the_step_save_and_say_how_to_continue(history: History) -> None:
    said = history.stopped.out.splitlines()[-1]
    # The launcher asks its ranks by SIGTERM: processes that a rank has started would die of
    # another. What came is named.
    name = signal_name(history.stopped.status - 128)
    passed_on = (
        "" if name == "SIGTERM" else f"lmforge: {name} came: all ranks are asked to save and end\n"
    )
    assert said.startswith(
        f"stopped by {name} after step {history.stopped_at}, which is saved; to continue: "
    )
    assert history.stopped.errors.endswith(
        f"lmforge: all ranks are started again (1 of 3)\n{passed_on}"
    )
    assert max(losses(history.elsewhere["single"])) == STEPS


def test_a_rank_killed_all_started_again_stopped_killed_and_continued_give_the_same_bits(
    history: History,
) -> None:
    assert history.stopped.errors.count("was killed by SIGKILL\n") == 1, history.stopped
    assert_identical(history.broken, history.unbroken)


@pytest.mark.slow
def test_after_two_kills_the_launcher_has_started_all_ranks_twice_and_the_end_is_the_same_bits(
    history: History, recipe: Recipe, tmp_path: Path
) -> None:
    """At random moments: in a step, in a save, or while the ranks start."""
    run, pace = Run(tmp_path / "restarted"), Pace(tmp_path, 0)

    def kill_ranks(process: Forked) -> None:
        lost: set[int] = set()
        for step in sorted(fresh_random().sample(range(2, STEPS - 8), 2)):
            lost = lose_rank(run, step, process, pace, lost)
        pace.allow(STEPS)

    words = [
        "pretrain",
        *recipe(tmp_path, "restarted", *SCHEDULE, "--launch.processes", "2", "--run.overwrite"),
    ]
    ended = started(words, tmp_path, kill_ranks, pace)
    assert ended.status == 0, ended
    assert ended.errors.count("was killed by SIGKILL\n") == 2, ended
    assert "all ranks are started again (2 of 3)" in ended.errors
    assert_identical(run, history.unbroken)


@pytest.mark.parametrize("place", ["single", "ddp on 2", "fsdp2 on 3"])
def test_continued_on_other_ranks_and_strategies_losses_agree(history: History, place: str) -> None:
    ours, theirs = losses(history.elsewhere[place]), losses(history.unbroken)
    assert ours.keys() == theirs.keys()
    for step, loss in theirs.items():
        assert ours[step] == pytest.approx(loss, rel=FP32.loss), step


def test_three_ranks_under_ddp_continue_to_the_same_bits(recipe: Recipe, tmp_path: Path) -> None:
    """Of three, the order of a sum shows: it follows from where DDP puts a gradient in its
    buckets.
    """
    more = ["--parallel.engine", "ddp", "--schedule.name", "constant"]
    cases = [
        recipe(tmp_path, "unbroken", *more),
        *(recipe(tmp_path, "broken", *more, "--train.steps", n) for n in ("3", str(RECIPE_STEPS))),
    ]
    run_cases(3, cases, tmp_path)
    broken, unbroken = Run(tmp_path / "broken"), Run(tmp_path / "unbroken")
    for name in ("loss", "grad_norm"):
        assert losses(broken, name) == losses(unbroken, name), name
    theirs = weights(unbroken)
    for name, tensor in weights(broken).items():
        assert torch.equal(tensor, theirs[name]), name


def test_interrupted_a_single_process_saves_and_continues_to_the_same_bits(
    recipe: Recipe, tmp_path: Path
) -> None:
    """At the keyboard, by a terminal that is closed, or by a scheduler that warns before the time
    is up.
    """
    number = fresh_random().choice(STOP_SIGNALS)
    print(f"interrupted by {signal_name(number)}")
    broken, unbroken, pace = Run(tmp_path / "broken"), Run(tmp_path / "unbroken"), Pace(tmp_path, 3)

    def interrupt(process: Forked) -> None:
        reach(broken, 2, process)
        process.send_signal(number)
        pace.allow(STEPS - 1)

    ended = started(["pretrain", *recipe(tmp_path, "broken", *SCHEDULE)], tmp_path, interrupt, pace)
    assert ended.status == 128 + number
    assert ended.errors == ""
    assert broken.checkpoint_steps()[-1] < STEPS
    assert (
        f"stopped by {signal_name(number)} after step {broken.checkpoint_steps()[-1]}, which is"
        " saved" in ended.out.splitlines()[-1]
    )
    assert lmforge_here(how_to_continue(ended)) == 0
    assert lmforge_here(["pretrain", *recipe(tmp_path, "unbroken", *SCHEDULE)]) == 0
    assert_identical(broken, unbroken)
