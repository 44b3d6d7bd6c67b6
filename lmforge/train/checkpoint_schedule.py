"""When a run saves a checkpoint (by steps, by time, and again after a failed save), and when a signal stops it. All ranks save
and stop at the same step.
"""

import signal
import time
from enum import IntEnum
from types import FrameType

import torch
import torch.distributed as dist

from lmforge.checkpoint import AsyncCheckpointer
from lmforge.cluster.distributed import DistributedContext
from lmforge.config.stage import StageConfig


class SaveRequest(IntEnum):
    """The requests of ranks at a step. The largest request of any rank counts."""

    NONE = 0
    REGULAR = 1
    KEPT = 2
    GIVE_UP = 3


class CheckpointSchedule:
    """Decides at which steps a checkpoint is saved. Every rank has one.

    Requests by the clock come from rank 0 only; `StopSignals` makes all ranks follow them at the same step.
    """

    def __init__(self, checkpointer: AsyncCheckpointer, config: StageConfig, is_rank0: bool) -> None:
        self._checkpointer, self._options = checkpointer, config.checkpoint
        self._every_steps, self._is_rank0 = config.checkpoint_every_steps, is_rank0
        self._last_saved = dict.fromkeys((SaveRequest.REGULAR, SaveRequest.KEPT), time.monotonic())
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
        """The request that follows from the number of steps done."""
        if self._options.keep_every_steps is not None and step % self._options.keep_every_steps == 0:
            return SaveRequest.KEPT
        return SaveRequest.REGULAR if stopping or step % self._every_steps == 0 else SaveRequest.NONE

    def record_save(self, kept: bool) -> None:
        """Called at each save: the clock of regular checkpoints starts again."""
        self._last_saved[SaveRequest.REGULAR] = time.monotonic()
        self._last_request = SaveRequest.KEPT if kept else SaveRequest.REGULAR


class StopSignals:
    """Requests of one rank that all ranks follow at the same step: to stop, by a signal, and to save, by the clock of rank 0.

    SIGTERM, SIGINT and SIGUSR1 (Slurm's, before the time limit) request to stop. The handler only sets a flag: a collective
    in it could pair with one that the training thread has in flight. Requests are all-reduced at each step and read at
    the next one, so that no rank waits for them.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self, dist_ctx: DistributedContext) -> None:
        self._dist_ctx = dist_ctx
        self._signal = 0
        self._pending: tuple[torch.Tensor, dist.Work] | None = None
        self._previous_handlers = {number: signal.signal(number, self._handle) for number in self.SIGNALS}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signal == signal.SIGINT and number == signal.SIGINT:
            # Ctrl-C twice: leave at once.
            raise KeyboardInterrupt
        self._signal = number

    def exchange(self, save_request: int) -> tuple[int, int]:
        """Returns (signal, save request): the largest of any rank at the last call, 0 for none, the same on all ranks. Called
        at each step."""
        if self._dist_ctx.control_group is None:
            return self._signal, save_request
        requested = 0, 0
        if self._pending is not None:
            flags, work = self._pending
            work.wait()
            requested = int(flags[0]), int(flags[1])
        flags = torch.tensor([self._signal, save_request], dtype=torch.int32)
        work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._dist_ctx.control_group, async_op=True)
        assert work is not None
        self._pending = (flags, work)
        return requested

    def close(self) -> None:
        """Wait for the request in flight and restore the previous handlers."""
        if self._pending is not None:
            self._pending[1].wait()
            self._pending = None
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
