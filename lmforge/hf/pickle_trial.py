"""A process that reads the pickles of torch on trial, within bounds of time and memory: what passes is safe to unpickle.

A pickle can ask for any amount of memory, nest values so deeply that the interpreter crashes, and share them so often that
going through them never ends. Here a stand-in for every class goes through what it is given. Nothing that is named is imported.
"""

import pickle
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any, NoReturn

from lmforge.core.errors import UserError
from lmforge.core.foreign_code import python_command

MEMORY_BYTES, MEMORY_PER_BYTE = 2**28, 64
CPU_SECONDS, BYTES_PER_SECOND = 4, 2**16
WALL_SECONDS = 900  # only a machine that gives it no time: good pickles are read in 0.2 s
DAMAGE_SIGNALS = {-signal.SIGABRT, -signal.SIGBUS, -signal.SIGFPE, -signal.SIGILL, -signal.SIGSEGV}
MAX_PICKLES = 5  # in an old file of torch.save; the numbers behind them may begin as a pickle does
KEY_FIELDS = ("fqn", "offset", "index")  # by which torch's MetadataIndex is hashed
MAX_REASON = 100


def try_pickle(content: bytes) -> None:
    """Read the pickles at the beginning of `content` in a process of its own.

    Raises ValueError where that fails, and UserError where the machine did not let it end, which says nothing of `content`.
    """
    command = python_command(__name__, str(len(content)), "-I", "-S")
    try:
        done = subprocess.run(command, input=content, capture_output=True, timeout=WALL_SECONDS)
    except (subprocess.TimeoutExpired, OSError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else f"no end in {WALL_SECONDS} seconds, on a busy machine"
        raise UserError(f"the process that tries a checkpoint: {reason}; try again") from None
    if done.returncode == -signal.SIGXCPU:
        raise ValueError(f"it takes too long, over {_seconds(len(content))} s of a processor's time")
    if done.returncode in DAMAGE_SIGNALS:
        raise ValueError("it crashes the interpreter")
    if done.returncode and not done.stdout:
        raise UserError(f"the process that tries a checkpoint was ended (status {done.returncode}); try again")
    if done.returncode:
        raise ValueError(done.stdout.decode(errors="replace"))


def _seconds(size: int) -> int:
    return CPU_SECONDS + size // BYTES_PER_SECOND


class _Sealed(type):
    """The type of stand-ins. What a pickle sets of a class would stay for as long as the process."""

    def __setattr__(cls, name: str, value: Any) -> NoReturn:
        raise pickle.UnpicklingError("it changes a class")


class _StandIn(metaclass=_Sealed):
    args: tuple[Any, ...] = ()
    state: Any = {}  # noqa: RUF012 (replaced, never changed)

    def __new__(cls, *args: Any, **kwargs: Any) -> "_StandIn":
        repr((args, kwargs))
        self = super().__new__(cls)
        self.args = args
        return self

    def __setstate__(self, state: Any) -> None:
        if self.args:  # a member of an enum, which is there once; the dataclasses are made without
            raise pickle.UnpicklingError("it changes a value")
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        hash(key)
        self.args += (key, value)

    def __hash__(self) -> int:
        return hash((self.args, *(self.state.get(name) for name in KEY_FIELDS)))

    def __repr__(self) -> str:
        return f"{self.args!r}{self.state!r}"


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        return _Sealed(name, (_StandIn,), {})

    def persistent_load(self, pid: Any) -> None:
        repr(pid)


def main() -> None:
    """Read standard input, of as many bytes as the argument says. Where it fails, the reason is on standard output."""
    size = int(sys.argv[1])
    limits = {resource.RLIMIT_AS: MEMORY_BYTES + MEMORY_PER_BYTE * size, resource.RLIMIT_CPU: _seconds(size)}
    for limit, amount in {**limits, resource.RLIMIT_CORE: 0}.items():
        hard = resource.getrlimit(limit)[1]
        with suppress(ValueError, OSError):  # not every system limits memory
            resource.setrlimit(limit, (amount if hard == resource.RLIM_INFINITY else min(amount, hard), hard))
    try:
        with open(0, "rb") as file:
            for number in range(MAX_PICKLES):
                if not number or file.peek(1)[:1] == b"\x80":
                    repr(_Unpickler(file).load())
    except Exception as problem:
        memory = "it asks for more memory than there is" if isinstance(problem, MemoryError) else ""
        print(ascii(memory or str(problem) or type(problem).__name__)[1:-1][:MAX_REASON], end="")
        sys.exit(1)
