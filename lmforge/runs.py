"""The run directory: names, layout, lock, and which checkpoints it holds.

    runs/NAME/
      recipe.toml        resolved and re-runnable       environment.json   versions, hardware, commit, command
      metrics.jsonl      one object a log step          logs/attempt-1/    a file per rank
      health/            a heartbeat per rank           checkpoints/step-00000100/, unless they are kept elsewhere
      loss.png           the loss curve                 bad/               the samples of steps that were left out

What is inside a checkpoint is the business of `checkpoint/`. No torch here: looking at a run is quick.
"""

import fcntl
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self, cast

from lmforge.atomic_files import atomic_write_json, atomic_write_text, remove_folder
from lmforge.config.options import read_recipe, to_toml, validate_options
from lmforge.config.post_training import config_class
from lmforge.config.run import StageConfig
from lmforge.errors import UserError

STEP_PREFIX = "step-"
MANIFEST = "manifest.json"


def format_bytes(count: float) -> str:
    """A number of bytes for people."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def is_local(path: Path) -> bool:
    """Whether this is a path of this machine, and no address through fsspec."""
    return getattr(path, "protocol", "") in ("", "file", "local")


def remove_checkpoint(folder: Path) -> None:
    """Delete a checkpoint folder wherever it is; nothing happens where there is none.

    The manifest goes first, so that what a deletion leaves half-way is no checkpoint.
    """
    if not folder.exists():
        return
    if is_local(folder):
        remove_folder(folder)
        return
    for path in sorted(folder.iterdir(), key=lambda path: path.name != MANIFEST):
        path.unlink()


def parse_location(text: str) -> Path:
    """A folder as it is written in options: a path, or an address such as s3://bucket/runs. Raises UserError."""
    if "://" not in text:
        return Path(text)
    try:
        from upath import UPath

        # What others wrote since is to be seen.
        return cast(Path, UPath(text, use_listings_cache=False))
    except ImportError as problem:
        raise UserError(f"{text}: needs {problem.name}; pip install 'lmforge[cloud]'") from None
    except ValueError as problem:
        raise UserError(f"{text}: {problem}") from None


_held_locks: dict[Path, IO[str]] = {}  # the system drops a lock with its process, however that ends


