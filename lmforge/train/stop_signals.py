"""Signals that ask a run to stop, heard by all ranks at the same step."""

import signal
from types import FrameType

import torch
import torch.distributed as dist

from lmforge.cluster.distributed import DistributedContext


class StopSignals:
    """What one rank wants of all, heard by all at the same step: to stop, by a signal, and to save, by the first rank's clock.

    SIGTERM, SIGINT and SIGUSR1 (Slurm's, before the time is up) ask to stop. A handler may only set a flag: a collective
    inside it could pair with one that the training thread has in flight. Wishes are all-reduced each step, and read one
    step later so that nobody waits for them.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self, dist_ctx: DistributedContext) -> None:
        self._dist_ctx = dist_ctx
        self._signal = 0
        self._pending: tuple[torch.Tensor, dist.Work] | None = None
        self._previous_handlers = {number: signal.signal(number, self._handle) for number in self.SIGNALS}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signal == signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice at the keyboard: leave at once
        self._signal = number

    def exchange(self, save_request: int = 0) -> tuple[int, int]:
        """(signal, save): the largest that any rank had by the last call, 0 for none; the same on all. Called once a step."""
        if self._dist_ctx.control_group is None:
            return self._signal, save_request
        answer = 0, 0
        if self._pending is not None:
            flags, work = self._pending
            work.wait()
            heard, wanted = flags.tolist()
            answer = heard, wanted
        flags = torch.tensor([self._signal, save_request], dtype=torch.int32)
        work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._dist_ctx.control_group, async_op=True)
        assert work is not None
        self._pending = (flags, work)
        return answer

    def close(self) -> None:
        """Finish what is in flight and put the former handlers back."""
        if self._pending is not None:
            self._pending[1].wait()
            self._pending = None
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
