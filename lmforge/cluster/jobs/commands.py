"""The programs of schedulers: called, and what they refuse as one line."""

import subprocess
from collections.abc import Sequence

from lmforge.errors import UserError
from lmforge.untrusted import cut

COMMAND_SECONDS = 120
MAX_MESSAGE = 400


def call(command: Sequence[str], what: str) -> str:
    """What a command prints. Raises UserError, beginning with `what`, where it fails or is not there."""
    status, printed, message = try_call(command)
    if status != 0:
        raise UserError(f"{what}: {message}")
    return printed


def try_call(command: Sequence[str]) -> tuple[int, str, str]:
    """(status, what it prints, its last line of error) of a command; status 127 where it is not installed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, errors="replace")
    except FileNotFoundError:
        return 127, "", f"{command[0]} is not installed here; submit from a login node of the cluster"
    except subprocess.TimeoutExpired:
        return 124, "", f"{command[0]} has not answered for {COMMAND_SECONDS} s"
    lines = [line.strip() for line in (done.stderr.strip() or done.stdout.strip()).splitlines() if line.strip()]
    # sbatch explains itself in several lines, each with its name.
    message = "; ".join(line.removeprefix(f"{command[0]}: ").removeprefix("error: ") for line in lines[-3:])
    return done.returncode, done.stdout, cut(message, MAX_MESSAGE) or f"{command[0]} ended with status {done.returncode}"
