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

    @property
    def where(self) -> str:
        """Step and phase, in words."""
        return f"step {self._now['step']}, {self._now['phase']}"

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
