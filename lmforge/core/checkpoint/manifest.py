"""The check of a checkpoint's files against its manifest (`lmforge/core/records/manifests.py`), and
the search for the newest intact one.
"""

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch

from lmforge.core.checkpoint.storage import digest_file
from lmforge.core.errors import UserError
from lmforge.core.files.atomic_files import PARTIAL_SUFFIX
from lmforge.core.records.kinds import Kind, kind_of, unexpected
from lmforge.core.records.manifests import CorruptCheckpoint, Manifest, check_sizes, read_manifest, unreadable
from lmforge.core.records.runs import MANIFEST, Run

TENSOR_SUFFIX = ".distcp"
T = TypeVar("T")


def get_rng_state() -> str:
    """torch's CPU random state, in base64."""
    return base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()


def set_rng_state(state: str) -> None:
    """Raises CorruptCheckpoint where it is not such a state."""
    try:
        torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8))
    except (ValueError, TypeError, RuntimeError):
        raise CorruptCheckpoint(f"{MANIFEST}: its rng is not a state of torch's generator") from None


def verify(folder: Path, *, with_tensors: bool = True) -> Manifest:
    """The manifest of a checkpoint whose files match it. Raises CorruptCheckpoint otherwise.

    Every file is read and verified; without `with_tensors`, of the files of tensors only the size
    is checked.
    """
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    for name, written in manifest.files.items():
        try:
            is_read = with_tensors or not name.endswith(TENSOR_SUFFIX)
            if is_read and digest_file(folder / name) != written:
                raise CorruptCheckpoint(f"{name} does not hold what was written (its checksum differs)")
        except OSError as problem:
            raise unreadable(problem, folder / name) from None
    return manifest


def candidates(run: Run, skipped: list[str], before_step: int | None = None) -> Iterator[tuple[Path, Manifest]]:
    """The checkpoints of a run (before `before_step`, if given) whose files have the right sizes,
    newest first. A line for each other one is added to `skipped`.
    """
    steps = [step for step in run.checkpoint_steps() if before_step is None or step < before_step]
    for partial in sorted(run.checkpoints_folder.glob(f"*{PARTIAL_SUFFIX}")) if before_step is None else ():
        if not steps or partial.name.removesuffix(PARTIAL_SUFFIX) > run.checkpoint_path(steps[-1]).name:
            skipped.append(f"{partial}: half-written, skipped")
    for step in reversed(steps):
        folder = run.checkpoint_path(step)
        try:
            yield folder, verify(folder, with_tensors=False)
        except CorruptCheckpoint as reason:
            skipped.append(f"{folder}: {reason}; skipped")


def open_checkpoint(path: Path, open_with: Callable[[Path, Manifest], T]) -> tuple[T, list[str]]:
    """Open the checkpoint in the folder `path`, or the newest intact one of the run in `path`.

    Returns what `open_with` returns, and a line for each checkpoint that was skipped. Tensors are
    not read here: `open_with` raises CorruptCheckpoint for what it reads, and the next older
    checkpoint is tried. Raises UserError where there is none.
    """
    kind = kind_of(path)
    if kind == Kind.CHECKPOINT:
        try:
            return open_with(path, verify(path, with_tensors=False)), []
        except CorruptCheckpoint as reason:
            raise UserError(f"{path}: {reason}") from None
    if kind != Kind.RUN:
        raise unexpected(path, (Kind.RUN, Kind.CHECKPOINT))
    skipped: list[str] = []
    for folder, manifest in candidates(Run.open(path), skipped):
        try:
            return open_with(folder, manifest), skipped
        except CorruptCheckpoint as reason:
            skipped.append(f"{folder}: {reason}; skipped")
    why = f" ({skipped[0]})" if skipped else ""
    raise UserError(f"{path}: no checkpoint here{why}")
