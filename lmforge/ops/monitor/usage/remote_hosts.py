"""The usage of other hosts.

A separate thread queries each host, so that a slow or lost host does not delay the others. It runs
`lmforge top --output json` there, over ssh or as a step of a Slurm job, which prints a line every
few seconds. The last answer of a host is kept with its time.
"""

import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from pydantic import BaseModel

from lmforge.core.distributed.processes import call
from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import cut, parse_json
from lmforge.ops.monitor.usage.host import STALE_SECONDS, HostUsage

# An answer of a host: some 300 bytes per GPU or process.
MAX_ANSWER_BYTES = 2**20
RECONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class HostAnswer:
    """The state of a host: its last usage, if it ever answered, the age of that, and why it does
    not answer now.
    """

    name: str
    usage: HostUsage | None
    age_seconds: float | None = None
    error: str = ""

    @property
    def is_stale(self) -> bool:
        """Whether its last usage is missing or old, or the host does not answer."""
        return self.usage is None or bool(self.error) or (self.age_seconds or 0.0) > STALE_SECONDS


class RemoteOutput(BaseModel, extra="ignore"):
    """The part of the output of `top --output json` that is read here."""

    hosts: list[HostAnswer]


def srun_words(job: int, host: str, line: str) -> list[str]:
    """The command that runs a shell line on a host of a Slurm job, besides the job's own steps."""
    step = ["--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--gres=none", "--quiet"]
    return ["srun", f"--jobid={job}", *step, "sh", "-c", line]


def slurm_hosts(job: int) -> list[str]:
    """The hosts of a running Slurm job. Raises UserError."""
    option = "--slurm_job"
    names = call(
        ["squeue", "--noheader", f"--jobs={job}", "--states=RUNNING", "--format=%N"],
        f"{option}: squeue",
    ).strip()
    if not names:
        raise UserError(f"{option}: job {job} does not run")
    return call(["scontrol", "show", "hostnames", names], f"{option}: scontrol").split()


def remote_line(remote_command: str | None, *, once: bool) -> str:
    """The shell line that is run on a host: one sample, or one after another."""
    lmforge = remote_command or shlex.join([sys.executable, "-m", "lmforge"])
    return f"{lmforge} top --output json{' --once' if once else ''}"


class RemoteHost:
    """A host that is queried with the command `words` in a thread until `close`; repeatedly if
    `repeats`.
    """

    def __init__(self, name: str, words: Sequence[str], *, repeats: bool) -> None:
        self.name = name
        self._words = list(words)
        self._repeats = repeats
        self._usage: HostUsage | None = None
        self._error = ""
        self._closed = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._answered = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"host {name}", daemon=True)
        self._thread.start()

    def answer(self) -> HostAnswer:
        """The last answer of the host."""
        # By our clock: that of the host may be wrong.
        age = time.monotonic() - self._answered
        waiting = ""
        if self._usage is None:
            waiting = f"no answer for {age:.0f} s"
        return HostAnswer(
            self.name, self._usage, None if self._usage is None else age, self._error or waiting
        )

    def wait(self, seconds: float) -> None:
        """Wait for the end of a single question, no longer than `seconds`."""
        self._thread.join(max(0.0, seconds))

    def close(self) -> None:
        """Stop querying. The remote command ends, since its output is no longer read."""
        self._closed.set()
        if self._process is not None:
            self._process.kill()

    def _run(self) -> None:
        while True:
            with tempfile.TemporaryFile() as errors:
                self._error = self._ask(errors)
            if not self._repeats or self._closed.wait(RECONNECT_SECONDS):
                return

    def _ask(self, errors: IO[bytes]) -> str:
        """Read answers until there are no more. Returns why there are none now."""
        try:
            self._process = subprocess.Popen(
                self._words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        except OSError as problem:
            return f"{self._words[0]}: {os.strerror(problem.errno or 0)}"
        with self._process as process:
            if self._closed.is_set():
                process.kill()
            assert process.stdout
            while line := process.stdout.readline(MAX_ANSWER_BYTES):
                if line.startswith(b"{"):  # and no greeting of a login shell
                    self._take(line)
        status = process.returncode
        if status == 0 and self._usage is not None and not self._repeats:
            return ""
        unsaid = "its answer is not that of lmforge top"
        if status:
            unsaid = f"ended with status {status}"
        return _last_line(errors) or unsaid

    def _take(self, line: bytes) -> None:
        with suppress(UserError):
            output = parse_json(line, RemoteOutput, self.name, max_bytes=MAX_ANSWER_BYTES)
            if output.hosts and output.hosts[0].usage is not None:
                self._usage = output.hosts[0].usage
                self._error = ""
                self._answered = time.monotonic()


def _last_line(errors: IO[bytes]) -> str:
    """The last line that a command wrote to standard error, which is this file."""
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - 1000))
    lines = errors.read().decode(errors="replace").strip().splitlines()
    if lines:
        return cut(lines[-1])
    return ""
