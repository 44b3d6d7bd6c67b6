"""Which checkpoints are deleted when a new one has been written."""

import math
import shutil
from contextlib import suppress
from dataclasses import dataclass

from lmforge.atomic_files import DELETED_SUFFIX, PARTIAL_SUFFIX
from lmforge.checkpoint.manifest import Manifest, read_manifest
from lmforge.checkpoint.storage import CorruptCheckpoint
from lmforge.runs import MANIFEST, STEP_PREFIX, Run, is_local, remove_checkpoint


@dataclass(frozen=True)
class RetentionPolicy:
    """What stays: the newest `keep_last`, the `keep_best` by `metric` at their step, and all that are marked as kept."""

    keep_last: int
    keep_best: int = 0
    metric: str = "val/loss"
    maximize: bool = False

    def steps_to_delete(self, manifests: dict[int, Manifest]) -> list[int]:
        """The steps to delete, of those in `manifests`."""
        values = {step: manifest.metrics.get(self.metric) for step, manifest in manifests.items()}
        finite = {step: value for step, value in values.items() if value is not None and math.isfinite(value)}
        sign = -1 if self.maximize else 1
        best = sorted(finite, key=lambda step: (sign * finite[step], step))  # of equal ones the older first
        temporary = [step for step in sorted(manifests) if not manifests[step].kept]
        staying = {*temporary[-self.keep_last :], *best[: self.keep_best]}
        return [step for step in temporary if step not in staying]


def delete_old_checkpoints(run: Run, retention: RetentionPolicy, newest_step: int) -> None:
    """Delete checkpoints that the policy does not keep, and leftovers of interrupted saves. Corrupt and later ones stay."""
    if is_local(run.checkpoints_folder):
        for pattern in (f"*{PARTIAL_SUFFIX}", f".*{DELETED_SUFFIX}"):
            for leftover in run.checkpoints_folder.glob(pattern):
                shutil.rmtree(leftover, ignore_errors=True)
    elif run.checkpoints_folder.is_dir():
        for folder in run.checkpoints_folder.iterdir():
            if folder.name.startswith(STEP_PREFIX) and not (folder / MANIFEST).exists():
                remove_checkpoint(folder)
    manifests = {}
    for step in run.checkpoint_steps():
        with suppress(CorruptCheckpoint):
            if step <= newest_step:
                manifests[step] = read_manifest(run.checkpoint_path(step))
    for step in retention.steps_to_delete(manifests):
        remove_checkpoint(run.checkpoint_path(step))
