"""The errors that end a command, and how messages format commands, sizes and numbers.

Any other uncaught exception is a bug in lmforge (see `cli.run`).
"""

import difflib
import errno
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

# EX_TEMPFAIL of sysexits.h: what schedulers and scripts take as "try again".
EXIT_PEER_LOST = 75
MAX_TYPED = 80  # characters of a name that is compared with others
# What a full disk, a used-up quota and a limit on the size of files answer.
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UserError(Exception):
    """The user's request cannot be carried out: one line with the problem, its place, and what to
    do.
    """

    exit_status = 2
    # Raised on another rank; raised here only so that all ranks end.
    raised_on_peer = False


class RunFailed(Exception):
    """A run that had started failed; the line says where its log and last good checkpoint are."""

    exit_status = 1
    raised_on_peer = False  # as in UserError


class LockLost(RunFailed):
    """Another process may write into the run's folder, or the folder is gone: this attempt writes
    nothing there any more.
    """


# Messages of gloo and NCCL when the other rank is lost.
PEER_LOST_PATTERN = re.compile(
    r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|remote process exited|NCCL communicator was aborted"
)


class PeerLost(RunFailed):
    """A run failed because another rank or its host was lost; a restart may help."""

    exit_status = EXIT_PEER_LOST


class NothingToLearn(UserError):
    """A record is as it should be, and there is nothing in it to learn from: it is left out, which
    does not end the command.
    """


@contextmanager
def prefix_errors(prefix: str | Callable[[], str]) -> Iterator[None]:
    """Puts `prefix`, such as the place of a record, or what it returns, before the message of a
    UserError of the block.
    """
    try:
        yield
    except UserError as error:
        kind = NothingToLearn if isinstance(error, NothingToLearn) else UserError
        raise kind(f"{prefix if isinstance(prefix, str) else prefix()}: {error}") from None


def how_to_install(extra: str) -> str:
    """The command that installs the packages of an extra: in a checkout as docs/getting-started.md
    has it.
    """
    if (Path(__file__).parents[2] / "pyproject.toml").is_file():
        return f".venv/bin/pip install -e '.[{extra}]'"
    return f"pip install 'lmforge[{extra}]'"


def typed_command() -> str:
    """How to type `lmforge` in this shell: its path, if it is in an environment that is not
    activated.
    """
    installed = Path(sys.executable).with_name("lmforge")
    if shutil.which("lmforge") or not installed.exists():
        return "lmforge"
    folder = Path.cwd()
    return shlex.quote(str(installed.relative_to(folder) if installed.is_relative_to(folder) else installed))


def format_bytes(count: float) -> str:
    """A number of bytes in MiB or GiB."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def format_count(count: int, noun: str) -> str:
    """A number of things: `1 document`, `2,000 documents`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def name_some(names: Sequence[object], limit: int = 8, separator: str = ", ") -> str:
    """The first `limit` names, and how many there are besides: `node1, node2 and 3 more`."""
    shown = separator.join(map(str, names[:limit]))
    return f"{shown} and {len(names) - limit:,} more" if len(names) > limit else shown


def nearest_multiples(value: int, unit: int) -> str:
    """The multiples of `unit` below and above `value`, without 0: `768 or 1024`."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def format_duration(seconds: float) -> str:
    """Seconds as 42s, 3m05s, 2h07m or 3d04h."""
    total = int(max(0.0, seconds) + 0.5)
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    return f"{total // 3600}h{total % 3600 // 60:02d}m" if total < 86400 else f"{total // 86400}d{total % 86400 // 3600:02d}h"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about a name that is not known: the one that was probably meant; empty
    where none is like it.
    """
    close = difflib.get_close_matches(word[:MAX_TYPED], list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
