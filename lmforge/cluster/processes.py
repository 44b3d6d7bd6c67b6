"""Other processes: calls of scheduler and MPI programs with a time limit, and information from /proc."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lmforge.errors import UserError
from lmforge.untrusted import cut

COMMAND_SECONDS = 120
MAX_MESSAGE = 400
# Statuses of a shell for a program that is not installed, and of `timeout` for one that has not ended in time.
NOT_INSTALLED, NO_ANSWER = 127, 124


def call(command: Sequence[str], what: str) -> str:
    """The output of a command. Raises UserError, beginning with `what`, where it fails or is not installed."""
    status, printed, message = try_call(command)
    if status != 0:
        raise UserError(f"{what}: {message}")
    return printed


def try_call(command: Sequence[str]) -> tuple[int, str, str]:
    """(status, what it prints, its last line of error) of a command; NOT_INSTALLED and NO_ANSWER are statuses too."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, errors="replace")
    except FileNotFoundError:
        return NOT_INSTALLED, "", f"{command[0]} is not installed here; use a login node of the cluster"
    except subprocess.TimeoutExpired:
        return NO_ANSWER, "", f"{command[0]} has not answered for {COMMAND_SECONDS} s"
    lines = [line.strip() for line in (done.stderr.strip() or done.stdout.strip()).splitlines() if line.strip()]
    # sbatch explains itself in several lines, each with its name.
    message = "; ".join(line.removeprefix(f"{command[0]}: ").removeprefix("error: ") for line in lines[-3:])
    return done.returncode, done.stdout, cut(message, MAX_MESSAGE) or f"{command[0]} ended with status {done.returncode}"


@dataclass(frozen=True)
class ProcessStat:
    """A process as in /proc: the letter of its state, its parent, and its start time in clock ticks since boot."""

    state: str
    parent: int
    started: str


def read_process_stat(process: int) -> ProcessStat | None:
    """A process from /proc; None where it has ended, or the system has no /proc."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # before it is the name of the command, which may contain any characters
    return ProcessStat(fields[0], int(fields[1]), fields[19])
