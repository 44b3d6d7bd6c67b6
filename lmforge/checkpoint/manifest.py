"""What a checkpoint says of itself, whether that is true, and which checkpoint is the newest to be trusted."""

import base64
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash

from lmforge.atomic_files import PARTIAL_SUFFIX
from lmforge.checkpoint.checksums import CorruptCheckpoint, FileDigests, digest_file
from lmforge.errors import UserError
from lmforge.model.config import ModelConfig, model_config_from_json
from lmforge.runs import MANIFEST, Run

FORMAT = 2
TENSOR_SUFFIX = ".distcp"
T = TypeVar("T")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    samples    the number of the sample that comes next; more than step × rows after batches were left out
    rows       rows of a global batch
    holds      "model", and "optimizer" unless the run ended with a checkpoint of the model alone
    metrics    what was measured at this step
    permanent  kept whatever becomes newer
    guard      what decides which steps are bad, such as the losses that spikes are told by
    """

    step: int
    consumed_sequences: int
    global_batch_size: int
    plan_hash: str
    hf_config: dict[str, Any]
    recipe: dict[str, Any]
    tokenizer_hash: str
    rng: str
    written_by: dict[str, Any]
    files: dict[str, FileDigests]
    contents: list[str] = field(default_factory=lambda: ["model", "optimizer"])
    metrics: dict[str, Any] = field(default_factory=dict)
    kept: bool = False
    bad_step_detector: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def model_config(self) -> ModelConfig:
        implementation = self.recipe.get("model", {}).get("implementation", "lmforge")
        return model_config_from_json(self.hf_config, "the checkpoint's manifest", implementation)

    @property
    def json_text(self) -> str:
        """What is written: the fields, and a digest of them. A flipped bit in a number would be believed."""
        table = asdict(self)
        return json.dumps({**table, "xxh3": _checksum(table)}, indent=1) + "\n"

    @property
    def skipped_batches(self) -> int:
        """How many batches were left out before this step, by going back and on with later ones."""
        return self.consumed_sequences // self.global_batch_size - self.step


def _checksum(table: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(table, sort_keys=True).encode())


def get_rng_state() -> str:
    """torch's CPU random state as text."""
    return base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()


def set_rng_state(state: str) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder. Raises CorruptCheckpoint where there is none that can be read."""
    try:
        table = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if table.get("format") != FORMAT:
            raise CorruptCheckpoint(f"its format is {table.get('format')}, this version of lmforge reads {FORMAT}")
        if table.pop("xxh3", None) != _checksum(table):
            raise CorruptCheckpoint(f"{MANIFEST} does not hold what was written (its checksum differs)")
        return Manifest(**table)
    except FileNotFoundError:
        raise CorruptCheckpoint("it has no manifest, so it was never finished") from None
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError, AttributeError):
        raise CorruptCheckpoint("its manifest cannot be read") from None


def check_files(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose every file is there and as long as was written. Raises CorruptCheckpoint.

    Files of tensors are not read; the small ones are, and hold what was written.
    """
    manifest = read_manifest(folder)
    for name, written in manifest.files.items():
        try:
            there = (folder / name).stat().st_size
        except FileNotFoundError:
            raise CorruptCheckpoint(f"{name} is missing") from None
        except OSError as problem:
            raise CorruptCheckpoint(f"{name} cannot be read ({problem.strerror or problem})") from None
        if there != written["bytes"]:
            raise CorruptCheckpoint(f"{name} has {there:,} bytes instead of {written['bytes']:,}")
        if not name.endswith(TENSOR_SUFFIX):
            _check_digest(folder, name, written)
    return manifest


def verify(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose every file holds what was written; all are read. Raises CorruptCheckpoint otherwise."""
    manifest = check_files(folder)
    for name, written in manifest.files.items():
        if name.endswith(TENSOR_SUFFIX):
            _check_digest(folder, name, written)
    return manifest


def _check_digest(folder: Path, name: str, expected: FileDigests) -> None:
    try:
        there = digest_file(folder / name)
    except OSError as problem:
        raise CorruptCheckpoint(f"{name} cannot be read ({problem.strerror or problem})") from None
    if there != expected:
        raise CorruptCheckpoint(f"{name} does not hold what was written (its checksum differs)")


def candidates(run: Run, skipped: list[str], before_step: int | None = None) -> Iterator[tuple[Path, Manifest]]:
    """The checkpoints of a run that look whole with their tensors unread, newest first; those of steps below `before` only.

    A line for each that does not goes to `passed_over` as it is come across.
    """
    steps = [step for step in run.checkpoint_steps() if before_step is None or step < before_step]
    for partial in sorted(run.checkpoints_folder.glob(f"*{PARTIAL_SUFFIX}")) if before_step is None else ():
        if not steps or partial.name.removesuffix(PARTIAL_SUFFIX) > run.checkpoint_path(steps[-1]).name:
            skipped.append(f"{partial}: half-written, skipped")
    for step in reversed(steps):
        folder = run.checkpoint_path(step)
        try:
            yield folder, check_files(folder)
        except CorruptCheckpoint as reason:
            skipped.append(f"{folder}: {reason}; skipped")


def find(path: Path) -> tuple[Path, Manifest, list[str]]:
    """The checkpoint that `path` names: itself, or the newest sound one of a run, with what was passed over. All is read.

    Raises UserError where there is none.
    """
    (folder, manifest), passed_over = open_checkpoint(path, lambda folder, _: (folder, verify(folder)))
    return folder, manifest, passed_over


def open_checkpoint(path: Path, open_with: Callable[[Path, Manifest], T]) -> tuple[T, list[str]]:
    """What `use` makes of the checkpoint that `path` names, or of the newest one of a run that it does not find unsound.

    With it a line for each that was passed over. `use` may raise CorruptCheckpoint for what it reads; nothing else is read. Raises
    UserError where there is none.
    """
    if (path / MANIFEST).exists() or re.fullmatch(r"step-\d+", path.name):
        try:
            return open_with(path, check_files(path)), []
        except CorruptCheckpoint as reason:
            raise UserError(f"{path}: {reason}") from None
    if not path.exists():
        raise UserError(f"{path}: no such run, checkpoint or model folder")
    passed_over: list[str] = []
    for folder, manifest in candidates(Run.open(path), passed_over):
        try:
            return open_with(folder, manifest), passed_over
        except CorruptCheckpoint as reason:
            passed_over.append(f"{folder}: {reason}; skipped")
    why = f" ({passed_over[0]})" if passed_over else ""
    raise UserError(f"{path}: no checkpoint here{why}")
