"""Which checkpoints stay when a new one is there."""

import math
import shutil
from dataclasses import dataclass

from lmforge.atomic_files import DELETED_SUFFIX, PARTIAL_SUFFIX
from lmforge.checkpoint.checksums import CorruptCheckpoint
from lmforge.checkpoint.manifest import Manifest, read_manifest
from lmforge.runs import MANIFEST, STEP_PREFIX, Run, is_local, remove_checkpoint


@dataclass(frozen=True)
class RetentionPolicy:
    """The newest `last`, the `best` by what `metric` was at their step, and all that are permanent."""

    keep_last: int
    keep_best: int = 0
    metric: str = "val/loss"
    maximize: bool = False

    def rank_by_metric(self, manifests: dict[int, Manifest]) -> list[int]:
        """Steps that have the metric and a number for it, the best first; of equals the older."""
        values = {step: manifest.metrics.get(self.metric) for step, manifest in manifests.items()}
        judged = {step: value for step, value in values.items() if value is not None and math.isfinite(value)}
        sign = -1 if self.maximize else 1
        return sorted(judged, key=lambda step: (sign * judged[step], step))

    def steps_to_delete(self, manifests: dict[int, Manifest]) -> list[int]:
        """Steps to delete, of the sound ones that are there."""
        passing = [step for step in sorted(manifests) if not manifests[step].kept]
        kept = {*passing[-self.keep_last :], *self.rank_by_metric(manifests)[: self.keep_best]}
        return [step for step in passing if step not in kept]


def delete_old_checkpoints(run: Run, retention: RetentionPolicy, newest_step: int) -> None:
    """Delete what `keep` does not hold, and what saves that were cut off left. CorruptCheckpoint and later ones stay as they are."""
    if is_local(run.checkpoints_folder):
        for left in (*run.checkpoints_folder.glob(f"*{PARTIAL_SUFFIX}"), *run.checkpoints_folder.glob(f".*{DELETED_SUFFIX}")):
            shutil.rmtree(left, ignore_errors=True)
    elif run.checkpoints_folder.is_dir():
        for left in run.checkpoints_folder.iterdir():
            if left.name.startswith(STEP_PREFIX) and not (left / MANIFEST).exists():
                remove_checkpoint(left)
    manifests = {}
    for step in run.checkpoint_steps():
        try:
            if step <= newest_step:
                manifests[step] = read_manifest(run.checkpoint_path(step))
        except CorruptCheckpoint:
            continue
    for step in retention.steps_to_delete(manifests):
        remove_checkpoint(run.checkpoint_path(step))
