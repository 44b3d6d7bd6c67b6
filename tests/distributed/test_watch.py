"""Law 6 as users see it: a rank that hangs, is stopped, diverges or is slow is named while it
happens.
"""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from lmforge.core.records.runs import Run
from tests.distributed.conftest import HERE, Recipe
from tests.distributed.test_resume import heard, reach, started
from tests.support.preloaded import Forked, preloaded

FAULTY_RANK = HERE / "faults" / "faulty_rank.py"
ENDLESS = [
    "--train.steps",
    "100000",
    "--checkpoint.every_steps",
    "100000",
    "--watch.stall_seconds",
    "2",
]


class Going:
    """A run on two ranks that goes on while it is looked at."""

    def __init__(
        self, run: Run, has_ended: Callable[[], bool], outputs: Callable[[], list[Path]]
    ) -> None:
        self.run, self._has_ended, self._outputs = run, has_ended, outputs

    def said(self) -> str:
        return "".join(file.read_text() for file in self._outputs())

    def wait_for(self, pattern: str) -> re.Match[str]:
        """What the run prints that matches, as soon as it does."""
        deadline = time.monotonic() + 120
        while not (result := re.search(pattern, self.said(), re.M)):
            assert time.monotonic() < deadline, f"{pattern} was not said in\n{self.said()}"
            assert not self._has_ended(), f"it ended\n{self.said()}"
            time.sleep(0.05)
        return result

    def steps(self) -> int:
        return max((record["step"] for record in self.run.read_metrics()), default=0)

    def heartbeat(self, rank: int) -> dict[str, object]:
        return json.loads((self.run.health_folder / f"rank-{rank}.json").read_text())


@contextmanager
def going(recipe: Recipe, folder: Path, *more: str, **fault: str) -> Iterator[Going]:
    """With a fault in rank 1, which `faulty_rank.py` describes. The ranks are killed in the end."""
    words = ["pretrain", *recipe(folder, "watched", *ENDLESS, *more)]
    variables, run = {"FAULTY_RANK": "1", **fault}, Run(folder / "watched")
    with ThreadPoolExecutor(1) as waiting:
        ended: Future[object] = waiting.submit(
            preloaded().run,
            words,
            folder,
            script=FAULTY_RANK,
            ranks=2,
            variables=variables,
            timeout=300,
        )
        try:
            yield Going(
                run, ended.done, lambda: sorted([*folder.glob("out-*"), *folder.glob("errors-*")])
            )
        finally:
            for process in heard(run):
                with suppress(psutil.NoSuchProcess):
                    psutil.Process(process).kill()


def test_a_rank_that_sleeps_is_named_with_its_phase_and_stack_and_so_is_who_waits(
    recipe: Recipe, tmp_path: Path
) -> None:
    awake = tmp_path / "awake"
    with going(recipe, tmp_path, FAULT="data", SLEEP="0.5", AWAKE=str(awake)) as run:
        run.wait_for(
            r"^lmforge: STALL: no progress for .* at step 7 .*: rank 1 is stuck, rank 0 waits"
            r" for it"
        )
        run.wait_for(r"all stacks: ")
        said = run.said()
        assert re.search(r"^  rank 1 .* data .* stuck +faulty_rank.py:\d+ batches", said, re.M), (
            said
        )
        assert re.search(
            r"^  rank 0 .* reduce .* waits +all_reduce \d+ of default_pg, from distributed.py:\d+"
            r" all_reduce_sum",
            said,
            re.M,
        ), said
        assert re.search(r"^    faulty_rank.py:\d+ batches: time.sleep\(SLEEP\)", said, re.M), said
        assert "time.sleep(SLEEP)" in (run.run.log_path(1, 1).with_suffix(".stack.txt")).read_text()
        assert "rank 1 is stuck" in run.run.log_path(1, 0).read_text()
        assert run.steps() == 7
        awake.touch()
        run.wait_for(
            r"^lmforge: making progress again after \d+ s in reduce \(rank 1 was stuck in data\)"
        )
        events = [json.loads(line) for line in run.run.events_path.read_text().splitlines()]
        stall, over = (event for event in events if event["kind"] in ("stall", "stall over"))
        assert (stall["kind"], over["kind"]) == ("stall", "stall over")
        assert stall["reason"].endswith("rank 1 is stuck, rank 0 waits for it")
        assert over["reason"].startswith("making progress again after ")


