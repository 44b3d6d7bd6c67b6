"""Signals that stop a run, at the same step on all ranks."""

import signal
from types import FrameType

import torch
import torch.distributed as dist

from lmforge.cluster.distributed import DistributedContext


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
            raise KeyboardInterrupt  # Ctrl-C twice: leave at once
        self._signal = number

    def exchange(self, save_request: int = 0) -> tuple[int, int]:
        """(signal, save request): the largest of any rank at the last call, 0 for none; the same on all. Called each step."""
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
