"""Two runs in one folder: who no longer has the lock under the run's path writes, renames and
removes nothing there.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import xxhash

from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.rank_info import RankInfo
from lmforge.core.errors import LockLost
from lmforge.core.records.runs import Run
from lmforge.core.steps.bad_steps import BadStep
from lmforge.core.steps.checkpoints import Checkpoints
from tests.distributed.conftest import Recipe
from tests.distributed.test_resume import PACED_RUN, Pace, reach
from tests.support.grids import parametrize
from tests.support.preloaded import Forked, preloaded, rank_variables

SCHEDULE = [
    "--checkpoint.every_steps",
    "2",
    "--checkpoint.keep_last",
    "1",
    "--validation.every_steps",
    "2",
]
REACHED, STEPS = 4, 9


@contextmanager
def paused_at_step_4(
    words: list[str], folder: Path, run: Run, ranks: int
) -> Iterator[tuple[list[Forked], Pace]]:
    """A run of STEPS steps that has saved its fourth and waits."""
    pace = Pace(folder, REACHED)
    processes = [
        preloaded().start(
            ["pretrain", *words],
            folder,
            script=PACED_RUN,
            variables={**variables, **pace.variables},
        )
        for variables in (rank_variables(ranks) if ranks > 1 else [{}])
    ]
    try:
        reach(run, REACHED, *processes)
        # The second is being deleted.
        while run.checkpoint_steps() != [REACHED] or list(run.checkpoints_folder.glob(".*")):
            time.sleep(0.005)
        yield processes, pace
    finally:
        for each in processes:
            each.kill()


def contents(own: set[str], *folders: Path) -> dict[str, str]:
    """A checksum of each file but those in folders that are still the first run's `own`."""
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
    files = [path for path in files if not own & {*path.parts}]
    return {str(path): xxhash.xxh3_64_hexdigest(path.read_bytes()) for path in files}


def remove_folder(run: Run) -> None:
    shutil.rmtree(run.path.rename(run.path.with_name("removed")))


def remove_lock(run: Run) -> None:
    (run.path / ".lock").unlink()


@parametrize(
    ("remove", "ranks", "other_begins", "elsewhere"),
    [
        (remove_folder, 2, True, False),
        (remove_lock, 1, False, False),
        pytest.param(remove_lock, 2, True, False, marks=pytest.mark.slow),
        pytest.param(remove_lock, 1, True, True, marks=pytest.mark.slow),
        pytest.param(remove_folder, 2, True, True, marks=pytest.mark.slow),
    ],
    fast=(1,),
)
def test_a_run_that_has_lost_its_folder_ends_on_all_ranks_and_changes_nothing_there(
    remove: Callable[[Run], None],
    ranks: int,
    other_begins: bool,
    elsewhere: bool,
    recipe: Recipe,
    tmp_path: Path,
) -> None:
    """Another run has saved steps there which the first would write or delete."""
    external = tmp_path / "external" if elsewhere else None
    options = [*SCHEDULE, *(["--checkpoint.folder", str(external)] if external else [])]
    run = Run(tmp_path / "a", external / "a" if external else None)
    traced = ["--log.profile_steps", f"{REACHED + 1}:{STEPS}"]
    words = recipe(tmp_path, "a", *options, *traced, "--train.steps", str(STEPS))
    # Of a run without its lock its logs are open, and a heartbeat may be on its way.
    own = {*(["attempt-1"] if remove == remove_lock else []), *([] if other_begins else ["health"])}
    with paused_at_step_4(words, tmp_path, run, ranks) as (processes, pace):
        remove(run)
        if other_begins:
            (tmp_path / "other").mkdir()
            other = recipe(
                tmp_path, "a", *options, "--train.steps", "6", "--checkpoint.keep_last", "9"
            )
            done = preloaded().run(["pretrain", *other], tmp_path / "other")
            assert done.returncode == 0, done.stderr
        places = [run.path, *([external] if external else [])]
        before = contents(own, *places)
        pace.allow(STEPS)
        assert [each.wait(60) for each in processes] == [1] * ranks
        assert contents(own, *places) == before
    printed = "".join(each.errors.read_text() for each in processes)
    lines = [line for line in printed.splitlines() if line.startswith("lmforge: ")]
    assert [
        line.startswith(f"lmforge: {run.path}: this process has lost its lock: the folder")
        for line in lines
    ] == [True]


def test_a_run_whose_folder_is_moved_and_has_a_link_in_its_place_goes_on_there(
    recipe: Recipe, tmp_path: Path
) -> None:
    run, moved = Run(tmp_path / "a"), Run(tmp_path / "moved")
    words = recipe(tmp_path, "a", *SCHEDULE, "--train.steps", str(STEPS))
    with paused_at_step_4(words, tmp_path, run, 1) as (processes, pace):
        run.path.rename(moved.path)
        run.path.symlink_to(moved.path)
        pace.allow(STEPS)
        assert [each.wait(60) for each in processes] == [0], processes[0].errors.read_text()
    assert moved.checkpoint_steps() == [STEPS]
    assert moved.read_metrics()[-1]["step"] == STEPS


def test_a_run_that_has_lost_its_lock_does_not_roll_back_to_what_another_has_saved(
    tmp_path: Path,
) -> None:
    run, dist_ctx = Run(tmp_path / "a"), DistributedContext(RankInfo(), torch.device("cpu"), None)
    checkpointer, detector = (
        Mock(run=run, dist_ctx=dist_ctx),
        Mock(rollbacks=0, consecutive_bad_steps=1),
    )
    config = Mock(train=Mock(steps=9))
    checkpoints = Checkpoints(checkpointer, config, Mock(), Mock(), Mock(), detector)
    run.lock()
    try:
        remove_lock(run)
        with pytest.raises(LockLost):
            checkpoints.roll_back(BadStep(3, 2, 9.0, 1.0), "1 bad step in a row")
    finally:
        run.unlock()


def test_a_lock_that_cannot_be_read_is_a_save_that_fails(recipe: Recipe, tmp_path: Path) -> None:
    """The kernel answers with EIO where a process reads the beginning of its memory."""
    run, aside = Run(tmp_path / "a"), tmp_path / "aside"
    words = recipe(tmp_path, "a", *SCHEDULE, "--train.steps", str(STEPS))
    with paused_at_step_4(words, tmp_path, run, 1) as (processes, pace):
        os.rename(run.path / ".lock", aside)
        (run.path / ".lock").symlink_to("/proc/self/mem")
        pace.allow(REACHED + 2)
        while "Input/output error; saves failed in a row: 1" not in processes[0].out.read_text():
            assert processes[0].poll() is None, processes[0].errors.read_text()
            assert run.checkpoint_steps() == [REACHED]
            time.sleep(0.005)
        assert run.checkpoint_steps() == [REACHED]
        os.rename(aside, run.path / ".lock")
        pace.allow(STEPS)
        assert [each.wait(60) for each in processes] == [0], processes[0].errors.read_text()
    assert run.checkpoint_steps() == [STEPS]
    assert [record["step"] for record in run.read_metrics()] == list(range(1, STEPS + 1))
