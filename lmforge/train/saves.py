"""When a run is saved, what with, and what happens when saving fails."""

import time
from collections.abc import Callable
from typing import Any

from lmforge.checkpoint import Saver
from lmforge.checkpoint.saving import State
from lmforge.config import CheckpointOptions
from lmforge.errors import RunFailed

# Wishes, the stronger the larger: all ranks follow the largest.
PASSING, PERMANENT, GIVE_UP = 1, 2, 3
# At the end there is no later step to try again at.
LAST_TRIES = 3
LAST_PAUSE_SECONDS = 5.0


class Saves:
    """Decides on saves by steps and by the clock, and hands them to the saver.

    Every rank has one. What goes by the clock is wished for by the first rank only and agreed on by all (`Wishes`).

    state(holds)    the tensors of those kinds, as a checkpoint has them
    about(step)     the manifest's fields of this step
    """

    def __init__(
        self,
        saver: Saver,
        options: CheckpointOptions,
        *,
        every_steps: int,
        steps: int,
        first: bool,
        state: Callable[[tuple[str, ...]], State],
        about: Callable[[int], dict[str, Any]],
    ) -> None:
        self.saver = saver
        self._options = options
        self._every_steps, self._steps, self._first = every_steps, steps, first
        self._state, self._about = state, about
        now = time.monotonic()
        self._saved = {PASSING: now, PERMANENT: now}
        self._kind, self._owed = PASSING, 0

    @property
    def validate(self) -> bool:
        """Whether a checkpoint is to be judged by a validation at its step."""
        return self._options.keep_best > 0 and self._options.best_metric.startswith("val/")

    def wish(self) -> int:
        """What the clock asks for now, on the first rank; 0 is nothing."""
        if not self._first:
            return 0
        options, saver, now = self._options, self.saver, time.monotonic()
        if options.max_failures and saver.failures >= options.max_failures:
            return GIVE_UP
        if saver.failed_at is not None and now - saver.failed_at >= options.retry_seconds:
            saver.failed_at = None
            return self._kind
        if self._owed:
            owed, self._owed = self._owed, 0
            return owed
        for kind, minutes in ((PERMANENT, options.permanent_every_minutes), (PASSING, options.every_minutes)):
            if minutes is not None and now - self._saved[kind] >= 60 * minutes:
                self._saved[kind] = now
                return kind
        return 0

    def owe(self, kind: int) -> None:
        """A wish that the run has no use for now, since it goes back, to be wished for again."""
        self._owed = kind

    def due(self, done: int, stopping: bool) -> int:
        """What the number of steps done asks for."""
        permanent = self._options.permanent_every_steps
        if permanent is not None and done % permanent == 0:
            return PERMANENT
        return PASSING if stopping or done % self._every_steps == 0 else 0

    def save(self, done: int, metrics: dict[str, Any], permanent: bool, stopping: bool) -> None:
        """Save this step; where the run is `stopping`, until it is saved. Raises RunFailed where that cannot be."""
        self._saved[PASSING] = time.monotonic()
        self._save(done, metrics, permanent)
        if not stopping:
            return
        self.saver.wait()
        tries = 1
        while self.saver.failures:
            if tries == LAST_TRIES:
                raise RunFailed(f"step {done}: could not be saved in {tries} tries: {self.saver.problem}")
            time.sleep(min(LAST_PAUSE_SECONDS, self._options.retry_seconds))
            tries += 1
            self._save(done, metrics, permanent)
            self.saver.wait()

    def _save(self, done: int, metrics: dict[str, Any], permanent: bool) -> None:
        self._kind = PERMANENT if permanent else PASSING
        only_model = self._options.final == "model" and done == self._steps
        kinds = ("model",) if only_model else ("model", "optimizer")
        self.saver.save(done, self._state(kinds), metrics=metrics, permanent=permanent, **self._about(done))
