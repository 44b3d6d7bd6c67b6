"""Running a program that a model wrote, in bounded time, memory and reach, and saying what became of it.

The program gets no network, no other process, no file but in a folder of its own that is removed afterwards, no environment
and the standard library only. What shuts these off is in confine.py, who runs and watches it in codeserver.py. Nothing here
protects the checks from the program: they run in one process, so a program written to deceive them can.
"""

import json
import math
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lmforge.cluster.rank_info import read_rank_info, threads_per_rank
from lmforge.errors import UserError

PACKAGE_PARENT = Path(__file__).parents[2]
START_CODE = (
    f"import sys; sys.path.insert(0, {str(PACKAGE_PARENT)!r}); from lmforge.objectives import codeserver; codeserver.main()"
)
REQUIRED_PROTECTIONS = ("network", "processes", "signals", "writing")
# Beyond the time that a program is given: for the server to be scheduled, and to remove what was written.
GRACE_SECONDS = 30.0


@dataclass(frozen=True)
class ProgramResult:
    """What became of a program.

    ended: "done" (it ran and so did the checks), "syntax", "raised", "exit" (it left by itself, before the checks were over),
    "time", "memory", "output" or "files" (more than it may), "killed" (by a signal, such as a crash).
    reached: of "parses", "compiles", "runs", those that it did. passed: for each check, whether it raised nothing.
    error: the last line of the traceback, if any. output: what it printed, cut at the limit. seconds: how long it took.
    """

    status: str
    stages_reached: tuple[str, ...]
    checks_passed: tuple[bool, ...]
    error: str
    output: str
    seconds: float


class Sandbox:
    """`workers` processes that run programs, each one at a time. Use it in a `with`, or close it.

    Raises UserError where this machine cannot shut off the network, processes or files. It may be used from many threads.
    """

    def __init__(self, workers: int = 1):
        self.workers = workers
        self._idle: queue.SimpleQueue[_CodeServerProcess] = queue.SimpleQueue()
        self._servers = [_CodeServerProcess() for _ in range(workers)]
        for server in self._servers:
            self._idle.put(server)
        if not self.protections["reading"]:
            print("generated code can read this user's files here: the kernel has no Landlock", file=sys.stderr)

    @property
    def protections(self) -> dict[str, bool]:
        """What a program tried in vain when the sandbox was opened: network, processes, signals, writing, reading."""
        return self._servers[0].protections

    def run(
        self,
        code: str,
        *,
        checks: Sequence[str] = (),
        seconds: float = 5.0,
        memory_mib: int = 512,
        output_bytes: int = 1 << 16,
    ) -> ProgramResult:
        """Run `code` as a script, then each of `checks`, statements such as "assert f(2) == 4", among the names it left.

        `seconds` is for all together. `memory_mib` counts address space, of which the interpreter itself takes some 30.
        """
        job = {
            "code": code,
            "checks": list(checks),
            "seconds": seconds,
            "memory_mib": memory_mib,
            "output_bytes": output_bytes,
        }
        server = self._idle.get()
        try:
            return server.run(job)
        finally:
            self._idle.put(server)

    def run_all(
        self,
        programs: Sequence[str],
        checks: Sequence[Sequence[str]],
        *,
        seconds: float = 5.0,
        total_seconds: float = math.inf,
        **limits: Any,
    ) -> list[ProgramResult]:
        """The outcomes of several programs, each with its own checks, spread over the workers; limits as for `run`.

        `within` is the seconds for all of them. Each gets its share of what is left of that and `seconds` at most, so that
        some that never end do not take the time of the others; one that finds nothing left ends by "time", not begun.
        """
        deadline = time.monotonic() + total_seconds

        def outcome(number: int, code: str, own: Sequence[str]) -> ProgramResult:
            left = deadline - time.monotonic()
            share = min(seconds, left, left * self.workers / (len(programs) - number))
            if share <= 0:
                return ProgramResult("time", (), (False,) * len(own), "not begun: the time for all was over", "", 0.0)
            return self.run(code, checks=own, seconds=share, **limits)

        with ThreadPoolExecutor(self.workers) as threads:
            return list(threads.map(outcome, range(len(programs)), programs, checks))

    def close(self) -> None:
        """End the workers, and with them whatever runs."""
        for server in self._servers:
            server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *how: object) -> None:
        self.close()


class _CodeServerProcess:
    """One codeserver, and a new one when it is lost."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.protections = self._start()

    def run(self, job: dict[str, Any]) -> ProgramResult:
        if self._process is None:
            self._start()
        assert self._process is not None
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._read_response(job["seconds"] + GRACE_SECONDS)
        except (EOFError, TimeoutError, BrokenPipeError):
            self.close()
            lost = "the process that watched it was lost with it"
            return ProgramResult("killed", (), (False,) * len(job["checks"]), lost, "", job["seconds"])
        if answer["ended"] == "unconfined":
            raise UserError(f"generated code cannot be confined here: {answer['error']}")
        answer["reached"], answer["passed"] = tuple(answer["reached"]), tuple(answer["passed"])
        return ProgramResult(**answer)

    def _start(self) -> dict[str, bool]:
        self._process = subprocess.Popen(
            # No site-packages; not -I, for a fixed seed of hashes makes the same program do the same.
            [sys.executable, "-s", "-S", "-P", "-c", START_CODE, tempfile.gettempdir()],
            env={"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            probe = self._read_response(GRACE_SECONDS * 2)
            shut: dict[str, bool] = json.loads(probe["output"])
        except (EOFError, TimeoutError, ValueError):
            self.close()
            raise UserError("generated code cannot be confined here: it takes Linux on x86-64 or arm64 with seccomp") from None
        if not all(shut[kind] for kind in REQUIRED_PROTECTIONS):
            self.close()
            open_ones = ", ".join(kind for kind in REQUIRED_PROTECTIONS if not shut[kind])
            raise UserError(f"generated code cannot be confined here: the kernel does not shut off {open_ones}")
        return shut

    def _read_response(self, timeout_seconds: float) -> dict[str, Any]:
        """The next answer. EOFError when the server is gone, TimeoutError when it says nothing for so long."""
        assert self._process is not None
        assert self._process.stdout is not None
        at, line = self._process.stdout.fileno(), b""
        poll = select.poll()
        poll.register(at, select.POLLIN)
        while not line.endswith(b"\n"):
            if not poll.poll(timeout_seconds * 1000):
                raise TimeoutError
            piece = os.read(at, 1 << 16)
            if not piece:
                raise EOFError
            line += piece
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):
                    pipe.close()
            try:
                # It hears that its input is closed, ends what runs, and removes its folder.
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._process = None


_shared: Sandbox | None = None
_lock = threading.Lock()


def shared_sandbox() -> Sandbox:
    """One sandbox for this process, with a worker for each of its share of this machine's cores. It ends with the process."""
    global _shared
    with _lock:
        if _shared is None:
            # Each rank has reward functions of its own, which know of the others by the variables of its launcher.
            _shared = Sandbox(threads_per_rank(read_rank_info().local_world_size))
        return _shared
