"""Which checkpoints stay when a new one is there."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from lmforge.checkpoint.blocks import Unsound, is_local
from lmforge.checkpoint.manifest import Manifest, read_manifest
from lmforge.runs import MANIFEST, PARTIAL, Run

DROPPED = ".dropped"


@dataclass(frozen=True)
class Keep:
    """The newest `last`, the `best` by what `metric` was at their step, and all that are permanent."""

    last: int
    best: int = 0
    metric: str = "val/loss"
    highest: bool = False

    def best_of(self, manifests: dict[int, Manifest]) -> list[int]:
        """Steps that have the metric, the best first; of equals the older."""
        judged = [step for step, manifest in manifests.items() if manifest.metrics.get(self.metric) is not None]
        sign = -1 if self.highest else 1
        return sorted(judged, key=lambda step: (sign * manifests[step].metrics[self.metric], step))

    def dropped(self, manifests: dict[int, Manifest]) -> list[int]:
        """Steps to delete, of the sound ones that are there."""
        passing = [step for step in sorted(manifests) if not manifests[step].permanent]
        kept = {*passing[-self.last :], *self.best_of(manifests)[: self.best]}
        return [step for step in passing if step not in kept]


def drop_old(run: Run, keep: Keep, newest: int) -> None:
    """Delete what `keep` does not hold, and what saves that were cut off left. Unsound and later ones stay as they are."""
    if is_local(run.checkpoints):
        for left in (*run.checkpoints.glob(f"*{PARTIAL}"), *run.checkpoints.glob(f".*{DROPPED}")):
            shutil.rmtree(left, ignore_errors=True)
    manifests = {}
    for step in run.steps():
        try:
            if step <= newest:
                manifests[step] = read_manifest(run.checkpoint(step))
        except Unsound:
            continue
    for step in keep.dropped(manifests):
        remove(run.checkpoint(step))


def remove(folder: Path) -> None:
    """Delete a checkpoint folder wherever it is; nothing happens where there is none.

    The manifest goes first, so that what a deletion leaves half-way is no checkpoint.
    """
    if not folder.exists():
        return
    if is_local(folder):
        beside = folder.with_name(f".{folder.name}{DROPPED}")
        shutil.rmtree(beside, ignore_errors=True)
        folder.rename(beside)
        shutil.rmtree(beside)
        return
    for path in sorted(folder.iterdir(), key=lambda path: path.name != MANIFEST):
        path.unlink()
