"""Running programs that a model wrote, with bounded time, memory and access, and reporting what
became of them.

A program gets no network, no other process, no files but those in a folder of its own, which is
deleted afterwards, no environment variables, and the standard library only; the site-packages
inside that library's folder can be read, and imported by a program that adds them to its path.
confinement.py takes these away; code_server.py runs and watches programs. Nothing here protects the
checks from the program: both run in one process, so a program written to deceive them can. It can
make its own result wrong, but that is all: not end the training, and not harm the server that
watches it.
"""

import json
import math
import queue
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

from lmforge.core.distributed.rank_info import read_rank_info, threads_per_rank
from lmforge.core.errors import UserError
from lmforge.core.foreign_code import JsonLineProcess, ProcessLost, python_command

REQUIRED_PROTECTIONS = ("network", "processes", "signals", "writing")
# Beyond the time that a program is given: for the server to be scheduled, and to delete what was
# written.
GRACE_SECONDS = 30.0
CLOSE_SECONDS = 5.0


@dataclass(frozen=True)
class ProgramResult:
    """What became of a program.

    status: "done" (program and checks ran), "syntax", "raised", "exit" (it ended itself before the
    checks were over), "time", "memory", "output" or "files" (more than allowed), "killed" (by a
    signal, such as a crash, or for its threads). stages_reached: those of "parses", "compiles",
    "runs" that succeeded. checks_passed: for each check, whether it raised nothing. error: the last
    line of the traceback, if any. output: what it printed, truncated at the limit. seconds: its
    time.
    """

    status: str
    stages_reached: tuple[str, ...]
    checks_passed: tuple[bool, ...]
    error: str
    output: str
    seconds: float


class Sandbox(AbstractContextManager["Sandbox"]):
    """`workers` processes that run programs, each one at a time. Use it in a `with`, or close it.

    Thread-safe. Raises UserError if this machine cannot take away the network, processes or files.
    `protections` is what a program tried in vain when the sandbox was opened: network, processes,
    signals, writing, reading.
    """

    def __init__(self, workers: int = 1):
        self.workers = workers
        self._idle: queue.SimpleQueue[_CodeServerProcess] = queue.SimpleQueue()
        self._servers = [_CodeServerProcess() for _ in range(workers)]
        for server in self._servers:
            self._idle.put(server)
        self.protections = self._servers[0].protections
        if not self.protections["reading"]:
            print("generated code can read this user's files here: the kernel has no Landlock", file=sys.stderr)

    def run(self, code: str, *, checks: Sequence[str] = (), seconds: float = 5.0, memory_mib: int = 512) -> ProgramResult:
        """Run `code` as a script, then each of `checks`, statements such as "assert f(2) == 4", in
        its global names.

        `seconds` is for program and checks together. `memory_mib` limits address space; the
        interpreter takes about 30.
        """
        server = self._idle.get()
        try:
            return server.run({"code": code, "checks": list(checks), "seconds": seconds, "memory_mib": memory_mib})
        finally:
            self._idle.put(server)

    def run_all(
        self, programs: Sequence[str], checks: Sequence[Sequence[str]], *, seconds: float = 5.0, total_seconds: float = math.inf
    ) -> list[ProgramResult]:
        """The results of several programs, each with its own checks, in their order; the workers
        share them.

        `total_seconds` is for all of them. Each gets an equal part of what is left of it, `seconds`
        at most, so that programs that never end do not take the time of the others. Those that are
        not begun in time get the status "time".
        """
        deadline = time.monotonic() + total_seconds

        def run_one(number: int, code: str, own_checks: Sequence[str]) -> ProgramResult:
            left = deadline - time.monotonic()
            allowed = min(seconds, left, left * self.workers / (len(programs) - number))
            if allowed <= 0:
                return ProgramResult("time", (), (False,) * len(own_checks), "not started: no time was left", "", 0.0)
            return self.run(code, checks=own_checks, seconds=allowed)

        with ThreadPoolExecutor(self.workers) as threads:
            return list(threads.map(run_one, range(len(programs)), programs, checks))

    def close(self) -> None:
        """End the workers and the programs that they run."""
        for server in self._servers:
            server.close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _CodeServerProcess:
    """A code_server.py process, replaced by a new one when it is lost."""

    def __init__(self) -> None:
        self._start()

    def run(self, job: dict[str, Any]) -> ProgramResult:
        if self._process.closed:
            self._start()
        try:
            result = self._process.request(job, job["seconds"] + GRACE_SECONDS)
        except (ProcessLost, TimeoutError):
            error = "its supervising process ended too"
            return ProgramResult("killed", (), (False,) * len(job["checks"]), error, "", job["seconds"])
        if result["status"] == "unconfined":
            raise UserError(f"generated code cannot be confined here: {result['error']}")
        sequences = {name: tuple(result[name]) for name in ("stages_reached", "checks_passed")}
        return ProgramResult(**{**result, **sequences})

    def _start(self) -> None:
        # No site-packages. Not -I, which ignores the hash seed: the same program has to do the same
        # each time.
        command = python_command("lmforge.post.rewards.code_server", tempfile.gettempdir(), "-s", "-S")
        environment = {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
        # When its input is closed it kills the program that it runs and deletes its folder.
        self._process = JsonLineProcess(command, environment, CLOSE_SECONDS)
        try:
            self.protections: dict[str, bool] = json.loads(self._process.receive(GRACE_SECONDS * 2)["output"])
        except (ProcessLost, TimeoutError, ValueError):
            self.close()
            raise UserError("generated code cannot be confined here: it takes Linux on x86-64 or arm64 with seccomp") from None
        if missing := [name for name in REQUIRED_PROTECTIONS if not self.protections[name]]:
            self.close()
            raise UserError(f"generated code cannot be confined here: the kernel does not shut off {', '.join(missing)}")

    def close(self) -> None:
        self._process.close()


@cache
def shared_sandbox() -> Sandbox:
    """The one sandbox of this process, with a worker for each core that this rank may use.

    It ends with the process.
    """
    # Reward functions run in a process of each rank, which knows of the other ranks from its
    # launcher's variables.
    return Sandbox(threads_per_rank(read_rank_info().local_world_size))
