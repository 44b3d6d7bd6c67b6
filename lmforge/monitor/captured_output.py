"""Captures what C libraries and child processes write while a panel is on the terminal. They write to descriptors 1 and 2
directly, and the panel would overwrite it. So these descriptors are redirected to the rank's log, from which the lines to show
are read. A pipe would lose the last words of a process that crashes, and block a library that writes more than it holds, where
the reader waits for the interpreter lock that the library has.
"""

import os
import sys
from pathlib import Path
from typing import TextIO

from lmforge.monitor.log_files import STAMP, printable


class CapturedOutput:
    """Standard output and error, where they are terminals, go to the log at `path` until `close`.

    `sys.stdout` writes to the terminal all the same. `sys.stderr` is for the caller to redirect (`redirect_terminal`).
    """

    def __init__(self, path: Path) -> None:
        self._log = open(path, "rb")  # noqa: SIM115 - closed by `close`
        self._log.seek(0, os.SEEK_END)
        self._unfinished = b""
        self._stdout, self._terminal = sys.stdout, sys.stdout
        self._originals: dict[int, int] = {}
        log = os.open(path, os.O_WRONLY | os.O_APPEND)
        for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
            if _is_terminal(stream, descriptor):
                stream.flush()
                self._originals[descriptor] = os.dup(descriptor)
                os.dup2(log, descriptor)
        os.close(log)
        if 1 in self._originals:
            encoding, errors = self._stdout.encoding, self._stdout.errors
            self._terminal = open(os.dup(self._originals[1]), "w", encoding=encoding, errors=errors, buffering=1)  # noqa: SIM115
            sys.stdout = self._terminal

    def take_lines(self) -> list[str]:
        """The complete lines since the last call that have no time stamp yet, as text that is safe to print on a terminal."""
        *lines, self._unfinished = (self._unfinished + self._log.read()).split(b"\n")
        return [printable(line) for line in lines if not STAMP.match(line)]

    def close(self) -> list[str]:
        """Restore the descriptors and `sys.stdout`. Returns the lines that have not been taken yet, complete or not."""
        for descriptor, original in self._originals.items():
            os.dup2(original, descriptor)
            os.close(original)
        if self._terminal is not self._stdout:
            if sys.stdout is self._terminal:
                sys.stdout = self._stdout
            self._terminal.close()
        lines = self.take_lines()
        self._log.close()
        return lines + ([printable(self._unfinished)] if self._unfinished else [])


def _is_terminal(stream: TextIO, descriptor: int) -> bool:
    try:
        return stream.fileno() == descriptor and os.isatty(descriptor)
    except (OSError, ValueError, AttributeError):  # a stream in memory, or none
        return False
