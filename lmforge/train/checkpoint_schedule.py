"""When a run saves a checkpoint: by steps, by the clock, and again after a save that failed."""

import time
from enum import IntEnum

from lmforge.checkpoint import AsyncCheckpointer
from lmforge.config.sections import CheckpointOptions


class SaveRequest(IntEnum):
    """What a rank requests of all at this step. The largest request of any rank counts."""

    NONE = 0
    REGULAR = 1
    KEPT = 2
    GIVE_UP = 3


class CheckpointSchedule:
    """Decides at which steps a checkpoint is saved. Every rank has one.

    Requests by the clock come from rank 0 only; `StopSignals` makes all ranks follow them at the same step.
    """

    def __init__(
        self, checkpointer: AsyncCheckpointer, options: CheckpointOptions, *, every_steps: int, is_rank0: bool
    ) -> None:
        self._checkpointer, self._options = checkpointer, options
        self._every_steps, self._is_rank0 = every_steps, is_rank0
        now = time.monotonic()
        self._last_saved = {SaveRequest.REGULAR: now, SaveRequest.KEPT: now}
        self._last_request, self._deferred_request = SaveRequest.REGULAR, SaveRequest.NONE

    @property
    def needs_validation(self) -> bool:
        """Whether each checkpoint needs a validation at its step, because the best ones are kept."""
        return self._options.keep_best > 0 and self._options.best_metric.startswith("val/")

    def requested_by_clock(self) -> SaveRequest:
        """What rank 0 requests now."""
        if not self._is_rank0:
            return SaveRequest.NONE
        options, checkpointer, now = self._options, self._checkpointer, time.monotonic()
        if options.max_failures and checkpointer.consecutive_failures >= options.max_failures:
            return SaveRequest.GIVE_UP
        if checkpointer.failed_at is not None and now - checkpointer.failed_at >= options.retry_seconds:
            checkpointer.failed_at = None
            return self._last_request
        if self._deferred_request:
            deferred, self._deferred_request = self._deferred_request, SaveRequest.NONE
            return deferred
        every_minutes = {SaveRequest.KEPT: options.keep_every_minutes, SaveRequest.REGULAR: options.every_minutes}
        for request, minutes in every_minutes.items():
            if minutes is not None and now - self._last_saved[request] >= 60 * minutes:
                self._last_saved[request] = now
                return request
        return SaveRequest.NONE

    def defer(self, request: SaveRequest) -> None:
        """Repeat a request later: the run rolls back now, so this step is not worth saving."""
        self._deferred_request = request

    def requested_by_step(self, step: int, stopping: bool) -> SaveRequest:
        """What the number of steps done requests."""
        if self._options.keep_every_steps is not None and step % self._options.keep_every_steps == 0:
            return SaveRequest.KEPT
        return SaveRequest.REGULAR if stopping or step % self._every_steps == 0 else SaveRequest.NONE

    def record_save(self, kept: bool) -> None:
        """Called at each save: the clock of regular checkpoints starts again."""
        self._last_saved[SaveRequest.REGULAR] = time.monotonic()
        self._last_request = SaveRequest.KEPT if kept else SaveRequest.REGULAR
