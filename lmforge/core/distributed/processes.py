"""Signals that stop a run; calls of scheduler and MPI programs with a time limit; information from
/proc.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import cut

# Requests to save and end: of a terminal (Ctrl-C, closed), of a container or `kill`, and of
# schedulers before a time limit (docs/clusters.md has the table). Ctrl-\\ is not one: it ends a
# process at once. macOS lacks the last two.
STOP_SIGNALS: tuple[int, ...] = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
)
if sys.platform == "linux":
    STOP_SIGNALS += signal.SIGPWR, signal.SIGRTMIN + 3
INTERRUPTED_STATUSES = [128 + number for number in STOP_SIGNALS]
# Where ranks read the signal that their launcher got and has passed on as SIGTERM.
SIGNAL_FILE_VARIABLE = "LMFORGE_SIGNAL_FILE"
COMMAND_SECONDS = 120
MAX_MESSAGE = 400
# Statuses of a shell for a program that is not installed, and of `timeout` for one that has not
# ended in time.
NOT_INSTALLED = 127
NO_ANSWER = 124
Handler = Callable[[int, FrameType | None], object]


def handle_signals(numbers: Sequence[int], handler: Handler) -> dict[int, Any]:
    """Install a handler of signals.

    Returns the previous ones, for `restore_signals`. SIGHUP stays ignored under nohup.
    """
    spared = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    return {number: signal.signal(number, handler) for number in numbers if number not in spared}


def restore_signals(handlers: Mapping[int, Any]) -> None:
    """Install the handlers that were there before `handle_signals`."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


def signal_name(number: int) -> str:
    """The name of a signal, such as SIGTERM or SIGRTMIN+3."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"


def read_passed_on(number: int) -> int:
    """The signal that a launcher of lmforge got, where this is the SIGTERM that it sends for it;
    else `number`.
    """
    if number == signal.SIGTERM and (path := os.environ.get(SIGNAL_FILE_VARIABLE)):
        with suppress(OSError, ValueError):  # the launcher was killed, or passes on nothing
            return int(Path(path).read_text())
    return number


def call(command: Sequence[str], what: str) -> str:
    """The output of a command.

    Raises UserError, beginning with `what`, where it fails or is not installed.
    """
    status, printed, message = try_call(command)
    if status != 0:
        raise UserError(f"{what}: {message}")
    return printed


def try_call(command: Sequence[str]) -> tuple[int, str, str]:
    """(status, what it prints, its last line of error) of a command; NOT_INSTALLED and NO_ANSWER
    are statuses too.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_SECONDS, errors="replace"
        )
    except FileNotFoundError:
        return (
            NOT_INSTALLED,
            "",
            f"{command[0]} is not installed here; use a login node of the cluster",
        )
    except subprocess.TimeoutExpired:
        return NO_ANSWER, "", f"{command[0]} has not answered for {COMMAND_SECONDS} s"
    lines = [
        line.strip()
        for line in (done.stderr.strip() or done.stdout.strip()).splitlines()
        if line.strip()
    ]
    # sbatch explains itself in several lines, each with its name.
    message = "; ".join(
        line.removeprefix(f"{command[0]}: ").removeprefix("error: ") for line in lines[-3:]
    )
    return (
        done.returncode,
        done.stdout,
        cut(message, MAX_MESSAGE) or f"{command[0]} ended with status {done.returncode}",
    )


@dataclass(frozen=True)
class ProcessStat:
    """A process as in /proc: the letter of its state, its parent, and its start time in clock ticks
    since boot.
    """

    state: str
    parent: int
    started: str


def read_process_stat(process: int) -> ProcessStat | None:
    """A process from /proc; None where it has ended, or the system has no /proc."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # Before it is the name of the command, which may contain any characters.
    fields = text.rpartition(")")[2].split()
    return ProcessStat(fields[0], int(fields[1]), fields[19])
