"""When a run is saved, what with, and what happens when saving fails."""

import time
from collections.abc import Callable
from typing import Any

from lmforge.checkpoint import AsyncCheckpointer
from lmforge.checkpoint.async_save import StateDict
from lmforge.config.sections import CheckpointOptions
from lmforge.errors import RunFailed

# Wishes, the stronger the larger: all ranks follow the largest.
REGULAR, KEPT, GIVE_UP = 1, 2, 3
# At the end there is no later step to try again at.
FINAL_SAVE_ATTEMPTS = 3
FINAL_RETRY_SECONDS = 5.0


class CheckpointSchedule:
    """Decides on saves by steps and by the clock, and hands them to the saver.

    Every rank has one. What goes by the clock is wished for by the first rank only and agreed on by all (`Wishes`).

    state(holds)    the tensors of those kinds, as a checkpoint has them
    about(step)     the manifest's fields of this step
    """

    def __init__(
        self,
        checkpointer: AsyncCheckpointer,
        options: CheckpointOptions,
        *,
        every_steps: int,
        total_steps: int,
        is_rank0: bool,
        get_state: Callable[[tuple[str, ...]], StateDict],
        get_metadata: Callable[[int], dict[str, Any]],
    ) -> None:
        self.checkpointer = checkpointer
        self._options = options
        self._every_steps, self._total_steps, self._is_rank0 = every_steps, total_steps, is_rank0
        self._get_state, self._get_metadata = get_state, get_metadata
        now = time.monotonic()
        self._last_saved = {REGULAR: now, KEPT: now}
        self._last_request, self._deferred_request = REGULAR, 0

    @property
    def needs_validation(self) -> bool:
        """Whether a checkpoint is to be judged by a validation at its step."""
        return self._options.keep_best > 0 and self._options.best_metric.startswith("val/")

    def requested_by_clock(self) -> int:
        """What the clock asks for now, on the first rank; 0 is nothing."""
        if not self._is_rank0:
            return 0
        options, saver, now = self._options, self.checkpointer, time.monotonic()
        if options.max_failures and saver.consecutive_failures >= options.max_failures:
            return GIVE_UP
        if saver.failed_at is not None and now - saver.failed_at >= options.retry_seconds:
            saver.failed_at = None
            return self._last_request
        if self._deferred_request:
            owed, self._deferred_request = self._deferred_request, 0
            return owed
        for kind, minutes in ((KEPT, options.keep_every_minutes), (REGULAR, options.every_minutes)):
            if minutes is not None and now - self._last_saved[kind] >= 60 * minutes:
                self._last_saved[kind] = now
                return kind
        return 0

    def defer(self, request: int) -> None:
        """A wish that the run has no use for now, since it goes back, to be wished for again."""
        self._deferred_request = request

    def requested_by_step(self, step: int, stopping: bool) -> int:
        """What the number of steps done asks for."""
        permanent = self._options.keep_every_steps
        if permanent is not None and step % permanent == 0:
            return KEPT
        return REGULAR if stopping or step % self._every_steps == 0 else 0

    def save(self, step: int, metrics: dict[str, Any], keep: bool, stopping: bool) -> None:
        """Save this step; where the run is `stopping`, until it is saved. Raises RunFailed where that cannot be."""
        self._last_saved[REGULAR] = time.monotonic()
        self._save(step, metrics, keep)
        if not stopping:
            return
        self.checkpointer.wait()
        tries = 1
        while self.checkpointer.consecutive_failures:
            if tries == FINAL_SAVE_ATTEMPTS:
                raise RunFailed(f"step {step}: could not be saved in {tries} tries: {self.checkpointer.last_error}")
            time.sleep(min(FINAL_RETRY_SECONDS, self._options.retry_seconds))
            tries += 1
            self._save(step, metrics, keep)
            self.checkpointer.wait()

    def _save(self, step: int, metrics: dict[str, Any], keep: bool) -> None:
        self._last_request = KEPT if keep else REGULAR
        only_model = self._options.last_save_model_only and step == self._total_steps
        kinds = ("model",) if only_model else ("model", "optimizer")
        self.checkpointer.save(step, self._get_state(kinds), metrics=metrics, kept=keep, **self._get_metadata(step))
