"""Reads the logs of ranks: in pieces of bounded size, from the end or as they grow, and merged by
time.

A line of a log begins with its time (`rank_log.py`). What libraries in C write has none: it counts
as written when the line before it was, or, at the end of the file, when the file was last changed.
No file stays open between two reads, so that a thousand ranks need no thousand descriptors.
"""

import heapq
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from lmforge.core.files.untrusted import open_file
from lmforge.ops.terminal.cells import clean

CHUNK_BYTES = 2**16
# A longer line is read as several.
MAX_LINE_BYTES = 2**14
STAMP = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d) ?")
# Sequences that move the cursor or colour text of a terminal.
ESCAPES = re.compile(r"\x1b(?:\[[0-9;:?<=>]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
HEADER = re.compile(r"attempt \d+, rank \d+ of (\d+) on (\S+), process (\d+)")


class LogLine(NamedTuple):
    """A line: seconds since the epoch, rank, number in its file, printable text. Sorted by time."""

    time: float
    rank: int
    number: int
    text: str


def printable(line: bytes) -> str:
    """A line as text that is safe to print on a terminal: without escape sequences, other control
    characters as dots.

    Where carriage returns overwrote text, as in a progress bar, the last state is left.
    """
    text = line.decode("utf-8", errors="replace").rstrip("\r\n")
    if text.isprintable():
        return text
    states = [state for state in ESCAPES.sub("", text).split("\r") if state.strip()]
    text = (states[-1] if states else "").expandtabs(4)
    return clean(text)


@dataclass
class LogFile:
    """One rank's log.

    `read` returns what follows the last read; `skip_to_tail` begins near the end.
    """

    path: Path
    rank: int
    _offset: int = 0
    _number: int = 0
    # The time of the last line that has one; 0 before that.
    _time: float = 0.0

    def skip_to_tail(self, num_lines: int) -> None:
        """Make the next read begin with the last `num_lines` lines.

        Reads backwards, only as far as needed.
        """
        with open_file(self.path) as file:
            # The last line's own end is one of them.
            offset = file.seek(0, os.SEEK_END)
            missing = num_lines + 1
            while offset > 0 and missing > 0:
                begin = max(0, offset - CHUNK_BYTES)
                file.seek(begin)
                chunk = file.read(offset - begin)
                while missing > 0 and (at := chunk.rfind(b"\n")) >= 0:
                    missing -= 1
                    chunk = chunk[:at]
                offset = begin if missing else begin + len(chunk) + 1
        self._offset = offset if missing == 0 else 0

    def skip_to_last_bytes(self, count: int) -> None:
        """Make the next read begin with the first complete line of the last `count` bytes."""
        if (offset := os.path.getsize(self.path) - count) > 0:
            with open_file(self.path) as file:
                file.seek(offset)
                file.readline(MAX_LINE_BYTES)
                self._offset = file.tell()

    def read(self, *, to_the_end: bool = True) -> list[LogLine] | None:
        """The lines of the next piece of the file; None where there is nothing more.

        A last line without an end is left for later, unless this is `to_the_end` and nothing
        follows.
        """
        with open_file(self.path) as file:
            if os.fstat(file.fileno()).st_size < self._offset:  # it was replaced
                self._offset = 0
            file.seek(self._offset)
            content = file.read(CHUNK_BYTES)
            changed = os.fstat(file.fileno()).st_mtime
            is_last = len(content) < CHUNK_BYTES
        lines = content.split(b"\n")
        rest = lines.pop()
        if rest and (len(rest) > MAX_LINE_BYTES or (to_the_end and is_last)):
            lines.append(rest)
            rest = b""
        if len(content) == len(rest):
            return None
        self._offset += len(content) - len(rest)
        before = self._time
        parsed = [
            line
            for complete in lines
            for begin in range(0, len(complete) or 1, MAX_LINE_BYTES)
            for line in self._parse(complete[begin : begin + MAX_LINE_BYTES])
        ]
        stamped = [line.time for line in parsed if line.time]
        # Where reading begins between two times, the later one.
        seconds = before or (stamped[0] if stamped else changed)
        result = []
        for line in parsed:
            if line.time:
                seconds = line.time
                stamped.pop(0)
            elif is_last and not stamped:
                seconds = max(seconds, changed)
            result.append(line._replace(time=seconds))
        self._time = seconds if result else before
        return result

    def _parse(self, line: bytes) -> list[LogLine]:
        """The line, with time 0 if it has none; nothing for zero bytes, which a crash of the host
        leaves in a file.
        """
        if line and not line.strip(b"\0"):
            return []
        seconds = 0.0
        if stamp := STAMP.match(line):
            try:
                # Clocks may be set back, but the lines of a file are in the order of writing.
                seconds = max(self._time, datetime.fromisoformat(stamp[1].decode()).timestamp())
            except (ValueError, OverflowError, OSError):
                stamp = None
        self._time = seconds or self._time
        self._number += 1
        return [
            LogLine(
                seconds, self.rank, self._number, printable(line[stamp.end() :] if stamp else line)
            )
        ]

    def lines(self) -> Iterator[LogLine]:
        """All lines that follow, read piece by piece."""
        while (piece := self.read()) is not None:
            yield from piece

    def header(self) -> tuple[int, str]:
        """(number of ranks, host) from the first line of the file; (0, "") where it does not
        say.
        """
        with open_file(self.path) as file:
            first = printable(STAMP.sub(b"", file.readline(MAX_LINE_BYTES), count=1))
        match = HEADER.fullmatch(first)
        if match:
            return (int(match[1]), match[2])
        return (0, "")


def merged(files: Sequence[LogFile]) -> Iterator[LogLine]:
    """The lines of all files in the order of time."""
    return heapq.merge(*(file.lines() for file in files))


def tail(files: Sequence[LogFile], num_lines: int) -> list[LogLine]:
    """The last `num_lines` lines of all files together, in the order of time.

    Reads only the end of each.
    """
    last: list[LogLine] = []
    for file in files:
        file.skip_to_tail(num_lines)
        last = heapq.nlargest(num_lines, [*last, *file.lines()])
    return sorted(last)


def format_clock(seconds: float) -> str:
    """The time of day with milliseconds, where this is read."""
    return f"{time.strftime('%H:%M:%S', time.localtime(seconds))}.{int(seconds % 1 * 1000):03d}"
