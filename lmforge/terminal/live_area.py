"""Lines at the bottom of a terminal that are drawn again and again, while other lines are printed above them.

rich's Live hides the cursor, which a killed process cannot show again, and counts the lines that it wrote, which are more once
the terminal has been made narrower. Here the cursor stays, on the line below, and lines are counted at the present width.
"""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

# Redrawing more often would not be noticed, and would be too much for a terminal behind ssh.
REFRESH_SECONDS = 0.5
# A terminal that becomes narrower wraps longer lines, and a program may draw the next line before it is notified.
MAX_COLUMNS = 79
UP, ERASE_BELOW = "\x1b[{}A", "\x1b[J"


def can_redraw(console: Console) -> bool:
    """Whether it is a terminal that moves its cursor, and shows bars."""
    return console.is_terminal and not console.is_dumb_terminal and console.encoding.lower().startswith("utf")


class LiveArea:
    """Shows the lines that `draw(columns, lines)` returns, which must fit in that many columns and lines, from `start` to
    `stop`.

    A thread draws them where they have changed. What Python prints to the terminal meanwhile appears above them.
    """

    def __init__(self, console: Console, draw: Callable[[int, int], Sequence[Text]]) -> None:
        self._console, self._draw, self._file = console, draw, console.file
        self._lock, self._stopped = threading.RLock(), threading.Event()
        self._shown: list[str] = []
        self._writers: list[Any] = []
        self._shown_columns = 0
        self._stdout = sys.stdout
        self._thread = threading.Thread(target=self._run, name="panel", daemon=True)

    def start(self) -> None:
        if self._stdout is self._file:
            sys.stdout = self.writer(self._file)
        self.refresh()
        self._thread.start()

    def stop(self) -> None:
        """Erase the lines. Prints go to the terminal again."""
        self._stopped.set()
        self._thread.join()
        for writer in self._writers:
            writer.end_line()
        if sys.stdout in self._writers:
            sys.stdout = self._stdout
        with self._lock:
            self._write(self._erasing())
            self._shown = []

    def print(self, text: str) -> None:
        """Write lines above."""
        with self._lock:
            before = self._shown
            self._write(f"{self._erasing()}{text}\n" + "".join(f"{line}\n" for line in before))

    def writer(self, stream: TextIO) -> TextIO:
        """Replaces `stream`, which writes to the same terminal: what is written to it is printed above the area, line by
        line."""
        writer: Any = AreaWriter(self, stream)
        self._writers.append(writer)
        return writer

    def refresh(self) -> None:
        """Draw, if anything has changed."""
        width, height = self._size()
        columns = min(width - 1, MAX_COLUMNS)
        lines = [self._rendered(line, columns) for line in self._draw(columns, height - 1)[: height - 1]]
        with self._lock:
            if lines != self._shown or width != self._shown_columns:
                text = self._erasing() + "".join(f"{line}\n" for line in lines)
                self._shown, self._shown_columns = lines, width
                self._write(text)

    def _rendered(self, line: Text, columns: int) -> str:
        with self._console.capture() as captured:
            self._console.print(line, no_wrap=True, overflow="ellipsis", crop=True, width=columns, end="")
        return captured.get().rstrip()

    def _erasing(self) -> str:
        """Characters that erase what is shown. A terminal that is narrower now has wrapped the longer lines."""
        width, _ = self._size()
        lines = sum(max(1, -(-cell_len(Text.from_ansi(line).plain) // width)) for line in self._shown)
        return f"\r{UP.format(lines)}{ERASE_BELOW}" if lines else ""

    def _size(self) -> tuple[int, int]:
        """The terminal's current columns and lines, whatever COLUMNS was at the start; a terminal may not report them."""
        with suppress(OSError, ValueError):
            columns, lines = os.get_terminal_size(self._file.fileno())
            if columns and lines:
                return columns, lines
        return self._console.size

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # the terminal was closed; the run goes on
            self._file.write(text)
            self._file.flush()

    def _run(self) -> None:
        while not self._stopped.wait(REFRESH_SECONDS):
            self.refresh()


class AreaWriter:
    """A stream of text whose lines are printed above an area."""

    def __init__(self, area: LiveArea, stream: TextIO) -> None:
        self._area, self._stream, self._unfinished = area, stream, ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            lines, newline, self._unfinished = (self._unfinished + text).rpartition("\n")
        if newline:
            self._area.print(lines)
        return len(text)

    def end_line(self) -> None:
        """Print what has not been ended by a newline."""
        if self._unfinished:
            self.write("\n")

    def flush(self) -> None:
        """Lines are printed when they are ended."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
