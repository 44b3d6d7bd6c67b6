"""The log of a rank in one attempt, `logs/attempt-1/rank-3.log`: every line with its time, and how
the rank failed.

The first line says where the rank runs. Ranks other than 0 print to their log, also what libraries
in C write. Rank 0 prints to the terminal; what it writes to standard error is in its log too, and
beside a panel what libraries in C write (`console.py`). `log_files.py` reads logs and `failures.py`
says which rank failed first.
"""

import faulthandler
import io
import os
import platform
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from lmforge.core.distributed.rank_info import RankInfo
from lmforge.core.errors import PEER_LOST_PATTERN, PeerLost

# Prefixes of the line about a rank's failure: by itself, or because of another rank.
FAILED = "FAILED at "
PEER_FAILED = "PEER FAILED at "
# Their messages when the other rank does not join: the rank that prints it waited for another.
TIMED_OUT_PATTERN = re.compile(
    r"Timed out waiting|[Ww]ait timeout|[Cc]ollective operation timeout|[Ss]ocket [Tt]imeout"
)


def stamp_lines(text: str) -> str:
    """Lines of text, each prefixed with the current time; the last one ends with a newline."""
    now = _now()
    return "".join(f"{now} {line}\n" for line in text.removesuffix("\n").split("\n"))


def _now() -> str:
    """The time with milliseconds and the offset from UTC: hosts may be in different time zones."""
    return datetime.now().astimezone().isoformat(timespec="milliseconds")


def is_caused_by_peer(problem: BaseException) -> bool:
    """Whether a rank failed because another one failed or did not join, so that it is not the
    cause.
    """
    if isinstance(problem, PeerLost) or getattr(problem, "raised_on_peer", False):
        return True
    text = str(problem)
    return isinstance(problem, RuntimeError) and bool(
        PEER_LOST_PATTERN.search(text) or TIMED_OUT_PATTERN.search(text)
    )


