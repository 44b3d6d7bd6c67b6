"""Signals that ask a run to stop, heard by all ranks at the same step."""

import signal
from types import FrameType

import torch
import torch.distributed as dist

from lmforge.cluster.ranks import Ranks


class Wishes:
    """What one rank wants of all, heard by all at the same step: to stop, by a signal, and to save, by the first rank's clock.

    SIGTERM, SIGINT and SIGUSR1 (Slurm's, before the time is up) ask to stop. A handler may only set a flag: a collective
    inside it could pair with one that the training thread has in flight. Wishes are all-reduced each step, and read one
    step later so that nobody waits for them.
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

    def agreed(self, save: int = 0) -> tuple[int, int]:
        """(signal, save): the largest that any rank had by the last call, 0 for none; the same on all. Called once a step."""
        if self._ranks.control is None:
            return self._received, save
        answer = 0, 0
        if self._pending is not None:
            flags, work = self._pending
            work.wait()
            heard, wanted = flags.tolist()
            answer = heard, wanted
        flags = torch.tensor([self._received, save], dtype=torch.int32)
        work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._ranks.control, async_op=True)
        assert work is not None
        self._pending = (flags, work)
        return answer

    def close(self) -> None:
        """Finish what is in flight and put the former handlers back."""
        if self._pending is not None:
            self._pending[1].wait()
            self._pending = None
        for number, handler in self._before.items():
            signal.signal(number, handler)
