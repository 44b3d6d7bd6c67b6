"""Which rank of an attempt failed first, and how: ordered by cause, then by time.

When one rank fails, all others fail too: they lose it, or time out. Their errors come later, and
there are more of them. So the error of a rank that failed by itself comes before that of a rank
that lost another one, whatever the clocks of the hosts say. A rank that was killed says nothing:
its heartbeat stops.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lmforge.core.errors import PEER_LOST_PATTERN
from lmforge.core.files.untrusted import open_file
from lmforge.core.records.runs import Run
from lmforge.ops.monitor.heartbeat import MAX_HEARTBEAT_SECONDS
from lmforge.ops.monitor.log_files import LogFile, LogLine
from lmforge.ops.monitor.rank_log import FAILED, PEER_FAILED, TIMED_OUT_PATTERN
from lmforge.ops.monitor.run_status import RUN_ENDED, RankStatus, RunStatus

# A failure is at the end of a log.
TAIL_BYTES = 2**18
MAX_LINES = 200
# How a crash begins in the output of C and C++, of torch, and of Python as it dies of a signal.
CRASH = re.compile(
    r"^(Fatal Python error: |terminate called |Segmentation fault|.*\bCUDA error: |.*: Assertion .*"
    r" failed|\*\*\* Aborted )"
)
STALL = "STALL: "
# A log with a failure, a crash or a stall contains at least one of these words.
CRASH_WORDS = (
    b"Fatal Python error: ",
    b"terminate called ",
    b"Segmentation fault",
    b"CUDA error: ",
    b": Assertion ",
)
MARKS = (FAILED.encode(), STALL.encode(), b"*** Aborted ", *CRASH_WORDS)
CONTEXT_BYTES = 2**13

Kind = Literal["failed", "vanished", "stalled", "lost another rank"]
CAUSES: tuple[Kind, ...] = ("failed", "vanished")


@dataclass(frozen=True)
class Failure:
    """How a rank ended: `lines` as it wrote them, the first of which says where it was."""

    kind: Kind
    time: float
    rank: int
    host: str
    lines: list[str]

    @property
    def headline(self) -> str:
        """Step, phase and error in one line."""
        return self.lines[0].removeprefix(PEER_FAILED).removeprefix(FAILED)


def find_failures(run: Run, attempt: int, status: RunStatus | None = None) -> list[Failure]:
    """The failures in an attempt, the cause first; empty where no rank failed.

    `status`, for the newest attempt, tells of ranks that vanished.
    """
    failures: list[Failure] = []
    for rank, path in run.rank_logs(attempt).items():
        file = LogFile(path, rank)
        if not (count := _bytes_from_first_mark(path)):
            continue
        file.skip_to_last_bytes(count)
        failures += _failures_in(list(file.lines()), rank, file.header()[1])
    if status is not None:
        known = {failure.rank for failure in failures if failure.kind != "stalled"}
        states = ("gone", "silent") if status.state in RUN_ENDED else ("gone",)
        failures += [
            _vanished(rank)
            for rank in status.ranks
            if rank.state in states and rank.rank not in known
        ]
    return sorted(failures, key=_order)


def _bytes_from_first_mark(path: Path) -> int:
    """How many bytes before its end a log has the first mark of a failure, with some before it; 0
    where it has none.

    Searching for a few words is twenty times as fast as parsing the lines, and most of a thousand
    ranks have no failure.
    """
    with open_file(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        content = file.read(TAIL_BYTES)
    offsets = [at for mark in MARKS if (at := content.find(mark)) >= 0]
    if offsets:
        return len(content) - max(0, min(offsets) - CONTEXT_BYTES)
    return 0


def _order(failure: Failure) -> tuple[int, float, int]:
    """The key by which failures are sorted: cause, then the latest time at which the rank can have
    failed. A rank that is killed has written its heartbeat before.
    """
    if failure.kind in CAUSES:
        cause = 0
    elif failure.kind == "stalled":
        cause = 1
    else:
        cause = 2
    return (
        cause,
        failure.time + (MAX_HEARTBEAT_SECONDS if failure.kind == "vanished" else 0.0),
        failure.rank,
    )


def _failures_in(lines: Sequence[LogLine], rank: int, host: str) -> Iterator[Failure]:
    """The failure in a rank's log, and the last stall that it reported."""
    at = next(
        (at for at, line in enumerate(lines) if line.text.startswith((FAILED, PEER_FAILED))), None
    )
    crash = next((at for at, line in enumerate(lines) if CRASH.match(line.text)), None)
    begin = at if at is not None else crash
    if begin is not None:
        texts = [line.text for line in lines[begin : begin + MAX_LINES]]
        if at is not None:
            by_peer = texts[0].startswith(PEER_FAILED)
        else:
            texts = _crashed_thread_first(texts)
            before = lines[: begin + MAX_LINES]
            # NCCL ends a rank that waits too long for another.
            by_peer = any(
                PEER_LOST_PATTERN.search(line.text) or TIMED_OUT_PATTERN.search(line.text)
                for line in before
            )
        yield Failure(
            "lost another rank" if by_peer else "failed", lines[begin].time, rank, host, texts
        )
    stalls = [at for at, line in enumerate(lines) if line.text.startswith(STALL)]
    if stalls:
        indented = lines[stalls[-1] + 1 : stalls[-1] + MAX_LINES]
        end = next(
            (at for at, line in enumerate(indented) if not line.text.startswith(" ")), len(indented)
        )
        texts = [line.text for line in [lines[stalls[-1]], *indented[:end]]]
        yield Failure("stalled", lines[stalls[-1]].time, rank, host, texts)


def _crashed_thread_first(texts: list[str]) -> list[str]:
    """What Python writes as it crashes: the stacks of all threads, that of the thread which crashed
    moved up.
    """
    current = next(
        (at for at, text in enumerate(texts) if text.startswith("Current thread ")), None
    )
    first = next(
        (at for at, text in enumerate(texts) if text.startswith(("Current thread ", "Thread 0x"))),
        None,
    )
    if current is None or first is None:
        return texts
    end = next((at for at in range(current, len(texts)) if not texts[at].strip()), len(texts))
    return [*texts[:first], *texts[current:end], *texts[first:current]]


def _vanished(rank: RankStatus) -> Failure:
    """A rank whose process ended without a message in its log."""
    what = (
        "nothing in its log: killed, out of host memory, or its host is down (process"
        f" {rank.process} is {rank.state})"
    )
    return Failure(
        "vanished",
        rank.heartbeat_time,
        rank.rank,
        rank.host,
        [f"last heartbeat at step {rank.step}, {rank.phase}; {what}"],
    )
