"""The run directory: names, layout, lock, and which checkpoints it holds.

    runs/NAME/
      recipe.toml        resolved and re-runnable       environment.json   versions, hardware, commit, command
      metrics.jsonl      one object a log step          logs/attempt-1/    a file per rank
      health/            a heartbeat per rank           checkpoints/step-00000100/, unless they are kept elsewhere
      loss.png           the loss curve                 bad/               the samples of skipped steps

What is inside a checkpoint is for `checkpoint/`. No torch here, so that looking at a run is quick.
"""

import fcntl
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self, cast

from pydantic import BaseModel

from lmforge.atomic_files import atomic_write_json, atomic_write_text, remove_folder
from lmforge.config.load import config_class
from lmforge.config.options import read_recipe, to_toml, validate_options
from lmforge.config.stage import StageConfig
from lmforge.errors import UserError, how_to_install
from lmforge.untrusted import parse_json, quoted

STEP_PREFIX = "step-"
MANIFEST = "manifest.json"


class MetricsRecord(BaseModel, extra="allow"):
    """A line of metrics.jsonl: the step, and metrics by name."""

    step: int


def format_bytes(count: float) -> str:
    """A number of bytes in MiB or GiB."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def is_local(path: Path) -> bool:
    """Whether this is a path of this machine, and not an address through fsspec."""
    return getattr(path, "protocol", "") in ("", "file", "local")


def remove_checkpoint(folder: Path) -> None:
    """Delete a checkpoint folder, local or remote, if it exists.

    The manifest is deleted first, so that an interrupted deletion leaves nothing that counts as a checkpoint.
    """
    if not folder.exists():
        return
    if is_local(folder):
        remove_folder(folder)
        return
    for path in sorted(folder.iterdir(), key=lambda path: path.name != MANIFEST):
        path.unlink()


def parse_location(text: str) -> Path:
    """A folder given in options: a path, or an address such as s3://bucket/runs. Raises UserError."""
    if "\0" in text:
        raise UserError(f"{quoted(text)}: no path has a NUL character")
    if "://" not in text:
        return Path(text)
    try:
        from upath import UPath

        # Without a cache of listings, which would hide what others write.
        return cast(Path, UPath(text, use_listings_cache=False))
    except ImportError as problem:
        raise UserError(f"{text}: needs {problem.name}; {how_to_install('cloud')}") from None
    except ValueError as problem:
        raise UserError(f"{text}: {problem}") from None


_held_locks: dict[Path, IO[str]] = {}  # the system releases a lock with its process, however that ends


