"""What a rank does at this moment, for others to see: `health/rank-R.json`, written every few seconds by a thread of its own.

The training thread says its step and phase, in about a microsecond; what is written, and when, is no business of its
own. An old phase under a fresh heartbeat is a stall, an old heartbeat is a death: what follows from that is for
`stall.py` to say. The file is overwritten where it lies, in one piece: on a file system that many hosts share, a new name
every second from each of a thousand ranks is work for its one metadata server, and old names linger in caches.
"""

import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

PHASES = (
    "starting",
    "building",
    "loading",
    "data",
    "forward",
    "backward",
    "reduce",
    "optimizer",
    "save",
    "evaluate",
    "sample",
    "reward",
    "barrier",
)
# What is left in the file when a rank has ended.
FINAL_PHASES = ("done", "interrupted", "failed")
# Longer than any heartbeat: what is left of a longer one is overwritten with blanks.
FILE_BYTES = 512


class PhaseMark(NamedTuple):
    """Where a rank is: the `number`-th mark of `step`, in `phase` since `since` (epoch) and `began` (time.perf_counter)."""

    step: int
    phase_number: int
    phase: str
    since: float
    started: float


class Heartbeat:
    """This rank's file, {rank, host, process, step, number, phase, since, written, bytes, noticed, reported}.

    Times in seconds since the epoch; `bytes` is what the process has read and written so far; `noticed` and `reported`
    are set during a stall (watch.py). `began_phase` hears of each mark where it is set.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"rank-{rank}.json"
        self.current = PhaseMark(0, 0, "starting", time.time(), time.perf_counter())
        self.stall_noticed = self.stall_reported = False
        # Seconds spent in each phase since they were last taken, less what was waited for other ranks in it.
        self.busy_seconds: dict[str, float] = {}
        self.waited_seconds = 0.0
        self._identity = {"rank": rank, "host": platform.node(), "process": os.getpid()}
        self.on_phase: Callable[[str, int], None] | None = None
        # Of the phase before: when it began, and how long it took.
        self.last_phase_started = self.last_phase_seconds = 0.0
        self._longest: dict[str, tuple[float, float]] = {}
        self._training_thread = threading.get_ident()

    def set_phase(self, phase: str, step: int) -> None:
        """Say what this rank does from now on. It costs about a microsecond and never fails."""
        before, clock = self.current, time.perf_counter()
        self.current = PhaseMark(step, before.phase_number + 1 if step == before.step else 0, phase, time.time(), clock)
        seconds, name = clock - before.started, before.phase
        self.last_phase_started, self.last_phase_seconds = before.started, seconds
        first, second = self._longest.get(name, (0.0, 0.0))
        if seconds > second:
            self._longest[name] = (seconds, first) if seconds > first else (first, seconds)
        self.busy_seconds[name] = self.busy_seconds.get(name, 0.0) + seconds - self.waited_seconds
        self.waited_seconds = 0.0
        if self.on_phase is not None:
            self.on_phase(phase, step)

    @contextmanager
    def barrier(self) -> Iterator[None]:
        """Around waiting for other ranks: the phase is `barrier` inside and what it was before after it.

        In a thread other than the training's it changes nothing.
        """
        if threading.get_ident() != self._training_thread or self.current.phase == "barrier":
            yield
            return
        before = self.current
        self.set_phase("barrier", before.step)
        try:
            yield
        finally:
            self.set_phase(before.phase, before.step)

    def usual_seconds(self, phase: str) -> float:
        """Seconds that this phase has taken twice, or more, in this run: what happened once may have been a stall."""
        return self._longest.get(phase, (0.0, 0.0))[1]

    def take_busy_seconds(self) -> dict[str, float]:
        """Seconds in each phase since the last taking, less the waiting for others. The current phase counts from its mark."""
        taken, self.busy_seconds = self.busy_seconds, {}
        return taken

    def write(self, phase: str | None = None) -> None:
        """Write the file, with `phase` in place of the current one. OSError where that fails."""
        now = self.current
        told: dict[str, Any] = {
            **self._identity,
            "step": now.step,
            "number": now.phase_number,
            "phase": phase or now.phase,
            "since": now.since,
            "written": time.time(),
            "bytes": process_io_bytes(),
            "noticed": self.stall_noticed,
            "reported": self.stall_reported,
        }
        text = json.dumps(told).encode().ljust(FILE_BYTES - 1) + b"\n"
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.write(file, text)
        finally:
            os.close(file)


def process_io_bytes() -> int:
    """Bytes that this process has read and written by now, through calls or pages of files; 0 where nobody counts."""
    try:
        with open("/proc/self/io", encoding="ascii") as file:
            counts = dict(line.split(": ") for line in file)
    except (OSError, ValueError):
        return 0
    return sum(int(counts.get(name, 0)) for name in ("rchar", "wchar", "read_bytes", "write_bytes"))
