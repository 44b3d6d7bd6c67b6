"""What a rank does when, for others to see: its phase, its heartbeat, and signals that ask it to stop.

The training thread says its step and phase; a thread of its own writes them to `health/rank-R.json` every second, so
that a hang (old phase, fresh heartbeat) and a death (old heartbeat) look different from outside.
"""

import json
import os
import platform
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from lmforge.cluster.ranks import Ranks

HEARTBEAT_SECONDS = 1.0


class Heartbeat:
    """`health/rank-R.json`: {rank, host, process, step, phase, since, written}; times in seconds since the epoch."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"rank-{rank}.json"
        self._about = {"rank": rank, "host": platform.node(), "process": os.getpid()}
        self._now: dict[str, Any] = {"step": None, "phase": "starting", "since": time.time()}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def phase(self, phase: str, step: int) -> None:
        """Say what this rank does from now on."""
        self._now = {"step": step, "phase": phase, "since": time.time()}

    def stop(self, phase: str) -> None:
        """Write the last word and end."""
        self._now = {**self._now, "phase": phase, "since": time.time()}
        self._stopped.set()
        self._thread.join()

    def _beat(self) -> None:
        while True:
            last = self._stopped.wait(HEARTBEAT_SECONDS)
            beside = self._path.with_suffix(".partial")
            try:
                beside.write_text(json.dumps({**self._about, **self._now, "written": time.time()}), encoding="utf-8")
                os.replace(beside, self._path)
            except OSError:
                pass  # a heartbeat that cannot be written must not stop the training it tells of
            if last:
                return


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
