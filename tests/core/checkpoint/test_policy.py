"""Which checkpoints are saved and kept: by steps, by time, the best, the kept ones, model-only
ones.
"""

import itertools
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lmforge.cli import run as command
from lmforge.core import checkpoint
from lmforge.core.checkpoint import Manifest, RetentionPolicy, async_save
from lmforge.core.records.run_records import higher_is_better
from lmforge.core.records.runs import Run
from tests.distributed.conftest import weights
from tests.support.preloaded import preloaded

Train = Callable[..., Run]


@pytest.fixture
def train(tmp_path: Path, tiny_options: list[str]) -> Train:
    def go(name: str, *words: object) -> Run:
        line = ["pretrain", *tiny_options, "--run.folder", tmp_path, "--run.name", name, *words]
        assert command([str(word) for word in line]) == 0
        return Run(tmp_path / name)

    return go


def manifest(step: int, permanent: bool, loss: float | None) -> Manifest:
    metrics = {} if loss is None else {"val/loss": loss}
    return Manifest(step, step, 1, "", {}, {}, "", "", {}, {}, metrics=metrics, kept=permanent)


def test_the_newest_the_best_and_the_permanent_stay() -> None:
    losses = {1: 0.5, 2: 0.9, 3: 0.4, 4: None, 5: 0.4, 6: 0.8, 7: 0.7}
    there = {step: manifest(step, step == 2, loss) for step, loss in losses.items()}
    assert RetentionPolicy(keep_last=2).steps_to_delete(there) == [1, 3, 4, 5]
    # Of equals the older.
    assert RetentionPolicy(keep_last=2, keep_best=1).steps_to_delete(there) == [1, 4, 5]
    assert RetentionPolicy(keep_last=1, keep_best=2).steps_to_delete(there) == [1, 4, 6]
    assert RetentionPolicy(keep_last=1, keep_best=1, maximize=True).steps_to_delete(there) == [
        1,
        3,
        4,
        5,
        6,
    ]  # step 2 stays anyway
    assert RetentionPolicy(keep_last=1, keep_best=3, metric="absent").steps_to_delete(there) == [
        1,
        3,
        4,
        5,
        6,
    ]
    there[3] = manifest(3, False, float("nan"))
    # What is no number is not the best.
    assert RetentionPolicy(keep_last=1, keep_best=1).steps_to_delete(there) == [1, 3, 4, 6]


def test_the_highest_accuracy_reward_and_pass_rate_is_best_and_the_lowest_of_all_else() -> None:
    highest = [
        "reward",
        "val/reward",
        "pass@1",
        "val/pass@n",
        "rewards/accuracy",
        "val/rewards/margin",
    ]
    highest += [
        f"val/reward-loss/{score}"
        for score in ("acc", "acc_norm", "exact_match", "contains", "regex")
    ]
    lowest = [
        "loss",
        "val/loss",
        "val/bits_per_byte",
        "val/acc/bits_per_byte",
        "val/loss/acc",
        "val/bits_per_byte/reward",
    ]
    lowest += ["val/rewards/rejected", "no_reward", "grad_norm", "step_seconds"]
    assert [name for name in [*highest, *lowest] if higher_is_better(name)] == highest


