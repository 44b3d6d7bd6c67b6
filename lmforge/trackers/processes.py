"""The trackers' processes as the training sees them: started with the run, polled at log steps, ended with it. Only `finish`
waits for a tracker, and for a bounded time.
"""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lmforge import registry
from lmforge.errors import UserError
from lmforge.plugins import files_of
from lmforge.python_files import python_command
from lmforge.runs import Run
from lmforge.trackers.follower import FollowerOptions, Report
from lmforge.untrusted import parse_json

# The total time for all trackers to send the end of a run.
FINISH_SECONDS = 30.0
MAX_REPORT_BYTES = 1 << 16  # of a line that a tracker's process says


@dataclass
class _Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path
    received: bytes = b""
    has_ended: bool = False
    is_lost: bool = False

    def read(self) -> list[tuple[str, str]]:
        """Returns (info or problem, text) of each report since the last call, without waiting. Lines that are not reports are
        skipped: a sitecustomize.py or a .pth file may print before our code runs.
        """
        assert self.process.stdout is not None
        with suppress(BlockingIOError):
            # Read once only: a process that prints without end would never be read to the end.
            piece = os.read(self.process.stdout.fileno(), MAX_REPORT_BYTES)
            self.received += piece
            self.has_ended = not piece
        *lines, rest = self.received.split(b"\n")
        self.received = rest[: MAX_REPORT_BYTES + 1]  # a longer line is refused, whatever follows
        messages: list[tuple[str, str]] = []
        for line in lines:
            with suppress(UserError):
                messages += parse_json(line, Report, "", max_bytes=MAX_REPORT_BYTES).items()
        return messages


@dataclass
class TrackerProcesses:
    """The trackers of a run; none on ranks other than 0, and where no names are given.

    `info` and `warn` are called with lines for people, `warn` at most twice for each tracker: when it first fails, and when
    it has not finished in time.
    """

    info: Callable[[str], None]
    warn: Callable[[str], None]
    _children: list[_Child] = field(default_factory=list)
    _is_finishing: bool = False

    def start(self, run: Run, names: Sequence[str], project: str) -> None:
        """Start a process for each tracker. One that cannot be started is reported."""
        folder = run.path / "trackers"
        for name in dict.fromkeys(names):
            paths = str(run.path.absolute()), str(folder.absolute())
            options = FollowerOptions(
                name, files_of([registry.get("tracker", name)]), *paths, project, os.getpid(), 2 * FINISH_SECONDS
            )
            command = python_command("lmforge.trackers.follower", json.dumps(asdict(options)))
            try:
                folder.mkdir(exist_ok=True)
                with open(folder / f"{name}.log", "ab") as log:
                    process = subprocess.Popen(
                        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0, start_new_session=True
                    )
            except OSError as problem:
                self.warn(f"{name} was not started ({problem.strerror}); the run continues without it")
                continue
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
            self._children.append(_Child(name, process, folder / f"{name}.log"))

    def report(self) -> None:
        """Pass on what trackers have said. Does not wait."""
        for child in self._children:
            for kind, text in child.read():
                if kind == "info":
                    self.info(f"{child.name:10} {text}")
                else:
                    self.warn(f"{child.name}: {text}; the run continues, and {child.name} is tried again")
            if child.has_ended and not self._is_finishing:
                self._report_lost(child)

    def _report_lost(self, child: _Child) -> None:
        if not child.is_lost:
            child.is_lost = True
            self.warn(f"{child.name}: its process has ended, see {child.log}; the run continues without it")

    def finish(self, state: str) -> None:
        """Let trackers send the end of the run, for at most FINISH_SECONDS in all; then end their processes."""
        deadline, self._is_finishing = time.monotonic() + FINISH_SECONDS, True
        for child in self._children:
            assert child.process.stdin is not None
            with suppress(OSError):  # it has ended
                child.process.stdin.write(f"{state}\n".encode())
            with suppress(OSError):
                child.process.stdin.close()
        open_children = list(self._children)
        while open_children and time.monotonic() < deadline:
            poll = select.poll()
            for child in open_children:
                assert child.process.stdout is not None
                poll.register(child.process.stdout)
            poll.poll(1000 * max(0.0, deadline - time.monotonic()))
            self.report()
            open_children = [child for child in open_children if not child.has_ended]
        for child in self._children:
            # Its output ends before the process does, which may still wait for its library's threads.
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
            if child.process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(child.process.pid, signal.SIGKILL)
                child.process.wait()
                self.warn(
                    f"{child.name} had not sent everything {FINISH_SECONDS:.0f} s after the end; what is missing is sent"
                    " when the run is resumed"
                )
            elif child.process.returncode:
                self._report_lost(child)
        self._children.clear()