@dataclass(frozen=True)
class Run:
    """The directory of one run. Making the object touches nothing.

    Its checkpoints are in it, unless they are kept in a folder of their own, or in a store through fsspec.
    """

    path: Path
    external_checkpoints: Path | None = None

    @classmethod
    def from_config(cls, config: StageConfig) -> Self:
        """The run that a recipe describes."""
        name, elsewhere = config.run.name, config.checkpoint.folder
        return cls(config.run.folder / name, parse_location(elsewhere) / name if elsewhere else None)

    @classmethod
    def open(cls, path: Path) -> Self:
        """The run in a directory, with its checkpoints where its recipe says."""
        here = cls(path)
        return cls(path, cls.from_config(here.load_config()).external_checkpoints) if here.exists() else here

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
    def checkpoints_folder(self) -> Path:
        return self.external_checkpoints or self.path / "checkpoints"

    def exists(self) -> bool:
        return self.recipe_path.exists()

    @property
    def started_at_ns(self) -> int | None:
        """When it was last begun or continued, in nanoseconds of the file system's clock."""
        return self.recipe_path.stat().st_mtime_ns if self.exists() else None

    def is_not_a_run(self) -> bool:
        """Whether something is there that is no run; what a start leaves that was cut off before its recipe is nothing."""
        if self.exists() or not self.path.exists():
            return False
        names = [entry.name for entry in self.path.iterdir()]
        return not all(name == ".lock" or name.startswith(f".{self.recipe_path.name}.") for name in names)

    def load_config(self) -> StageConfig:
        """The recipe that the run was started with."""
        table = read_recipe(self.recipe_path)
        return validate_options(config_class(table, str(self.recipe_path)), table, str(self.recipe_path))

    def checkpoint_steps(self) -> list[int]:
        """Steps that have a checkpoint folder, oldest first; whether it is sound is for `checkpoint/` to say."""
        if not self.checkpoints_folder.is_dir():
            return []
        there = [entry for entry in self.checkpoints_folder.iterdir() if entry.is_dir()]
        if not is_local(self.checkpoints_folder):  # where nothing is renamed, what has no manifest is half-written
            there = [entry for entry in there if (entry / MANIFEST).exists()]
        names = [entry.name for entry in there]
        numbers = (name.removeprefix(STEP_PREFIX) for name in names if name.startswith(STEP_PREFIX))
        return sorted(int(number) for number in numbers if number.isdigit())

    def checkpoint_path(self, step: int) -> Path:
        return self.checkpoints_folder / f"{STEP_PREFIX}{step:08d}"

    def start_attempt(self, config: StageConfig) -> int:
        """Lay out the directory, record recipe and environment, and return the number of this attempt (1 for the first).

        With `run.overwrite`, what was there goes first.
        """
        if config.run.overwrite:
            self.delete()
            # Said once, done once: the recorded recipe continues the run.
            config = config.model_copy(update={"run": config.run.model_copy(update={"overwrite": False})})
        if config.run.resume == "never":
            config = config.model_copy(update={"run": config.run.model_copy(update={"resume": "auto"})})
        # The recipe first: a directory with anything else and without one is not ours to touch.
        self.path.mkdir(parents=True, exist_ok=True)
        atomic_write_text(
            self.recipe_path,
            f"# lmforge {config.of_stage} {self.recipe_path} repeats or continues this run.\n\n{to_toml(config)}",
        )
        # What ranks of an earlier attempt did last would be taken for what they do.
        shutil.rmtree(self.health_folder, ignore_errors=True)
        for folder in (self.path, self.health_folder, *([] if self.external_checkpoints else [self.checkpoints_folder])):
            folder.mkdir(parents=True, exist_ok=True)
        attempts = [int(entry.name.removeprefix("attempt-")) for entry in (self.path / "logs").glob("attempt-*")]
        attempt = max(attempts, default=0) + 1
        (self.path / "logs" / f"attempt-{attempt}").mkdir(parents=True)
        atomic_write_json(self.path / "environment.json", describe_environment())
        return attempt

    def log_path(self, attempt: int, rank: int) -> Path:
        return self.path / "logs" / f"attempt-{attempt}" / f"rank-{rank}.log"

    def lock(self) -> None:
        """Hold the run for this process until it unlocks it or ends.

        Raises UserError when another process trains it, or it cannot be made.
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
            way_out = "wait for it, stop it, or choose another --run.name"
            raise UserError(f"{self.path}: being trained by {holder}; {way_out}") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        _held_locks[self.path] = file

    def unlock(self) -> None:
        """Let others train it, this process among them."""
        if self.path in _held_locks:
            _held_locks.pop(self.path).close()

    def delete(self) -> None:
        """Remove the run. Refuses a directory that is not one."""
        if self.is_not_a_run():
            raise UserError(f"{self.path}: not a run of lmforge (it has no recipe.toml), so it is not deleted")
        if self.external_checkpoints:
            for step in self.checkpoint_steps():
                remove_checkpoint(self.checkpoint_path(step))
        # The recipe last: what a deletion leaves that is cut off is still a run, and can be deleted.
        for entry in sorted(self.path.iterdir(), key=lambda entry: entry == self.recipe_path) if self.path.exists() else ():
            if entry.name == ".lock":
                continue
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def read_metrics(self) -> list[dict[str, Any]]:
        """Every record of metrics.jsonl; of a step that was trained twice (after a resume), the last one counts."""
        records: list[dict[str, Any]] = []
        if not self.metrics_path.exists():
            return records
        with open(self.metrics_path, encoding="utf-8") as file:
            for line in file:
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    continue  # the last line of a process that was killed while writing it
                while records and records[-1]["step"] >= record["step"]:
                    records.pop()
                records.append(record)
        return records


def describe_environment() -> dict[str, Any]:
    """What a run was made with: versions, hardware, git commit, command, time."""
    packages = ("torch", "numpy", "tokenizers", "safetensors", "pydantic", "transformers")
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
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
        asked = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() or None
