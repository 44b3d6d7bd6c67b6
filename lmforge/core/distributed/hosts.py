"""Hosts: the file that names them, and running a few lines of shell on each of them at once, by ssh
or on this machine.
"""

import fnmatch
import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lmforge.core.errors import UserError, name_some
from lmforge.core.files.untrusted import cut, describe_os_error, quoted, read_bounded

SSH_SECONDS = 60
CONNECT_SECONDS = 10
# A connection that has died is noticed after three of these.
KEEPALIVE_SECONDS = 5
MAX_HOSTS_BYTES = 2**20
MAX_HOSTS = 10_000
# Variables of libraries and trackers that a run may need; * matches any characters. Schedulers
# forward the whole environment by themselves.
FORWARDED_VARIABLES = (
    "HF_*",
    "NCCL_*",
    "GLOO_*",
    "TORCH_*",
    "WANDB_*",
    "OMP_*",
    "LMFORGE_*",
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
)
AT_ONCE = 64
HOST_PATTERN = re.compile(r"[\w.@:\[\]%][\w.@:\[\]%-]*")


@dataclass(frozen=True)
class Answer:
    """The result of a host: status, standard output, and the last line of its errors."""

    host: str | None
    status: int
    printed: str
    message: str


def read_hosts(path: Path, *, may_repeat: bool = False) -> list[str]:
    """The hosts of a file: one a line, as ssh takes them; `slots=N` after a host, empty lines and
    comments are skipped.

    Raises UserError where the file cannot be read, a line is invalid, a host repeats where it may
    not, or there are no hosts or too many.
    """
    try:
        text = read_bounded(path, MAX_HOSTS_BYTES).decode()
    except OSError as problem:
        raise UserError(describe_os_error(problem, path)) from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text") from None
    hosts: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host, *rest = words
        if not HOST_PATTERN.fullmatch(host) or any(
            not re.fullmatch(r"(max_)?slots=[0-9]+", word) for word in rest
        ):
            raise UserError(
                f"{path}: line {number}: expected one host, such as node1 or user@10.0.0.7, got"
                f" {quoted(line)}"
            )
        if host in hosts and not may_repeat:
            raise UserError(
                f"{path}: line {number}: {cut(host)} is named twice; a host is started once"
            )
        hosts.append(host)
    if not 1 <= len(hosts) <= MAX_HOSTS:
        raise UserError(
            f"{path}: expected 1 to {MAX_HOSTS:,} hosts, one per line, got {len(hosts):,}"
        )
    return hosts


def forwarded_variables() -> dict[str, str]:
    """The environment variables of this process that processes on other hosts get."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if re.fullmatch(r"\w+", name)
        and any(fnmatch.fnmatchcase(name, pattern) for pattern in FORWARDED_VARIABLES)
    }


def export_lines(variables: Mapping[str, str]) -> str:
    """Lines of shell that set environment variables."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def ssh_command(
    host: str,
    line: str,
    *,
    program: Sequence[str] = ("ssh",),
    connect_seconds: float = CONNECT_SECONDS,
) -> list[str]:
    """The command that runs a shell line on a host, and never asks for a password, which nobody
    could type.

    program: ssh with the user's options, which take precedence over ours.
    """
    ssh, *own = program
    options = [f"ConnectTimeout={max(1, int(connect_seconds))}"]
    options += [f"ServerAliveInterval={KEEPALIVE_SECONDS}", "ServerAliveCountMax=3"]
    return [
        ssh,
        "-o",
        "BatchMode=yes",
        *own,
        *(word for each in options for word in ("-o", each)),
        host,
        "--",
        line,
    ]


def run_on_hosts(
    hosts: Sequence[str | None], scripts: Sequence[str], ssh_options: Sequence[str]
) -> list[Answer]:
    """Run a bash script on all hosts at once; None is this machine.

    The script is passed through standard input, since its variables may be secrets, and a command
    line is visible to everyone.
    """
    with ThreadPoolExecutor(min(AT_ONCE, len(hosts))) as pool:
        return list(
            pool.map(lambda host, script: _run_on_host(host, script, ssh_options), hosts, scripts)
        )


def _run_on_host(host: str | None, script: str, ssh_options: Sequence[str]) -> Answer:
    command = (
        ["bash", "-s"]
        if host is None
        else ssh_command(host, "bash -s", program=("ssh", *ssh_options))
    )
    try:
        done = subprocess.run(
            command,
            input=script,
            capture_output=True,
            text=True,
            timeout=SSH_SECONDS,
            errors="replace",
        )
    except FileNotFoundError:
        return Answer(host, 127, "", f"{command[0]} is not installed here")
    except subprocess.TimeoutExpired:
        return Answer(host, 124, "", f"no answer within {SSH_SECONDS:.0f} s")
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    message = lines[-1].removeprefix("ssh: ") if lines else f"status {done.returncode}"
    if host is not None and done.returncode == 255 and "Permission denied" in message:
        message = f"{message}; it asks for a password; set up a key (ssh-copy-id {host})"
    return Answer(host, done.returncode, done.stdout, cut(message, 200))


def raise_for_hosts(answers: Sequence[Answer], after: str) -> None:
    """Raise UserError where the script failed on a host; `after` is the end of the message."""
    failed = [answer for answer in answers if answer.status != 0]
    if failed:
        shown = name_some(
            [f"{answer.host or 'this machine'}: {answer.message}" for answer in failed],
            limit=3,
            separator="; ",
        )
        count = f" ({len(failed)} of {len(answers)} hosts)" if len(answers) > 1 else ""
        raise UserError(f"{shown}{count}; {after}")
