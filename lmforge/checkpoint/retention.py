"""Which checkpoints stay when a new one is there."""

import math
import shutil
from dataclasses import dataclass

from lmforge.checkpoint.blocks import Unsound
from lmforge.checkpoint.manifest import Manifest, read_manifest
from lmforge.runs import DROPPED, MANIFEST, PARTIAL, STEP_PREFIX, Run, is_local, remove


@dataclass(frozen=True)
class Keep:
    """The newest `last`, the `best` by what `metric` was at their step, and all that are permanent."""

    last: int
    best: int = 0
    metric: str = "val/loss"
    highest: bool = False

    def best_of(self, manifests: dict[int, Manifest]) -> list[int]:
        """Steps that have the metric and a number for it, the best first; of equals the older."""
        values = {step: manifest.metrics.get(self.metric) for step, manifest in manifests.items()}
        judged = {step: value for step, value in values.items() if value is not None and math.isfinite(value)}
        sign = -1 if self.highest else 1
        return sorted(judged, key=lambda step: (sign * judged[step], step))

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
    elif run.checkpoints.is_dir():
        for left in run.checkpoints.iterdir():
            if left.name.startswith(STEP_PREFIX) and not (left / MANIFEST).exists():
                remove(left)
    manifests = {}
    for step in run.steps():
        try:
            if step <= newest:
                manifests[step] = read_manifest(run.checkpoint(step))
        except Unsound:
            continue
    for step in keep.dropped(manifests):
        remove(run.checkpoint(step))
