"""Signals that ask a run to stop, heard by all ranks at the same step."""

import signal
from types import FrameType

import torch
import torch.distributed as dist

from lmforge.cluster.ranks import Ranks


class StopRequest:
    """SIGTERM, SIGINT and SIGUSR1 (Slurm's, before the time is up) as a wish that all ranks hear at the same step.

    A handler may only set a flag: a collective inside it could pair with one that the training thread has in flight.
    The flag is all-reduced each step, and read one step later so that nobody waits for it.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._received = 0
        self._pending: tuple[torch.Tensor, dist.Work] | None = None
        self._before = {number: signal.signal(number, self._hear) for number in self.SIGNALS}

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._received == signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice at the keyboard: leave at once
        self._received = number

    def agreed(self) -> int:
        """The signal that any rank had received by the last call, or 0; the same on all ranks. Called once a step."""
        if self._ranks.control is None:
            return self._received
        answer = 0
        if self._pending is not None:
            flag, work = self._pending
            work.wait()
            answer = int(flag.item())
        flag = torch.tensor(self._received, dtype=torch.int32)
        work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._ranks.control, async_op=True)
        assert work is not None
        self._pending = (flag, work)
        return answer

    def close(self) -> None:
        """Finish what is in flight and put the former handlers back."""
        if self._pending is not None:
            self._pending[1].wait()
            self._pending = None
        for number, handler in self._before.items():
            signal.signal(number, handler)