def test_the_first_save_finds_its_plan_and_its_memory_made_before_training(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, plan, allocate = [], async_save._SavePlanner.create_local_plan, async_save._host_tensor

    def recorded(function: Callable[..., object]) -> Callable[..., object]:
        def record(*arguments: object, **named: object) -> object:
            made.append((function.__name__, threading.current_thread().name))
            return function(*arguments, **named)

        return record

    monkeypatch.setattr(async_save._SavePlanner, "create_local_plan", recorded(plan))
    monkeypatch.setattr(async_save, "_host_tensor", recorded(allocate))
    run = train("a", "--checkpoint.every_steps", 2)
    assert run.checkpoint_steps() == [2, 4, 6]
    assert made.count(("create_local_plan", "checkpoint")) == 1
    assert {thread for _, thread in made} == {"checkpoint"}
    assert len(made) > 20  # a copy of each tensor


def test_a_run_keeps_its_best_checkpoint_and_the_permanent_ones_beside_the_newest(
    train: Train,
) -> None:
    words = [
        "--train.steps",
        12,
        "--checkpoint.every_steps",
        2,
        "--checkpoint.keep_last",
        1,
        "--validation.every_steps",
        "none",
    ]
    words += [
        "--checkpoint.keep_every_steps",
        5,
        "--checkpoint.keep_best",
        1,
        "--optimizer.lr",
        0.3,
    ]
    run = train("a", *words)
    validated = {
        record["step"]: record["val/loss"] for record in run.read_metrics() if "val/loss" in record
    }
    # Every checkpoint is judged, whatever else is validated.
    assert sorted(validated) == [2, 4, 5, 6, 8, 10, 12]
    passing = {step: loss for step, loss in validated.items() if step not in (5, 10)}
    best = min(validated, key=lambda step: (validated[step], step))
    assert set(run.checkpoint_steps()) == {5, 10, 12, best}, passing
    assert checkpoint.read_manifest(run.checkpoint_path(5)).kept
    assert not checkpoint.read_manifest(run.checkpoint_path(12)).kept
    for step in run.checkpoint_steps():
        assert checkpoint.verify(run.checkpoint_path(step)).metrics["val/loss"] == validated[step]


def test_by_the_clock_a_run_is_saved_between_its_steps_too(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The clock is a twentieth of a second later at each look, however fast the machine is.
    looks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(looks) / 20)
    monkeypatch.setattr("lmforge.core.steps.checkpoints.time", clock)
    words = ["--train.steps", 60, "--checkpoint.every_steps", 1000, "--checkpoint.keep_last", 100]
    run = train("a", *words, "--checkpoint.every_minutes", 0.003)
    assert len(run.checkpoint_steps()) > 10


@pytest.mark.slow
def test_the_model_alone_at_the_end_is_a_third_and_a_longer_run_continues_from_the_one_before(
    train: Train, capsys: pytest.CaptureFixture[str], tiny_run: Path
) -> None:
    run = train("a", "--checkpoint.last_save_model_only")
    assert all(
        torch.equal(tensor, weights(run)[name]) for name, tensor in weights(Run(tiny_run)).items()
    )

    def size(step: int) -> int:
        return sum(file.stat().st_size for file in run.checkpoint_path(step).glob("*.distcp"))

    assert size(6) < 0.4 * size(4)
    capsys.readouterr()
    train("a", "--train.steps", 8, "--schedule.name", "constant")
    printed = capsys.readouterr().out
    assert f"{run.checkpoint_path(6)}: holds the model alone; skipped\n" in printed
    assert f"continuing {run.path} from step 4\n" in printed


def test_what_is_saved_beside_the_training_is_the_step_it_says_and_the_same_as_saved_in_between(
    train: Train,
) -> None:
    beside, between = (
        train("beside", "--checkpoint.keep_last", 9),
        train("between", "--checkpoint.async_save", "false"),
    )
    assert beside.checkpoint_steps() == between.checkpoint_steps() == [2, 4, 6]
    for step in beside.checkpoint_steps():
        theirs = weights(between, step)
        for name, tensor in weights(beside, step).items():
            assert torch.equal(tensor, theirs[name]), (step, name)
    assert not torch.equal(
        weights(beside, 2)["lm_head.weight"], weights(beside, 4)["lm_head.weight"]
    )


def test_a_disk_too_small_for_the_kept_checkpoints_is_said_at_the_start_and_a_full_one_names_the_oldest(
    train: Train,
    tmp_path: Path,
    tiny_options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def free(num_bytes: int) -> None:
        disk_usage = SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=num_bytes))
        monkeypatch.setattr(async_save, "shutil", disk_usage)

    free(10**9)
    run = train("a", "--checkpoint.keep_last", 2)
    assert " are kept, and one more" not in capfd.readouterr().err
    assert run.checkpoint_steps() == [4, 6]
    free(1_000_000)  # one checkpoint, and not three
    train("b", "--checkpoint.keep_last", 2)
    folder = tmp_path / "b" / "checkpoints"
    kept = (
        f"lmforge: {folder}: 2 checkpoints of 0.6 MiB are kept, and one more while it is written:"
        " 1.0 MiB are free; "
    )
    assert kept in capfd.readouterr().err
    free(100_000)
    line = [
        "pretrain",
        *tiny_options,
        "--run.folder",
        tmp_path,
        "--run.name",
        "a",
        "--train.steps",
        8,
    ]
    assert command([str(word) for word in line]) == 1
    assert f"are free; delete {run.checkpoint_path(4)}, the oldest" in capfd.readouterr().err
    assert run.checkpoint_steps() == [4, 6]


