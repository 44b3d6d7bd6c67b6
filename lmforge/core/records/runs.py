"""The run directory: names, layout, lock, and which checkpoints it holds.

    runs/NAME/
      recipe.toml        resolved and re-runnable       environment.json   versions, hardware, commit, command
      metrics.jsonl      one object per log step          logs/attempt-1/    a file per rank
      events.jsonl       starts, samples, faults, …     health/            a heartbeat per rank
      experts.jsonl      of a mixture of experts: the tokens of each
      report.html        all of it, to look at          bad/               the samples of skipped steps
      checkpoints/step-00000100/, unless they are kept elsewhere
      rollouts/          sets of completions that were sampled ahead
      launch/            recipe, code, scripts and output of `lmforge launch`

Of a checkpoint only the name is here; its manifest is in `manifests.py`. No torch here: it is
quick.
"""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast
from uuid import uuid4

from lmforge.core.errors import DISK_FULL_ERRNOS, LockLost, UserError, how_to_install
from lmforge.core.files.atomic_files import atomic_write_json, atomic_write_text, remove_folder
from lmforge.core.files.locks import is_lost, try_lock
from lmforge.core.files.untrusted import (
    cut,
    quoted,
)
from lmforge.core.options.load import read_record
from lmforge.core.options.mixture import is_remote
from lmforge.core.options.options import to_toml
from lmforge.core.options.stage import StageConfig
from lmforge.core.plugins import freeze_plugins
from lmforge.core.records.run_records import COMPLETIONS_FOLDER, read_last_metrics, read_metrics

if TYPE_CHECKING:
    from filelock import BaseFileLock

# What `lmforge launch` records of a job, in the run directory.
LAUNCH_FOLDER = "launch"
JOB_FILE = "job.json"
STEP_PREFIX = "step-"
MANIFEST = "manifest.json"
MAX_PATH_QUOTED = 200  # characters of a path in a message
# The entries of a run's directory besides the lock.
RUN_FILES = (
    "recipe.toml",
    "environment.json",
    "metrics.jsonl",
    "events.jsonl",
    "experts.jsonl",
    "report.html",
)
RUN_FOLDERS = (
    "logs",
    "health",
    "checkpoints",
    "bad",
    COMPLETIONS_FOLDER,
    "rollouts",
    "tensorboard",
    "trackers",
    "profile",
    LAUNCH_FOLDER,
)
MAX_HOLDER_CHARACTERS = 200
CHECKPOINT_FOLDER_HINT = (
    "check the folder or address and the right to write there, or choose another"
    " --checkpoint.folder"
)

T = TypeVar("T")


def is_local(path: Path) -> bool:
    """Whether this is a path of this machine, and not an address through fsspec."""
    return not getattr(path, "protocol", "")


def checkpoint_name(step: int) -> str:
    """The name of the folder of a step's checkpoint."""
    return f"{STEP_PREFIX}{step:08d}"


def checkpoint_step(folder: Path) -> int | None:
    """The step whose checkpoint a folder is by its name; None for any other name."""
    match = re.fullmatch(rf"{STEP_PREFIX}([0-9]{{8}}|[1-9][0-9]{{8,}})", folder.name)
    return int(match[1]) if match else None


def remove_checkpoint(folder: Path) -> None:
    """Delete a checkpoint folder, local or remote, if it exists.

    An interrupted deletion leaves nothing that counts as a checkpoint: a local folder is renamed
    first, and of a remote one the manifest is deleted first.
    """
    if not folder.exists():
        return
    if is_local(folder):
        remove_folder(folder)
        return
    for path in sorted(folder.iterdir(), key=lambda path: path.name != MANIFEST):
        path.unlink()


def parse_location(text: str) -> Path:
    """A folder given in options: a path (file:///runs too), or an address such as s3://bucket/runs.

    Raises UserError.
    """
    if "\0" in text:
        raise UserError(f"{quoted(text)}: no path has a NUL character")
    if not is_remote(text):
        return Path(text.rpartition("://")[2])
    try:
        from upath import UPath

        # Without a cache of listings, which would hide files that others write.
        return cast(Path, UPath(text, use_listings_cache=False))
    except ImportError as problem:
        raise UserError(f"{text}: needs {problem.name}; {how_to_install('cloud')}") from None
    except ValueError as problem:
        raise UserError(f"{text}: {problem}") from None