@pytest.mark.slow
def test_a_stopped_rank_is_distinguished_from_a_sleeping_one_and_its_peers_end_when_nobody_continues(
    recipe: Recipe, tmp_path: Path
) -> None:
    run = Run(tmp_path / "watched")

    def stop_one(process: Forked) -> None:
        going_run = Going(
            run, lambda: process.poll() is not None, lambda: [process.out, process.errors]
        )
        reach(run, 3, process)
        stopped = int(str(going_run.heartbeat(0)["process"]))
        os.kill(stopped, signal.SIGSTOP)
        try:
            going_run.wait_for(rf"^  rank 0 .* stuck +process {stopped} is stopped \(SIGSTOP\)")
            going_run.wait_for(
                r"^lmforge: no rank has made progress for .* this run ends itself, with status 75"
            )
        finally:
            os.kill(stopped, signal.SIGCONT)

    words = [
        *recipe(tmp_path, "watched", *ENDLESS),
        "--launch.processes",
        "2",
        "--launch.max_restarts",
        "0",
    ]
    ended = started(["pretrain", *words, "--watch.timeout_seconds", "8"], tmp_path, stop_one)
    assert ended.status == 1
    assert json.loads((run.health_folder / "rank-1.json").read_text())["phase"] == "failed"


@pytest.mark.slow
def test_a_rank_that_is_stopped_after_the_last_step_is_named_before_the_others_end(
    recipe: Recipe, tmp_path: Path
) -> None:
    with going(recipe, tmp_path, "--train.steps", "4", FAULT="end") as run:
        stopped = int(run.wait_for(r"^  rank 1 .* stuck +process (\d+) is stopped \(SIGSTOP\)")[1])
        assert run.run.checkpoint_path(4).exists()
        assert run.heartbeat(0)["phase"] == "barrier"
        os.kill(stopped, signal.SIGCONT)
        run.wait_for(r"^trained 4 steps in ")


@pytest.mark.slow
def test_ranks_in_different_collectives_are_reported_as_such(
    recipe: Recipe, tmp_path: Path
) -> None:
    with going(recipe, tmp_path, FAULT="skip") as run:
        run.wait_for(
            r"^lmforge: STALL: .* the ranks wait for each other, each in another collective"
        )
        run.wait_for(r"all stacks: ")
        said = run.said()
        number = re.search(
            r"^  rank 0 .* waits +all_reduce (\d+) of default_pg, from distributed.py", said, re.M
        )
        assert number, said
        assert re.search(
            rf"^  rank 1 .* waits +barrier {number[1]} of default_pg, from faulty_rank.py",
            said,
            re.M,
        ), said
        assert f"last in common: {int(number[1]) - 1} of default_pg" in said


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_rank_that_is_slow_in_forward_is_named_and_the_quick_one_that_waits_is_not(
    recipe: Recipe, tmp_path: Path, engine: str
) -> None:
    with going(recipe, tmp_path, "--parallel.engine", engine, FAULT="forward", SLEEP="0.3") as run:
        run.wait_for(
            r"^rank 1: forward takes .* \(.* s against .* s per step\); the others wait for it"
        )
        reported_at = run.steps()
        while run.steps() < reported_at + 10:
            time.sleep(0.05)
        assert not re.search(r"^rank 0: ", run.said(), re.M), run.said()
        # Building may stand still where the machine is busy with other work, and is then reported.
        assert not re.search(r"STALL: .* at step [1-9]", run.said()), run.said()
