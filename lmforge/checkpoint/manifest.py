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

from lmforge.checkpoint.blocks import Described, Unsound, describe
from lmforge.errors import Mistake
from lmforge.model.shapes import ModelConfig, from_hugging_face
from lmforge.runs import MANIFEST, PARTIAL, Run

FORMAT = 2
TENSORS = ".distcp"
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
    samples: int
    rows: int
    plan_hash: str
    model: dict[str, Any]
    recipe: dict[str, Any]
    tokenizer_hash: str
    rng: str
    world: dict[str, Any]
    files: dict[str, Described]
    holds: list[str] = field(default_factory=lambda: ["model", "optimizer"])
    metrics: dict[str, Any] = field(default_factory=dict)
    permanent: bool = False
    guard: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def model_config(self) -> ModelConfig:
        implementation = self.recipe.get("model", {}).get("implementation", "lmforge")
        return from_hugging_face(self.model, "the checkpoint's manifest", implementation)

    @property
    def text(self) -> str:
        """What is written: the fields, and a digest of them. A flipped bit in a number would be believed."""
        table = asdict(self)
        return json.dumps({**table, "xxh3": _digest(table)}, indent=1) + "\n"

    @property
    def skipped_batches(self) -> int:
        """How many batches were left out before this step, by going back and on with later ones."""
        return self.samples // self.rows - self.step


def _digest(table: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(table, sort_keys=True).encode())


def rng_state() -> str:
    """torch's CPU random state as text."""
    return base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()


def set_rng_state(state: str) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder. Raises Unsound where there is none that can be read."""
    try:
        table = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if table.get("format") != FORMAT:
            raise Unsound(f"its format is {table.get('format')}, this version of lmforge reads {FORMAT}")
        if table.pop("xxh3", None) != _digest(table):
            raise Unsound(f"{MANIFEST} does not hold what was written (its checksum differs)")
        return Manifest(**table)
    except FileNotFoundError:
        raise Unsound("it has no manifest, so it was never finished") from None
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError, AttributeError):
        raise Unsound("its manifest cannot be read") from None


def measure(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose every file is there and as long as was written. Raises Unsound.

    Files of tensors are not read; the small ones are, and hold what was written.
    """
    manifest = read_manifest(folder)
    for name, written in manifest.files.items():
        try:
            there = (folder / name).stat().st_size
        except FileNotFoundError:
            raise Unsound(f"{name} is missing") from None
        except OSError as problem:
            raise Unsound(f"{name} cannot be read ({problem.strerror or problem})") from None
        if there != written["bytes"]:
            raise Unsound(f"{name} has {there:,} bytes instead of {written['bytes']:,}")
        if not name.endswith(TENSORS):
            _check(folder, name, written)
    return manifest


def verify(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose every file holds what was written; all are read. Raises Unsound otherwise."""
    manifest = measure(folder)
    for name, written in manifest.files.items():
        if name.endswith(TENSORS):
            _check(folder, name, written)
    return manifest


def _check(folder: Path, name: str, written: Described) -> None:
    try:
        there = describe(folder / name)
    except OSError as problem:
        raise Unsound(f"{name} cannot be read ({problem.strerror or problem})") from None
    if there != written:
        raise Unsound(f"{name} does not hold what was written (its checksum differs)")


def candidates(run: Run, passed_over: list[str], before: int | None = None) -> Iterator[tuple[Path, Manifest]]:
    """The checkpoints of a run that look whole with their tensors unread, newest first; those of steps below `before` only.

    A line for each that does not goes to `passed_over` as it is come across.
    """
    steps = [step for step in run.steps() if before is None or step < before]
    for partial in sorted(run.checkpoints.glob(f"*{PARTIAL}")) if before is None else ():
        if not steps or partial.name.removesuffix(PARTIAL) > run.checkpoint(steps[-1]).name:
            passed_over.append(f"{partial}: half-written, skipped")
    for step in reversed(steps):
        folder = run.checkpoint(step)
        try:
            yield folder, measure(folder)
        except Unsound as reason:
            passed_over.append(f"{folder}: {reason}; skipped")


def find(path: Path) -> tuple[Path, Manifest, list[str]]:
    """The checkpoint that `path` names: itself, or the newest sound one of a run, with what was passed over. All is read.

    Raises Mistake where there is none.
    """
    (folder, manifest), passed_over = using(path, lambda folder, _: (folder, verify(folder)))
    return folder, manifest, passed_over


def using(path: Path, use: Callable[[Path, Manifest], T]) -> tuple[T, list[str]]:
    """What `use` makes of the checkpoint that `path` names, or of the newest one of a run that it does not find unsound.

    With it a line for each that was passed over. `use` may raise Unsound for what it reads; nothing else is read. Raises
    Mistake where there is none.
    """
    if (path / MANIFEST).exists() or re.fullmatch(r"step-\d+", path.name):
        try:
            return use(path, measure(path)), []
        except Unsound as reason:
            raise Mistake(f"{path}: {reason}") from None
    if not path.exists():
        raise Mistake(f"{path}: no such run, checkpoint or model folder")
    passed_over: list[str] = []
    for folder, manifest in candidates(Run.open(path), passed_over):
        try:
            return use(folder, manifest), passed_over
        except Unsound as reason:
            passed_over.append(f"{folder}: {reason}; skipped")
    why = f" ({passed_over[0]})" if passed_over else ""
    raise Mistake(f"{path}: no checkpoint here{why}")
