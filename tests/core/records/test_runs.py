"""The run directory: its layout, which process may write there, and messages about it."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmforge.cli import run as command
from lmforge.core.errors import UserError
from lmforge.core.files.atomic_files import atomic_write_text
from lmforge.core.files.locks import hold_lock, try_lock
from lmforge.core.options.options import validate_options
from lmforge.core.options.stage import PretrainConfig
from lmforge.core.parallel import precision
from lmforge.core.records.runs import MANIFEST, Run, describe_environment
from lmforge.ops.report.run_data import read_events
from tests.conftest import Refusal
from tests.support.grids import parametrize

HOLD = """
import sys
from pathlib import Path
from lmforge.core.records.runs import Run
Run(Path(sys.argv[1])).lock()
print("held", flush=True)
sys.stdin.read()
"""


WITHOUT_FLOCK = ["-m", "tests.support.without_flock"]
LEASE_SECONDS = 2.0
HOLD_FOR_SECONDS = (
    f"from lmforge.core.files import locks\nlocks.LEASE_SECONDS = {LEASE_SECONDS}\n{HOLD}"
)


@contextmanager
def another_process_trains(
    run: Run, how: Sequence[str] = ("-c",), program: str = HOLD
) -> Iterator[subprocess.Popen[str]]:
    holder = subprocess.Popen(
        [sys.executable, *how, program, str(run.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield holder
    finally:
        holder.kill()
        holder.communicate()


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_naming_a_run_touches_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path / "a")
    assert not run.exists()
    assert run.checkpoint_steps() == []
    assert run.read_metrics() == []
    assert files(tmp_path) == []


def test_a_run_that_is_begun_holds_a_recipe_that_gives_the_same_options_again(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path / "a")
    config = validate_options(
        PretrainConfig,
        {"train": {"steps": 500, "seed": 7}, "sample": {"prompts": ["\x7f", 'a "quoted"\\ \n']}},
    ).with_name("a")
    assert run.start_attempt(config) == 1
    assert run.exists()
    assert run.load_config() == config
    assert run.log_path(1, 0).parent.is_dir()
    assert run.health_folder.is_dir()
    assert run.checkpoints_folder.is_dir()


def test_each_attempt_has_a_number_of_its_own(tmp_path: Path) -> None:
    run = Run(tmp_path / "a")
    assert [run.start_attempt(PretrainConfig()) for _ in range(11)] == list(range(1, 12))


def test_a_run_of_a_version_with_more_options_is_opened_without_them(
    tiny_run: Path, tmp_path: Path
) -> None:
    """Its recipe has every option of its time."""
    shutil.copytree(tiny_run, tmp_path / "old")
    recipe = tmp_path / "old" / "recipe.toml"
    expected = Run.open(tmp_path / "old").load_config()
    recipe.write_text(recipe.read_text().replace("[data]\n", "[data]\ncache_gib = 3.0\n", 1))
    assert "cache_gib" in recipe.read_text()
    assert Run.open(tmp_path / "old").load_config() == expected


def test_overwriting_is_done_once_and_not_recorded(tmp_path: Path) -> None:
    run = Run(tmp_path / "a")
    run.lock()
    run.start_attempt(PretrainConfig())
    run.metrics_path.write_text('{"step": 1}\n')
    (run.checkpoint_path(3)).mkdir()
    assert run.start_attempt(validate_options(PretrainConfig, {"run": {"overwrite": True}})) == 1
    assert run.checkpoint_steps() == []
    assert not run.metrics_path.exists()
    assert run.load_config() == PretrainConfig()


def test_what_is_not_a_run_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="not a run of lmforge"):
        Run(tmp_path).delete()
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_run_is_trained_by_one_process_at_a_time_and_free_again_however_that_ends(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path / "a")
    with another_process_trains(run) as holder:
        with pytest.raises(
            UserError,
            match=rf"a: being trained by process {holder.pid} on .*; wait for it, stop it",
        ):
            run.lock()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        run.lock()


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel is made to refuse a call as Linux's can be"
)
def test_without_flock_too_one_process_trains_and_a_killed_one_loses_its_lock(
    tmp_path: Path,
) -> None:
    run, held = Run(tmp_path / "a"), tmp_path / "a" / ".lock.held"
    command = [sys.executable, *WITHOUT_FLOCK, HOLD_FOR_SECONDS, str(run.path)]

    def second() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    with another_process_trains(run, WITHOUT_FLOCK, HOLD_FOR_SECONDS) as holder:
        assert f"a: being trained by process {holder.pid} on " in second().stderr
        text = held.read_text()
        assert platform.node() in text
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert second().stdout == "held\n", "of a process of this host that has ended"
        held.write_text(text.replace(platform.node(), "gone-host"))
        began = time.monotonic()
        assert second().stdout == "held\n", "of a host that is gone"
        assert time.monotonic() - began > LEASE_SECONDS
    assert sorted(path.name for path in run.path.iterdir() if path.name.startswith(".lock")) == [
        ".lock"
    ]
    assert not run.is_not_a_run()


@pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel is made to refuse a call as Linux's can be"
)
def test_without_flock_a_run_whose_lock_was_taken_over_stops(
    tmp_path: Path, tiny_options: list[str]
) -> None:
    imports = "from lmforge import cli\nfrom lmforge.core.files import locks"
    program = f"{imports}\nlocks.LEASE_SECONDS = {LEASE_SECONDS}\ncli.main()"
    place = ["--run.folder", str(tmp_path), "--run.name", "a", "--train.steps", "1000000"]
    words = [sys.executable, *WITHOUT_FLOCK, program, "pretrain", *tiny_options, *place]
    run = Run(tmp_path / "a")
    with subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as training:
        try:
            while training.poll() is None and not run.checkpoint_steps():
                time.sleep(0.1)
            atomic_write_text(run.path / ".lock.held", "of another")  # as who takes it over does
            _, printed = training.communicate(timeout=60)
        finally:
            training.kill()
    lines = [line for line in printed.splitlines() if line.startswith("lmforge: ")]
    assert [
        line.startswith(f"lmforge: {run.path}: this process has lost its lock: ") for line in lines
    ] == [True], printed
    assert training.returncode == 1
    assert (run.path / ".lock.held").read_text() == "of another"


@pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel is made to refuse a call as Linux's can be"
)
def test_without_flock_a_lock_that_is_released_is_gone(tmp_path: Path) -> None:
    program = HOLD.replace(
        'print("held", flush=True)\nsys.stdin.read()', "Run(Path(sys.argv[1])).unlock()"
    )
    command = [sys.executable, *WITHOUT_FLOCK, program, str(tmp_path / "a")]
    for _ in range(2):
        subprocess.run(command, check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_a_run_that_is_refused_and_a_folder_that_was_there_stays(
    tmp_path: Path, tiny_options: list[str], refused: Refusal
) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("new", "mine"):
        place = ("--run.folder", tmp_path, "--run.name", name)
        assert "nowhere" in refused(
            "pretrain", *tiny_options, *place, "--data.folder", tmp_path / "nowhere"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_who_waits_for_a_lock_whose_file_its_holder_removes_gets_the_one_that_others_see(
    tmp_path: Path,
) -> None:
    lock = tmp_path / ".lock"
    with ThreadPoolExecutor() as pool:
        with hold_lock(lock) as is_held:
            assert is_held
            waiting = pool.submit(try_lock, lock, lambda: False)
            time.sleep(0.1)
            lock.unlink()
        taken = waiting.result(timeout=10)
    assert taken is not None
    with hold_lock(lock) as is_held:
        assert not is_held, "the lock is not the one that others see"
    taken.release()


def test_a_run_that_is_overwritten_stays_in_the_hands_of_who_overwrites_it(tmp_path: Path) -> None:
    run = Run(tmp_path / "a")
    run.lock()
    run.start_attempt(PretrainConfig())
    run.delete()
    other = subprocess.run(
        [sys.executable, "-c", HOLD, str(run.path)], capture_output=True, text=True, timeout=60
    )
    assert "being trained by process" in other.stderr


def test_a_run_that_cannot_be_a_folder_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(
        UserError,
        match=(
            r"runs/a: cannot be made a folder \(there is a file where a folder would be\); choose"
            r" another --run\.folder"
        ),
    ):
        Run(tmp_path / "runs" / "a").lock()


@given(st.sets(st.integers(0, 10**9), max_size=6))
def test_steps_are_those_of_the_checkpoint_folders_oldest_first(
    tmp_path_factory: pytest.TempPathFactory, steps: set[int]
) -> None:
    run = Run(tmp_path_factory.mktemp("run"))
    for step in steps:
        run.checkpoint_path(step).mkdir(parents=True)
    for stranger in ("step-00000001.partial", "step-", "step-x", "other"):
        (run.checkpoints_folder / stranger).mkdir(parents=True)
    (run.checkpoints_folder / f"step-{10**9 + 1}").write_text("a file")  # beyond every folder drawn
    assert run.checkpoint_steps() == sorted(steps)


def test_a_step_that_was_trained_twice_counts_as_it_was_last(tmp_path: Path) -> None:
    run = Run(tmp_path)
    first = [{"step": step, "loss": 10.0 - step} for step in (1, 2, 3, 4)]
    after_resume = [{"step": step, "loss": 20.0 - step} for step in (3, 4, 5)]
    lines = (
        [json.dumps(record) for record in first]
        + ['{"step": 4, "lo']
        + [json.dumps(record) for record in after_resume]
    )
    run.metrics_path.write_text("\n".join(lines) + '\n{"step": 6')
    assert run.read_metrics() == [*first[:2], *after_resume]


def test_a_sealed_file_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / MANIFEST
    atomic_write_text(path, "old")
    atomic_write_text(path, "new")
    with pytest.raises(UnicodeEncodeError):
        atomic_write_text(path, "half \udcff")
    assert path.read_text() == "new"


def test_the_environment_says_what_a_run_was_made_with() -> None:
    environment: dict[str, Any] = json.loads(json.dumps(describe_environment()))
    assert environment["packages"]["torch"] >= "2.11"
    assert environment["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {
        "command",
        "directory",
        "time",
        "host",
        "platform",
        "processor",
        "cores",
        "git_commit",
    } <= environment.keys()


def test_a_finished_run_has_the_layout_that_is_promised(tiny_run: Path) -> None:
    run = Run(tiny_run)
    promised = (
        "recipe.toml",
        "environment.json",
        "metrics.jsonl",
        "events.jsonl",
        "report.html",
        "logs/attempt-1/rank-0.log",
        "health/rank-0.json",
    )
    assert [name for name in promised if not (tiny_run / name).exists()] == []
    assert run.checkpoint_steps() == [2, 4, 6]
    assert [record["step"] for record in run.read_metrics()] == [1, 2, 3, 4, 5, 6]
    assert run.load_config().run.name == "tiny"
    assert not [name for name in files(tiny_run) if name.endswith(".partial")]


@parametrize("name", ["metrics.jsonl", "events.jsonl"], fast=(0,))
def test_records_that_end_in_a_hole_of_a_tebibyte_are_read_up_to_it(
    tmp_path: Path, name: str
) -> None:
    run = Run(tmp_path)
    record = {
        "metrics.jsonl": {"step": 1},
        "events.jsonl": {"time": "2026-11-23T00:00:00Z", "kind": "end", "step": 1},
    }[name]
    (tmp_path / name).write_text(json.dumps(record) + "\n")
    os.truncate(tmp_path / name, 2**40)
    read = run.read_metrics() if name == "metrics.jsonl" else read_events(run)[0]
    assert [each["step"] for each in read] == [1]


def test_a_run_that_cannot_be_compiled_is_refused_before_the_old_one_is_overwritten(
    tiny_options: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = [
        "pretrain",
        *tiny_options,
        "--run.folder",
        str(tmp_path),
        "--run.name",
        "a",
        "--train.steps",
        "2",
    ]
    assert command(words) == 0
    before = (tmp_path / "a" / "metrics.jsonl").read_bytes()
    monkeypatch.setattr(precision, "missing_for_compile", lambda device: "no C++ compiler (g++)")
    capfd.readouterr()
    assert command([*words, "--run.overwrite", "true", "--train.compile", "on"]) == 2
    assert "train.compile = on: no C++ compiler (g++)" in capfd.readouterr().err
    assert (tmp_path / "a" / "metrics.jsonl").read_bytes() == before
