"""The checkpoints of a run while it trains: when they are saved (by steps, by time, and again after
a failed save), what is in them, and the return to one after bad steps. All ranks save and load at
the same step.
"""

import time
from functools import partial
from typing import Any

import torch

from lmforge.core.checkpoint import AsyncCheckpointer, StateDict, get_rng_state
from lmforge.core.errors import LockLost, RunFailed
from lmforge.core.files.atomic_files import without_non_finite
from lmforge.core.optim.optimizer import named_optimizer_state
from lmforge.core.options.stage import StageConfig
from lmforge.core.parallel.parallel_model import ParallelModel
from lmforge.core.records.runs import remove_checkpoint
from lmforge.core.steps.bad_steps import BadStep, BadStepDetector
from lmforge.core.steps.callbacks import BatchSource, SaveRequest
from lmforge.core.steps.resume import find_resume_point, load_resume_point

# Until a failed save is tried again, unless the next one is due before.
RETRY_SECONDS = 60.0
# A run ends after so many failed saves in a row, because its progress would be lost.
MAX_FAILED_SAVES = 3
# A run that has to go back more often than this ends.
MAX_ROLLBACKS = 3
# After the last step there is no later step at which to retry.
FINAL_SAVE_ATTEMPTS = 3
FINAL_RETRY_SECONDS = 5.0