def test_a_save_that_fails_is_reported_and_tried_again_and_some_in_a_row_end_the_run(
    tmp_path: Path, tiny_options: list[str]
) -> None:
    """While it trains, the folder of the checkpoints is moved away and a file takes its place: a
    mount that is lost, and there are no rights to lack.
    """
    elsewhere = tmp_path / "elsewhere"
    words = [
        "--run.folder",
        tmp_path,
        "--run.name",
        "a",
        "--train.steps",
        100_000,
        "--checkpoint.folder",
        elsewhere,
    ]
    script = tmp_path / "soon.py"
    script.write_text(
        "from lmforge.cli import main\nfrom lmforge.core.steps import"
        " checkpoints\ncheckpoints.RETRY_SECONDS = 0.2\nmain()\n"
    )
    process = preloaded().start(["pretrain", *tiny_options, *words], tmp_path, script=script)
    run = Run(tmp_path / "a", elsewhere / "a")
    while not run.checkpoint_steps():
        assert process.poll() is None
        time.sleep(0.05)
    elsewhere.rename(tmp_path / "gone")
    elsewhere.write_text("in the way")
    status, errors = process.wait(timeout=120), process.errors.read_text()
    assert status == 1, errors
    *failures, last = [
        line for line in errors.splitlines() if "old checkpoints could not be deleted" not in line
    ]
    assert [line.rpartition(" ")[2] for line in failures] == ["1", "2", "3"]
    assert all(
        line.startswith(f"lmforge: {elsewhere / 'a'}: the checkpoint step-0") for line in failures
    )
    assert ": 3 saves in a row have failed: " in last
    assert last.split()[1] == "step"
    assert elsewhere.read_text() == "in the way"


def test_a_run_moved_to_another_folder_and_host_continues_there(
    train: Train, tmp_path: Path, tiny_options: list[str], tiny_run: Path
) -> None:
    run = train("a", "--train.steps", 4, "--schedule.name", "constant")
    whole = train("whole", "--schedule.name", "constant")
    moved = tmp_path / "far" / "away" / "b"
    moved.parent.mkdir(parents=True)
    shutil.move(run.path, moved)
    line = [
        sys.executable,
        "-m",
        "lmforge",
        "pretrain",
        *tiny_options,
        "--schedule.name",
        "constant",
        "--run.folder",
        str(moved.parent),
    ]
    shell = f"hostname elsewhere; exec {' '.join([*line, '--run.name', 'b'])}"
    here = subprocess.run(["unshare", "-ru", "true"], capture_output=True).returncode == 0
    if not here:  # no right to another host name: another folder alone
        shell = shell.partition("; ")[2]
    done = subprocess.run(
        ["unshare", "-ru", "sh", "-c", shell] if here else ["sh", "-c", shell],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert f"continuing {moved} from step 4" in done.stdout
    theirs = weights(whole)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in weights(Run(moved)).items())
    if here:
        assert '"host": "elsewhere"' in (moved / "environment.json").read_text()
