"""Hosts: the file that names them, and running a few lines of shell on each of them at once, by ssh or on this machine."""

import fnmatch
import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lmforge.errors import UserError
from lmforge.untrusted import cut, quoted, read_bounded

SSH_SECONDS = 60
MAX_HOSTS_BYTES = 2**20
AT_ONCE = 64
HOST_PATTERN = re.compile(r"[\w.@:\[\]%][\w.@:\[\]%-]*")


@dataclass(frozen=True)
class Answer:
    """What a host answered: status, standard output, and the last line of its errors."""

    host: str | None
    status: int
    printed: str
    message: str


def read_hosts(path: Path) -> list[str]:
    """The hosts of a file: one a line, as ssh takes them; `slots=N` after a host, empty lines and comments are skipped.

    Raises UserError where the file cannot be read, a line is none, a host is named twice, or there is none.
    """
    try:
        text = read_bounded(path, MAX_HOSTS_BYTES).decode()
    except OSError as problem:
        raise UserError(f"launch.hosts: {path}: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"launch.hosts: {path}: not UTF-8 text") from None
    hosts: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host, *rest = words
        if not HOST_PATTERN.fullmatch(host) or any(not re.fullmatch(r"(max_)?slots=[0-9]+", word) for word in rest):
            raise UserError(f"{path}: line {number}: expected one host, such as node1 or user@10.0.0.7, got {quoted(line)}")
        if host in hosts:
            raise UserError(f"{path}: line {number}: {cut(host)} is named twice; a host is started once")
        hosts.append(host)
    if not hosts:
        raise UserError(f"{path}: names no host; give one a line")
    return hosts


def forwarded_variables(patterns: Sequence[str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of this process whose names match one of the patterns, in which * stands for any characters."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if re.fullmatch(r"\w+", name) and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


def export_lines(variables: Mapping[str, str]) -> str:
    """Lines of shell that set environment variables."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def run_on_hosts(hosts: Sequence[str | None], scripts: Sequence[str], ssh_options: Sequence[str]) -> list[Answer]:
    """Run a script of bash on each host, all at once; None is this machine.

    The script goes through standard input: its variables may be secrets, which a command line would show to everyone.
    """
    with ThreadPoolExecutor(min(AT_ONCE, len(hosts))) as pool:
        return list(pool.map(lambda host, script: _run_on_host(host, script, ssh_options), hosts, scripts))


def _run_on_host(host: str | None, script: str, ssh_options: Sequence[str]) -> Answer:
    command = ["bash", "-s"]
    if host is not None:
        # Nobody is there to type a password, on one of a hundred hosts.
        command = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *ssh_options, host, "bash -s"]
    try:
        done = subprocess.run(command, input=script, capture_output=True, text=True, timeout=SSH_SECONDS, errors="replace")
    except FileNotFoundError:
        return Answer(host, 127, "", f"{command[0]} is not installed here")
    except subprocess.TimeoutExpired:
        return Answer(host, 124, "", f"no answer within {SSH_SECONDS:.0f} s")
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    message = lines[-1].removeprefix("ssh: ") if lines else f"status {done.returncode}"
    if host is not None and done.returncode == 255 and "Permission denied" in message:
        message = f"{message}; it asks for a password: set up a key (ssh-copy-id {host})"
    return Answer(host, done.returncode, done.stdout, cut(message, 200))


def raise_for_hosts(answers: Sequence[Answer], after: str) -> None:
    """Raise UserError where a host has refused; `after` says what follows from it."""
    failed = [answer for answer in answers if answer.status != 0]
    if failed:
        shown = "; ".join(f"{answer.host or 'this machine'}: {answer.message}" for answer in failed[:3])
        more = f"; and {len(failed) - 3} more" if len(failed) > 3 else ""
        count = f" ({len(failed)} of {len(answers)} hosts)" if len(answers) > 1 else ""
        raise UserError(f"{shown}{more}{count}; {after}")