class Checkpoints:
    """Saves model, optimizer, `batches` and `detector` of a run, and loads them.

    Every rank has one.

    Requests by the clock come from rank 0 only; `StopSignals` makes all ranks follow them at the
    same step.
    """

    def __init__(
        self,
        checkpointer: AsyncCheckpointer,
        config: StageConfig,
        parallel_model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        batches: BatchSource,
        detector: BadStepDetector,
    ) -> None:
        self._checkpointer = checkpointer
        self._options = config.checkpoint
        self._every_steps = config.checkpoint_every_steps
        self._steps = config.train.steps
        self._parallel_model = parallel_model
        self._optimizer = optimizer
        self._batches = batches
        self._detector = detector
        self._last_saved = time.monotonic()
        self._last_request = SaveRequest.REGULAR
        self._deferred_request = SaveRequest.NONE
        # Before tensors change, the device waits until a save in flight has copied them.
        self.wait_for_staging = checkpointer.wait_for_staging

    @property
    def blocking_seconds(self) -> float:
        """How long the loop has waited for saves, in total."""
        return self._checkpointer.blocking_seconds

    @property
    def needs_validation(self) -> bool:
        """Whether each checkpoint needs a validation at its step, because the best ones are
        kept.
        """
        return self._options.keep_best > 0 and self._options.best_metric.startswith("val/")

    def requested_by_clock(self) -> SaveRequest:
        """What rank 0 requests now; any rank, where it has lost the lock."""
        checkpointer = self._checkpointer
        now = time.monotonic()
        if checkpointer.run.has_lost_lock:
            return SaveRequest.LOCK_LOST
        if not checkpointer.dist_ctx.is_rank0:
            return SaveRequest.NONE
        if checkpointer.consecutive_failures >= MAX_FAILED_SAVES:
            return SaveRequest.GIVE_UP
        if checkpointer.failed_at is not None and now - checkpointer.failed_at >= RETRY_SECONDS:
            checkpointer.failed_at = None
            return self._last_request
        if self._deferred_request:
            deferred = self._deferred_request
            self._deferred_request = SaveRequest.NONE
            return deferred
        minutes = self._options.every_minutes
        if minutes is not None and now - self._last_saved >= 60 * minutes:
            self._last_saved = now
            return SaveRequest.REGULAR
        return SaveRequest.NONE

    def raise_if_ending(self, request: int, step: int) -> None:
        """Raise RunFailed where a request of any rank ends the run: LockLost on all of them if one
        has lost the lock.
        """
        if request == SaveRequest.LOCK_LOST:
            raise self._checkpointer.run.lost_lock()
        if request == SaveRequest.GIVE_UP:
            raise RunFailed(f"step {step}: {self._checkpointer.describe_failures()}")

    def defer(self, request: SaveRequest) -> None:
        """Repeat a request later: the run rolls back now, so this step is not worth saving."""
        self._deferred_request = request

    def requested_by_step(self, step: int, stopping: bool) -> SaveRequest:
        """The request that follows from the number of steps done."""
        if (
            self._options.keep_every_steps is not None
            and step % self._options.keep_every_steps == 0
        ):
            return SaveRequest.KEPT
        return (
            SaveRequest.REGULAR if stopping or step % self._every_steps == 0 else SaveRequest.NONE
        )

    def save(self, step: int, metrics: dict[str, Any], kept: bool, stopping: bool) -> None:
        """Save a checkpoint of `step`; where the run is `stopping`, wait until it is written.

        Raises RunFailed where the last checkpoint of a run cannot be written.
        """
        dataset = self._batches.dataset
        read = (step + self._detector.batch_offset) * self._batches.global_batch_size
        for attempt in range(FINAL_SAVE_ATTEMPTS):
            if attempt:
                time.sleep(FINAL_RETRY_SECONDS)
            self._last_saved = time.monotonic()  # the clock of regular checkpoints starts again
            self._last_request = SaveRequest.KEPT if kept else SaveRequest.REGULAR
            state: StateDict = self._parallel_model.state_dict(
                self._optimizer, named_optimizer_state
            )
            if self._options.last_save_model_only and step == self._steps:
                state = {"model": state["model"]}
            elif rollouts := self._batches.state_dict():
                state["rollouts"] = rollouts
            self._checkpointer.save(
                step,
                state,
                metrics=without_non_finite(metrics),
                kept=kept,
                consumed_sequences=read,
                plan_hash=dataset.plan_hash_at(read),
                data_plan=dataset.plan_at(read),
                rng=get_rng_state(),
                bad_step_detector=self._detector.state_dict(),
            )
            if not stopping:
                return
            self._checkpointer.wait()
            if not self._checkpointer.consecutive_failures:
                return
        raise RunFailed(f"step {step}: {self._checkpointer.describe_failures()}")

    def roll_back(self, last_bad_step: BadStep, cause: str) -> int:
        """Load the newest checkpoint from before the bad steps in a row, and delete those after it.

        Returns its step.

        Training goes on with the batch after the last bad one. Every rank calls it at the same
        step. Raises RunFailed where there is no such checkpoint, or the run has rolled back too
        often, and LockLost.
        """
        checkpointer = self._checkpointer
        detector = self._detector
        run = checkpointer.run
        dist_ctx = checkpointer.dist_ctx
        if detector.rollbacks >= MAX_ROLLBACKS:
            raise RunFailed(
                f"{cause}, after {detector.rollbacks} rollbacks; a lower optimizer.lr or a longer"
                " warm-up may help"
            )
        checkpointer.wait()
        first_bad_step = max(0, last_bad_step.step - detector.consecutive_bad_steps) + 1
        with dist_ctx.raise_on_all():
            run.ensure_lock()  # what another run has saved there is not of this one
        point = dist_ctx.decide_on_rank0(
            partial(find_resume_point, run, self._steps, first_bad_step)
        )
        if point.manifest is None:
            raise RunFailed(f"{cause}, and no checkpoint from before them to roll back to")
        point = load_resume_point(
            run, self._steps, point, self._parallel_model, self._optimizer, checkpointer.log
        )
        assert point.manifest is not None
        for later in run.checkpoint_steps() if dist_ctx.is_rank0 else ():
            if later > point.step:  # a run that resumed from it would repeat the bad steps
                try:
                    run.check_lock()
                    remove_checkpoint(run.checkpoint_path(later))
                except LockLost:
                    break  # all ranks end at the next step
                except Exception as problem:
                    checkpointer.log(
                        f"{run.checkpoint_path(later)}: could not be deleted: {problem}"
                    )
        detector.load_losses(point.manifest.bad_step_detector)
        detector.rolled_back_to(point.step, next_batch=last_bad_step.batch_index + 1)
        return point.step