class StampedFile(io.TextIOWrapper):
    """A text file that puts the time before each line. Threads may write to it."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._is_at_line_start = True
        file = open(path, "ab")  # noqa: SIM115 - closed with this one
        super().__init__(file, encoding="utf-8", errors="backslashreplace", line_buffering=True)

    def write(self, text: str) -> int:
        with self._lock:
            for line in re.findall(r"[^\n]*\n|[^\n]+", text):
                super().write(f"{_now()} {line}" if self._is_at_line_start else line)
                self._is_at_line_start = line.endswith("\n")
        return len(text)


class Output:
    """Standard output or error (`number` 1 or 2) of work that goes on where nothing reads it: what
    the reader, terminal or file does not take any more is dropped. That is said once: in the rank's
    `log`, where errors are too, or on standard error.

    `terminal` is None for a stream that is closed, or another Output, whose place this one takes.
    """

    def __init__(
        self, terminal: "TextIO | Output | None", number: int, log: StampedFile | None = None
    ) -> None:
        self._log = log
        self._number = number
        self._lost = ""
        if isinstance(terminal, Output):
            self._lost = terminal._lost
            terminal = terminal.original
        elif terminal is None:
            self._lost, terminal = "closed", open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        self.original: TextIO = terminal
        self.terminal = terminal
        if self._lost and log is not None:
            self._say_lost()

    def write(self, text: str) -> int:
        if self._number == 2:
            self._write_log(text)
        return self.write_past_log(text)

    def write_past_log(self, text: str) -> int:
        with self._dropping():
            self.terminal.write(text)
        return len(text)

    def flush(self) -> None:
        with self._dropping():
            self.terminal.flush()

    def _write_log(self, text: str) -> None:
        if self._log is not None:
            with suppress(OSError, ValueError):  # a full disk; a log that is closed
                self._log.write(text)

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            is_known = self._lost
            self._lost = problem.strerror or "lost"
            with open(os.devnull, "w") as nowhere, suppress(OSError, ValueError):
                os.dup2(nowhere.fileno(), self.terminal.fileno())
            if not is_known:
                self._say_lost()

    def _say_lost(self) -> None:
        what = "standard output"
        if self._number == 2:
            what = "standard error"
        if self._log is not None:
            self._write_log(
                f"{what}: {self._lost}; from now on it is written to this log only; the run goes"
                " on\n"
            )
        elif self._number == 1:
            with suppress(OSError):
                print(
                    f"lmforge: {what}: {self._lost}; nothing more is printed there; the work"
                    " goes on",
                    file=sys.stderr,
                )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terminal, name)


@contextmanager
def losing_output(keeps_stdout: bool = False) -> Iterator[None]:
    """A context in which output that nothing takes is dropped, for work that goes on without it.

    With `keeps_stdout` a standard output that is open stays as it is: what it does not take is an
    error.
    """
    before = sys.stdout, sys.stderr
    if sys.stdout is None or not keeps_stdout:
        sys.stdout = Output(sys.stdout, 1)
    sys.stderr = Output(sys.stderr, 2)
    during = sys.stdout, sys.stderr
    try:
        yield
    finally:
        if (sys.stdout, sys.stderr) == during:  # a rank goes on printing to its log
            sys.stdout, sys.stderr = before


def redirect_terminal(stream: TextIO, replace: Callable[[TextIO], TextIO] | None) -> None:
    """What rank 0 writes to `stream`, its `sys.stdout` or `sys.stderr`, goes to `replace(terminal)`
    from now on; None: to the terminal.
    """
    if isinstance(stream, Output):
        stream.terminal = replace(stream.original) if replace else stream.original


def print_past_log(line: str) -> None:
    """A line on standard error that the log has already."""
    write = sys.stderr.write_past_log if isinstance(sys.stderr, Output) else sys.stderr.write
    write(f"{line}\n")
    sys.stderr.flush()


def write_to_terminal(text: str) -> None:
    """Write to the launcher's standard error, which a rank has even where its output goes to a
    file.
    """
    if isinstance(sys.stderr, Output) and sys.stderr.terminal is not sys.stderr.original:
        sys.stderr.write_past_log(text)
        return
    os.write(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2, text.encode())


class RankLog:
    """The log of this rank, at `path`, from now on until `close`.

    Raises OSError where it cannot be opened.
    """

    def __init__(self, path: Path, rank_info: RankInfo, attempt: int) -> None:
        self.path = path
        self._file = StampedFile(path)
        rank = rank_info.rank
        world_size = rank_info.world_size
        self._file.write(
            f"attempt {attempt}, rank {rank} of {world_size} on {platform.node()}, process"
            f" {os.getpid()}\n"
        )
        # A rank that crashes in C writes its Python stacks, unless the user has said where.
        self._reports_crashes = not faulthandler.is_enabled()
        if self._reports_crashes:
            faulthandler.enable(self._file, all_threads=True)
        self._stdout = sys.stdout
        self._stderr = sys.stderr
        sys.stdout = Output(sys.stdout, 1, self._file)
        sys.stderr = Output(sys.stderr, 2, self._file)
        if not rank_info.is_rank0:
            self._take_output()

    def _take_output(self) -> None:
        """Send all output of this process to the log, apart from `sys.__stdout__` and
        `sys.__stderr__`: they stay what they were, for the few lines of this rank that are for the
        terminal.
        """
        for descriptor, name in ((1, "__stdout__"), (2, "__stderr__")):
            stream = getattr(sys, name)
            if stream is not None and stream.fileno() == descriptor:
                stream.flush()
                copy = open(  # noqa: SIM115
                    os.dup(descriptor),
                    "w",
                    encoding="utf-8",
                    errors="backslashreplace",
                    buffering=1,
                )
                setattr(sys, name, copy)
            os.dup2(self._file.fileno(), descriptor)
        sys.stdout = sys.stderr = self._file

    def write(self, line: str) -> None:
        """A line that is in the log alone."""
        self._file.write(f"{line}\n")

    def write_failure(self, problem: BaseException, progress: str) -> None:
        """Write that this rank failed at `progress`, with the traceback, and whether another rank
        caused it.

        The exception's `log_path` is this log from then on. A disk that is full does not hide the
        failure.
        """
        beginning = PEER_FAILED if is_caused_by_peer(problem) else FAILED
        what = " ".join(traceback.format_exception_only(problem)[-1].split())
        with suppress(OSError, ValueError):
            lines = "".join(traceback.format_exception(problem)).splitlines()
            # Without the marks below each call.
            calls = [line for line in lines if line.strip(" ^~")]
            self._file.write("\n".join([f"{beginning}{progress}: {what}", *calls, ""]))
            problem.log_path = self.path  # type: ignore[attr-defined]

    def close(self) -> None:
        """Restore what rank 0 writes to, and crash reports.

        Ranks other than 0 go on printing to their log.
        """
        if self._reports_crashes:
            faulthandler.disable()
        if isinstance(sys.stderr, Output):
            sys.stdout = self._stdout
            sys.stderr = self._stderr
            self._file.close()