@contextmanager
def storage_errors(path: Path, problem_text: str, hint: str) -> Iterator[None]:
    """Any error of reading or writing `path` as a UserError, `PATH: PROBLEM (reason); HINT`: a
    store has its own exceptions.

    A full disk passes, and on a local path everything but OSError.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as problem:
        if is_local(path) and (
            not isinstance(problem, OSError) or problem.errno in DISK_FULL_ERRNOS
        ):
            raise
        raise UserError(
            f"{cut(str(path), MAX_PATH_QUOTED)}: {problem_text}"
            f" ({describe_storage_error(problem)}); {hint}"
        ) from problem


def describe_storage_error(problem: Exception) -> str:
    """Why a file could not be read or written, in a few words."""
    if isinstance(problem, NotImplementedError):
        return "a store of this kind cannot be written"
    if isinstance(problem, FileExistsError | NotADirectoryError):
        return "there is a file where a folder would be"
    return (
        (getattr(problem, "strerror", None) or f"{type(problem).__name__}: {problem}")
        .strip()
        .splitlines()[-1]
    )


@dataclass
class _HeldLock:
    """The lock of an attempt: on rank 0 itself, and whether `Run.lock` has made the directory; on
    every rank its token.
    """

    lock: "BaseFileLock | None"
    token: str
    is_new: bool = False
    is_lost: bool = False  # once and for all


_held_locks: dict[Path, _HeldLock] = {}


@dataclass(frozen=True)
class Run:
    """The directory of one run. Creating the object touches no file.

    Its checkpoints are in it, unless `external_checkpoints` is another folder or a store through
    fsspec.
    """

    path: Path
    external_checkpoints: Path | None = None

    @classmethod
    def from_config(cls, config: StageConfig) -> Self:
        """The run that a recipe describes."""
        name = config.run.name
        folder = config.checkpoint.folder
        return cls(config.run.folder / name, parse_location(folder) / name if folder else None)

    @classmethod
    def open(cls, path: Path) -> Self:
        """The run in a directory, with its checkpoints where its recipe says."""
        run = cls(path)
        return (
            cls(path, cls.from_config(run.load_config()).external_checkpoints)
            if run.exists()
            else run
        )

    @property
    def recipe_path(self) -> Path:
        return self.path / "recipe.toml"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def experts_path(self) -> Path:
        return self.path / "experts.jsonl"

    @property
    def events_path(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def has_job(self) -> bool:
        """Whether `lmforge launch` has started a job for it (ops/jobs/job.py)."""
        return (self.path / LAUNCH_FOLDER / JOB_FILE).exists()

    @property
    def health_folder(self) -> Path:
        return self.path / "health"

    @property
    def logs_folder(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints_folder(self) -> Path:
        return self.external_checkpoints or self.path / "checkpoints"

    def exists(self) -> bool:
        return self.recipe_path.exists()

    @property
    def started_at_ns(self) -> int | None:
        """When it was last started or resumed, in nanoseconds of the file system's clock."""
        return self.recipe_path.stat().st_mtime_ns if self.exists() else None

    def is_not_a_run(self) -> bool:
        """Whether the directory holds something else than a run, or than a start that was killed
        before its recipe leaves.
        """
        if self.exists() or not self.path.exists():
            return False
        names = [entry.name for entry in self.path.iterdir()]
        return not all(
            name == "launch" or name.startswith((".lock", f".{self.recipe_path.name}."))
            for name in names
        )

    def load_config(self) -> StageConfig:
        """The recipe that the run was started with."""
        return read_record(self.recipe_path)

    def checkpoint_steps(self) -> list[int]:
        """Steps that have a checkpoint folder, oldest first.

        Raises UserError where the folder or store cannot be read.
        """
        folder = self.checkpoints_folder
        with storage_errors(folder, "checkpoints cannot be listed", CHECKPOINT_FOLDER_HINT):
            if not folder.is_dir():
                return []
            steps = {
                entry: step
                for entry in folder.iterdir()
                if (step := checkpoint_step(entry)) is not None
            }
            # A store has no rename: without a manifest it is incomplete.
            always_complete = is_local(folder)
            return sorted(
                steps[each]
                for each in steps
                if each.is_dir() and (always_complete or (each / MANIFEST).exists())
            )

    def checkpoint_path(self, step: int) -> Path:
        return self.checkpoints_folder / checkpoint_name(step)

    def start_attempt(self, config: StageConfig) -> int:
        """Create the directory, record recipe, environment and plugins, and return the number of
        this attempt (from 1).

        With `run.overwrite`, an earlier run is deleted first; the recorded recipe resumes the run.
        Raises LockLost.
        """
        self.check_lock()
        if config.run.overwrite:
            self.delete()
        config = config.again()
        # The recipe first: a directory with anything else and without one is not ours to touch.
        self.path.mkdir(parents=True, exist_ok=True)
        atomic_write_text(
            self.recipe_path,
            f"# lmforge {config.of_stage} {self.recipe_path} repeats or continues this"
            f" run.\n\n{to_toml(config)}",
        )
        # Heartbeats of an earlier attempt would be taken for those of this one.
        shutil.rmtree(self.health_folder, ignore_errors=True)
        for folder in (
            self.path,
            self.health_folder,
            *([] if self.external_checkpoints else [self.checkpoints_folder]),
        ):
            folder.mkdir(parents=True, exist_ok=True)
        attempt = 1 + max(self.attempts(), default=0)
        (self.logs_folder / f"attempt-{attempt}").mkdir(parents=True)
        atomic_write_json(self.path / "environment.json", describe_environment())
        freeze_plugins(config.plugins, self.path)
        return attempt

    def attempts(self) -> list[int]:
        """The numbers of the attempts that have logs, oldest first."""
        names = (
            re.fullmatch(r"attempt-([0-9]{1,9})", entry.name)
            for entry in self.logs_folder.glob("attempt-*")
        )
        return sorted(int(match[1]) for match in names if match)

    def log_path(self, attempt: int, rank: int) -> Path:
        return self.logs_folder / f"attempt-{attempt}" / f"rank-{rank}.log"

    def rank_logs(self, attempt: int) -> dict[int, Path]:
        """The logs of an attempt that are there, by rank, in order."""
        paths = (self.logs_folder / f"attempt-{attempt}").glob("rank-*.log")
        logs = {
            int(name[1]): path
            for path in paths
            if (name := re.fullmatch(r"rank-([0-9]{1,9})\.log", path.name))
        }
        return dict(sorted(logs.items()))

    def lock(self) -> str:
        """Lock the run for this process until it unlocks it or ends.

        Returns the token for `share_lock`.

        Raises UserError when another process trains it, or the directory cannot be created or
        written.
        """
        lock = self.path / ".lock"
        is_new = not self.path.exists()
        with storage_errors(self.path, "cannot be made a folder", "choose another --run.folder"):
            self.path.mkdir(parents=True, exist_ok=True)
        with storage_errors(lock, "cannot be written", "choose another --run.name"):
            if (held := try_lock(lock)) is None:
                with open(lock, encoding="utf-8", errors="replace") as file:
                    holder = file.readline(MAX_HOLDER_CHARACTERS).strip() or "another process"
                raise UserError(
                    f"{self.path}: being trained by {holder}; wait for it, stop it, or choose"
                    " another --run.name"
                )
            token = uuid4().hex
            lock.write_text(f"process {os.getpid()} on {platform.node()}\n{token}\n")
        _held_locks[self.path] = _HeldLock(held, token, is_new)
        return token

    def share_lock(self, token: str) -> None:
        """From now on this rank too checks the lock, which rank 0 holds.

        Every rank calls it, until `unlock`.
        """
        _held_locks.setdefault(self.path, _HeldLock(None, token))

    def check_lock(self) -> None:
        """Raise LockLost where this attempt had the lock and has it no more; OSError where its file
        cannot be read.

        What writes, renames or removes something by a path in the run, or of its checkpoints, calls
        it, `ensure_lock` or `holds_lock` before: the folder may be another run's by now, also where
        its file system has `flock`, which tells nothing about paths.
        """
        if (held := _held_locks.get(self.path)) is not None:
            held.is_lost = held.is_lost or not self.has_own_token()
            if held.is_lost:
                raise self.lost_lock()

    def has_own_token(self) -> bool:
        """Whether the lock's file has the token of this attempt now, on any rank; True where the
        run was not locked. Raises OSError where the file cannot be read.
        """
        if (held := _held_locks.get(self.path)) is None:
            return True
        try:
            tokens = (self.path / ".lock").read_text(errors="replace").splitlines()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return held.token in tokens and not (held.lock and is_lost(held.lock))

    def ensure_lock(self) -> None:
        """As `check_lock`, but where the lock's file cannot be read, the lock counts as held."""
        with suppress(OSError):
            self.check_lock()

    def holds_lock(self) -> bool:
        """Whether `ensure_lock` does not raise LockLost."""
        try:
            self.ensure_lock()
        except LockLost:
            return False
        return True

    @property
    def has_lost_lock(self) -> bool:
        """Whether one of them has found on this rank that the lock is lost. Reads no file."""
        return self.path in _held_locks and _held_locks[self.path].is_lost

    def lost_lock(self) -> LockLost:
        """What ends the attempt on every rank."""
        return LockLost(
            f"{self.path}: this process has lost its lock: the folder was removed, or is another"
            " run's by now, or this process was suspended or cut off for long; it writes nothing"
            " more there"
        )

    def check_layout(self) -> None:
        """Raise UserError where a folder has the name of one of the run's files, or something else
        the name of a folder.
        """
        for names, expected in ((RUN_FILES, "file"), (RUN_FOLDERS, "folder")):
            for path in (self.path / name for name in names):
                # A folder may be a link, to a larger disk; a file may not: what is written would go
                # to the file of another.
                is_folder = expected == "folder" and path.is_dir()
                actual = _kind_of_path(path)
                if os.path.lexists(path) and not is_folder and actual != expected:
                    raise UserError(
                        f"{path}: a {actual}, where the run keeps a {expected}; move it away"
                    )

    def unlock(self, *, discard: bool = False) -> None:
        """Release the lock.

        A directory that `lock` has made is removed if no run has begun in it, or with `discard`.
        """
        if (held := _held_locks.get(self.path)) is None:
            return
        is_unused = held.is_new and self.path.exists() and self.holds_lock()
        is_unused = is_unused and (
            discard or all(entry.name.startswith(".lock") for entry in self.path.iterdir())
        )
        with suppress(OSError):
            # While it is locked, and so the lock's file last.
            for entry in (
                sorted(self.path.iterdir(), key=lambda entry: entry.name == ".lock")
                if is_unused
                else ()
            ):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        del _held_locks[self.path]
        if held.lock is not None:
            held.lock.release()
        with suppress(OSError):
            if is_unused:
                self.path.rmdir()

    def delete(self) -> None:
        """Delete the run. Raises UserError for a directory that is not one."""
        if self.is_not_a_run():
            raise UserError(
                f"{self.path}: not a run of lmforge (it has no recipe.toml), so it is not deleted"
            )
        for step in self.checkpoint_steps() if self.external_checkpoints else ():
            remove_checkpoint(self.checkpoint_path(step))
        # The recipe last: what an interrupted deletion leaves is still a run, and can be deleted.
        for entry in (
            sorted(self.path.iterdir(), key=lambda entry: entry == self.recipe_path)
            if self.path.exists()
            else ()
        ):
            if not entry.name.startswith(".lock"):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def read_metrics(self) -> list[dict[str, Any]]:
        """`run_records.read_metrics` of the run; empty where there is no file.

        Raises UserError for an unreadable one.
        """
        if not self.metrics_path.exists():
            return []
        with storage_errors(self.metrics_path, "cannot be read", "move it away"):
            return read_metrics(self.metrics_path)

    def read_last_metrics(self) -> dict[str, Any]:
        """The newest value of each metric in the end of metrics.jsonl, None where that is not
        finite; empty without a file.
        """
        with suppress(OSError):
            return read_last_metrics(self.metrics_path)
        return {}


def describe_environment() -> dict[str, Any]:
    """The environment of a run: versions, hardware, git commit, command, time."""
    return {
        "command": sys.argv,
        "directory": os.getcwd(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": platform.node(),
        "platform": platform.platform(),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": _package_versions(),
        "git_commit": _git_commit(),
    }


@cache
def _package_versions() -> dict[str, str]:
    versions = {}
    for name in ("torch", "numpy", "tokenizers", "safetensors", "pydantic", "transformers"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def processor_name() -> str:
    """The model of the CPU; empty where the system does not say."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(
                (line.partition(":")[2].strip() for line in file if line.startswith("model name")),
                "",
            )
    except OSError:
        return platform.processor()


def _git_commit() -> str | None:
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, timeout=10
        )
        return done.stdout.strip() or None
    return None


def _kind_of_path(path: Path) -> str:
    if path.is_symlink():
        return "link"
    if path.is_dir():
        return "folder"
    return "file" if path.is_file() else "device"