@dataclass(frozen=True)
class Run:
    """The directory of one run. Creating the object touches no file.

    Its checkpoints are in it, unless `external_checkpoints` is another folder or a store through fsspec.
    """

    path: Path
    external_checkpoints: Path | None = None

    @classmethod
    def from_config(cls, config: StageConfig) -> Self:
        """The run that a recipe describes."""
        name, folder = config.run.name, config.checkpoint.folder
        return cls(config.run.folder / name, parse_location(folder) / name if folder else None)

    @classmethod
    def open(cls, path: Path) -> Self:
        """The run in a directory, with its checkpoints where its recipe says."""
        run = cls(path)
        return cls(path, cls.from_config(run.load_config()).external_checkpoints) if run.exists() else run

    @property
    def recipe_path(self) -> Path:
        return self.path / "recipe.toml"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

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
        """Whether the directory holds something else than a run, or than a start that was killed before its recipe leaves."""
        if self.exists() or not self.path.exists():
            return False
        names = [entry.name for entry in self.path.iterdir()]
        return not all(name == ".lock" or name.startswith(f".{self.recipe_path.name}.") for name in names)

    def load_config(self) -> StageConfig:
        """The recipe that the run was started with."""
        table = read_recipe(self.recipe_path)
        return validate_options(config_class(table, str(self.recipe_path)), table, str(self.recipe_path))

    def checkpoint_steps(self) -> list[int]:
        """Steps that have a checkpoint folder, oldest first; `checkpoint/` says whether it is intact."""
        if not self.checkpoints_folder.is_dir():
            return []
        folders = [entry for entry in self.checkpoints_folder.iterdir() if entry.is_dir()]
        if not is_local(self.checkpoints_folder):  # a store has no rename: without a manifest it is incomplete
            folders = [folder for folder in folders if (folder / MANIFEST).exists()]
        numbers = (folder.name.removeprefix(STEP_PREFIX) for folder in folders if folder.name.startswith(STEP_PREFIX))
        return sorted(int(number) for number in numbers if number.isdigit())

    def checkpoint_path(self, step: int) -> Path:
        return self.checkpoints_folder / f"{STEP_PREFIX}{step:08d}"

    def start_attempt(self, config: StageConfig) -> int:
        """Create the directory, record recipe and environment, and return the number of this attempt (1 for the first).

        With `run.overwrite`, an earlier run is deleted first; the recorded recipe resumes the run.
        """
        if config.run.overwrite:
            self.delete()
        config = config.again()
        # The recipe first: a directory with anything else and without one is not ours to touch.
        self.path.mkdir(parents=True, exist_ok=True)
        atomic_write_text(
            self.recipe_path,
            f"# lmforge {config.of_stage} {self.recipe_path} repeats or continues this run.\n\n{to_toml(config)}",
        )
        # Heartbeats of an earlier attempt would be taken for those of this one.
        shutil.rmtree(self.health_folder, ignore_errors=True)
        for folder in (self.path, self.health_folder, *([] if self.external_checkpoints else [self.checkpoints_folder])):
            folder.mkdir(parents=True, exist_ok=True)
        attempts = [int(entry.name.removeprefix("attempt-")) for entry in self.logs_folder.glob("attempt-*")]
        attempt = max(attempts, default=0) + 1
        (self.logs_folder / f"attempt-{attempt}").mkdir(parents=True)
        atomic_write_json(self.path / "environment.json", describe_environment())
        return attempt

    def log_path(self, attempt: int, rank: int) -> Path:
        return self.logs_folder / f"attempt-{attempt}" / f"rank-{rank}.log"

    def lock(self) -> None:
        """Lock the run for this process until it unlocks it or ends.

        Raises UserError when another process trains it, or the directory cannot be created.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise UserError(f"{self.path}: cannot be made a folder: {problem.strerror}; choose another --run.folder") from None
        file = open(self.path / ".lock", "a+", encoding="utf-8")  # noqa: SIM115 - open as long as the lock is held
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            hint = "wait for it, stop it, or choose another --run.name"
            raise UserError(f"{self.path}: being trained by {holder}; {hint}") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        _held_locks[self.path] = file

    def unlock(self) -> None:
        """Release the lock."""
        if self.path in _held_locks:
            _held_locks.pop(self.path).close()

    def delete(self) -> None:
        """Delete the run. Raises UserError for a directory that is not one."""
        if self.is_not_a_run():
            raise UserError(f"{self.path}: not a run of lmforge (it has no recipe.toml), so it is not deleted")
        if self.external_checkpoints:
            for step in self.checkpoint_steps():
                remove_checkpoint(self.checkpoint_path(step))
        # The recipe last: what an interrupted deletion leaves is still a run, and can be deleted.
        for entry in sorted(self.path.iterdir(), key=lambda entry: entry == self.recipe_path) if self.path.exists() else ():
            if entry.name == ".lock":
                continue
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def read_metrics(self) -> list[dict[str, Any]]:
        """Every record of metrics.jsonl; of a step that was trained twice (after a resume), the last one counts.

        Lines that are no record with a step are skipped, such as the last one of a process that was killed while writing it.
        """
        records: list[dict[str, Any]] = []
        if not self.metrics_path.exists():
            return records
        with self.metrics_path.open("rb") as file:
            for line in file:
                with suppress(UserError):
                    record = parse_json(line, MetricsRecord, str(self.metrics_path)).model_dump()
                    while records and records[-1]["step"] >= record["step"]:
                        records.pop()
                    records.append(record)
        return records


def describe_environment() -> dict[str, Any]:
    """The environment of a run: versions, hardware, git commit, command, time."""
    versions = {}
    for name in ("torch", "numpy", "tokenizers", "safetensors", "pydantic", "transformers"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "command": sys.argv,
        "directory": os.getcwd(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": platform.node(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": versions,
        "git_commit": _git_commit(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return platform.processor()


def _git_commit() -> str | None:
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
