"""The current step and phase of a rank, for other ranks to read: `health/rank-R.json`, written
every few seconds by a thread.

The training thread sets its step and phase, which takes about a microsecond; the thread decides
when to write. An old phase in a fresh heartbeat is a stall, an old heartbeat is a dead process;
`stall.py` draws these conclusions. The file is overwritten in place by one write, not renamed: on a
file system that many hosts share, a new name every second from each of a thousand ranks is work for
its one metadata server, and old names stay in caches.
"""

import json
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import read_json
from lmforge.core.records.run_records import Count, EpochSeconds, NumRanks, StepNumber

T = TypeVar("T")

# The phase in the file after a rank has ended.
FINAL_PHASES = ("done", "interrupted", "failed")
# The interval between heartbeats; shorter where a stall must be reported sooner.
MAX_HEARTBEAT_SECONDS = 2.0
# The phase while torch compiles, inside of any other phase.
COMPILING = "compiling"
# The maximum delay until a file server shows what another host wrote.
SILENT_AFTER_SECONDS = 10.0
# Longer than any heartbeat. Shorter ones are padded with blanks, so that they overwrite the
# previous one completely.
FILE_BYTES = 512


class PhaseMark(NamedTuple):
    """The current phase: the `phase_number`-th of `step`, since `since` (epoch) and `started`
    (time.perf_counter).
    """

    step: int
    phase_number: int
    phase: str
    since: float
    started: float


@dataclass(frozen=True)
class HeartbeatRecord:
    """The content of the file. Times are in seconds since the epoch.

    number    phases of this step before this one        bytes              what the process has read and written so far
    since     when the phase began                       noticed, reported  whether it has noticed, or reported, a stall
    slow      the phases in which it is a straggler
    """

    rank: Count
    host: str
    process: Count
    step: StepNumber
    number: Count
    phase: str
    since: EpochSeconds
    written: EpochSeconds
    bytes: Count
    noticed: bool
    reported: bool
    world_size: NumRanks = 1
    slow: str = ""


def heartbeat_path(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return folder / f"rank-{rank}.json"


def heartbeat_paths(folder: Path) -> dict[int, Path]:
    """The existing files, by rank."""
    matches = {
        path: re.fullmatch(r"rank-([0-9]{1,7})\.json", path.name)
        for path in folder.glob("rank-*.json")
    }
    return {int(match[1]): path for path, match in matches.items() if match}


def overwrite(path: Path, record: Any, width: int) -> int:
    """Write a dataclass as JSON in place by one write, padded with blanks to `width` bytes.

    Returns how many it has now.
    """
    text = json.dumps(asdict(record)).encode().ljust(width)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644), "wb", buffering=0) as file:
        file.write(text + b"\n")
    return len(text)


def read_overwritten(path: Path, schema: type[T]) -> tuple[float, T] | None:
    """When a file was last overwritten, by its file system's clock, and its content; None where it
    cannot be read.
    """
    for _ in range(3):  # it may be read half-written
        with suppress(UserError, OSError):
            return path.stat().st_mtime, read_json(path, schema)
    return None


class Heartbeat:
    """This rank's heartbeat. `on_phase(phase, step)` is called as each phase is set."""

    def __init__(self, folder: Path, rank: int, world_size: int = 1) -> None:
        self.path = heartbeat_path(folder, rank)
        self.current = PhaseMark(0, 0, "starting", time.time(), time.perf_counter())
        self.stall_noticed = self.stall_reported = False
        # Seconds in each phase since the last log step, without waiting for other ranks.
        self.busy_seconds: dict[str, float] = {}
        self.waited_seconds = 0.0
        self.slow_phases = ""
        self._world_size = world_size
        self._identity = rank, platform.node(), os.getpid()
        self.on_phase: Callable[[str, int], None] | None = None
        # The two longest times of each phase, the shorter first.
        self._longest: dict[str, list[float]] = {}
        self._training_thread = threading.get_ident()
        self._phase_before_compiling = ""

    def set_phase(self, phase: str, step: int) -> None:
        """Set the current phase of this rank; docs/watching.md lists the phases.

        It takes about a microsecond and never fails.
        """
        before = self.current
        clock = time.perf_counter()
        self.current = PhaseMark(
            step, before.phase_number + 1 if step == before.step else 0, phase, time.time(), clock
        )
        seconds = clock - before.started
        name = before.phase
        self._longest[name] = sorted([*self._longest.get(name, (0.0, 0.0)), seconds])[-2:]
        self.busy_seconds[name] = self.busy_seconds.get(name, 0.0) + seconds - self.waited_seconds
        self.waited_seconds = 0.0
        if self.on_phase is not None:
            self.on_phase(phase, step)

    @contextmanager
    def barrier(self) -> Iterator[None]:
        """Context for waiting for other ranks, in which the phase is `barrier`.

        Does nothing in other threads.
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

    def begin_compiling(self, _: object) -> None:
        """The phase is `compiling` from now on.

        With `end_compiling` a callback of torch's compiler, in whatever thread.
        """
        self._phase_before_compiling = self.current.phase
        self.set_phase(COMPILING, self.current.step)

    def end_compiling(self, _: object) -> None:
        """Restore the previous phase."""
        if self.current.phase == COMPILING:
            self.set_phase(self._phase_before_compiling, self.current.step)

    def usual_seconds(self, phase: str) -> float:
        """The second longest time that this phase has taken in this run: the longest may have been
        a stall.
        """
        return self._longest.get(phase, (0.0, 0.0))[0]

    def write(self, final_phase: str | None = None) -> None:
        """Write the file, with `final_phase` in place of the current one.

        OSError where that fails.
        """
        step, number, phase, since, _ = self.current
        phase = final_phase or phase
        written = time.time()
        count = process_io_bytes()
        noticed = self.stall_noticed
        reported = self.stall_reported
        record = HeartbeatRecord(
            *self._identity, step, number, phase, since, written, count, noticed, reported
        )
        overwrite(
            self.path,
            replace(record, world_size=self._world_size, slow=self.slow_phases),
            FILE_BYTES - 1,
        )


def process_io_bytes() -> int:
    """Bytes that this process has read and written so far; 0 where the system does not count
    them.
    """
    try:
        with open("/proc/self/io", encoding="ascii") as file:
            counts = dict(line.split(": ") for line in file)
    except (OSError, ValueError):
        return 0
    return sum(int(counts.get(name, 0)) for name in ("rchar", "wchar", "read_bytes", "write_bytes"))
