"""The errors that a command ends with, and commands as messages name them. Any other exception that escapes is a defect of
ours (see `cli.run`)."""

import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# EX_TEMPFAIL of sysexits.h: what schedulers and scripts take as "try again".
EXIT_PEER_LOST = 75


class UserError(Exception):
    """What the user requests cannot be done: one line saying what is wrong, where, and what to do."""

    exit_status = 2


class RunFailed(Exception):
    """A run that had started failed; the line says where its log and last good checkpoint are."""

    exit_status = 1


class PeerLost(RunFailed):
    """A run failed because another rank or its host was lost; a restart may help."""

    exit_status = EXIT_PEER_LOST


@contextmanager
def prefix_errors(prefix: str) -> Iterator[None]:
    """Puts `prefix`, such as the place of a record, before the message of a UserError that the block raises."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{prefix}: {error}") from None


def how_to_install(extra: str) -> str:
    """The command that installs the packages of an extra, as the README has it."""
    return f".venv/bin/pip install -e '.[{extra}]'"


def typed_command() -> str:
    """What to type for `lmforge` in this shell: its path, where an environment has it that is not activated."""
    installed = Path(sys.executable).with_name("lmforge")
    if shutil.which("lmforge") or not installed.exists():
        return "lmforge"
    folder = Path.cwd()
    return shlex.quote(str(installed.relative_to(folder) if installed.is_relative_to(folder) else installed))
