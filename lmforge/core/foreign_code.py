"""Code that is not ours: Python files of users, such as hooks and reward functions, imported by
path; and child processes.

Reward functions and generated programs run in processes of their own, so that what they do does not
end the run. They exchange lines of JSON with it: requests on their standard input, responses on
their standard output. What confines a generated program is in `post/rewards/confinement.py`.
"""

import ctypes
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from lmforge.core.errors import UserError

PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
HEARTBEAT_CALL_SECONDS = 1.0
# The limit of one response: rewards of a batch, or the output of a program, are far smaller.
MAX_RESPONSE_BYTES = 64 << 20
# A file may import torch and open a model.
IMPORT_TIMEOUT_SECONDS = 300.0
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# What a server started gets SIGTERM, and after this time SIGKILL.
TERM_SECONDS = 5.0


def import_file(path: Path, module_name: str, what: str) -> ModuleType:
    """Import a file, which may import its neighbours as a script can.

    `module_name` is not the file's own, which may be that of a library. Raises UserError, which
    begins with `what` and the path, where there is no such file or it cannot be imported.
    """
    if not path.is_file():
        raise UserError(f"{what} {path}: no such file")
    if path.suffix != ".py":
        raise UserError(f"{what} {path}: not a Python file, whose name ends in .py")
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{what} {path}: cannot be imported: {describe_exception(error)}"
        ) from error
    return module


def describe_exception(error: BaseException) -> str:
    """The traceback's last line, and where it was raised."""
    line = " ".join(traceback.format_exception_only(error)[-1].split())
    if isinstance(error, SyntaxError):  # it was raised by Python, not by a line of the file
        return f"{line} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{line} ({frames[-1].filename}:{frames[-1].lineno})" if frames else line


def python_command(module: str, argument: str, *flags: str) -> list[str]:
    """The command that runs `main()` of one of our modules, whatever the working directory and
    sys.path.
    """
    code = f"import sys; sys.path.insert(0, {PACKAGE_PARENT!r}); from {module} import main; main()"
    # -P: do not import a file in the working directory that has the name of a module.
    return [sys.executable, "-P", *flags, "-c", code, argument]


def encode_line(message: object) -> bytes:
    """A line of JSON for `json.loads`, with lone surrogates as they are.

    Raises TypeError, ValueError or RecursionError.

    An escape takes up to three times the bytes of its character, of which a line may have only so
    many.
    """
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def start_server(
    module: str, argument: str, first: object, what: str, closing_seconds: float = 0.0
) -> tuple["JsonLineProcess", dict[str, Any]]:
    """A process in which a module serves (post/rewards/function_server.py), and its response to the
    first request.

    `closing_seconds`: how long it may take to end by itself. Raises UserError, which begins with
    `what`.
    """
    grace = closing_seconds + 2 * TERM_SECONDS  # its supervisor's time, and some to be scheduled
    process = JsonLineProcess(python_command(module, argument), close_grace_seconds=grace)
    try:
        description = process.request(first, IMPORT_TIMEOUT_SECONDS)
    except ProcessLost:
        raise UserError(f"{what}: its process died while it was opened") from None
    except TimeoutError:
        raise UserError(
            f"{what}: opening it took more than {IMPORT_TIMEOUT_SECONDS:g} seconds"
        ) from None
    if "user_error" in description:
        process.close()
        raise UserError(description["user_error"])
    return process, description


def supervise(closing_seconds: float) -> None:
    """Go on in a child of this process, which from now on only waits: when the child ends, or
    `closing_seconds` after standard input was closed, it ends the child and all that was started
    there, in whatever session.

    Call it before there are threads.
    """
    libc = ctypes.CDLL(None)
    # Processes whose parent has ended become children of this one.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    pid = os.fork()
    if pid == 0:
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        return
    # Whoever reads the child's output learns at once that it has ended.
    os.dup2(2, 1)
    poll = select.poll()
    child = os.pidfd_open(pid)
    poll.register(child, select.POLLIN)
    poll.register(0, 0)  # only for the end of the input, which the child reads
    if child not in dict(poll.poll()):
        poll.unregister(0)
        poll.poll(1000 * closing_seconds)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _end_descendants()
    os._exit(0)


def _end_descendants() -> None:
    """SIGTERM for all processes below this one, then SIGKILL, until there are none."""
    deadline = time.monotonic() + TERM_SECONDS
    terminated = set[int]()
    while descendants := _descendants(os.getpid()):
        for pid in descendants:
            with suppress(ProcessLookupError):
                if time.monotonic() >= deadline:
                    os.kill(pid, signal.SIGKILL)
                elif pid not in terminated:
                    terminated.add(pid)
                    os.kill(pid, signal.SIGTERM)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parent = int(status.read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(status.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found[1:]


class ProcessLost(Exception):
    """The process ended, or sent something that is not a response. It has to be closed."""


class JsonLineProcess:
    """The process of `command`, in a session of its own. Only one thread may use it at a time.

    It is `closed` by `close`, and by whatever `request` and `receive` raise while they wait for a
    response.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        close_grace_seconds: float = 0.0,
    ) -> None:
        """`close_grace_seconds` is how long the process is given to end by itself when it is
        closed.
        """
        self._process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin = self._process.stdin
        self._stdout = self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)  # the process may hang before it reads
        self._close_grace_seconds = close_grace_seconds
        self.closed = False

    def request(
        self, message: object, timeout_seconds: float, heartbeat: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Send a message and return its response, both within `timeout_seconds`.

        Raises TypeError, ValueError or RecursionError if the message is not JSON, and as `receive`
        does.
        """
        rest = memoryview(encode_line(message))
        deadline = time.monotonic() + timeout_seconds
        poll = select.poll()
        poll.register(self._stdin, select.POLLOUT)
        try:
            while rest:
                if _wait(poll, deadline, heartbeat):
                    rest = rest[os.write(self._stdin.fileno(), rest) :]
        except BrokenPipeError:
            pass  # the process died, as `receive` will find
        except BaseException:
            self.close()
            raise
        return self.receive(deadline - time.monotonic(), heartbeat)

    def receive(
        self, timeout_seconds: float, heartbeat: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """The next response. `heartbeat` is called every second while it is awaited.

        Raises TimeoutError if it takes longer than `timeout_seconds`, and ProcessLost if the
        process died or the response is not JSON or larger than MAX_RESPONSE_BYTES.
        """
        try:
            response: dict[str, Any] = json.loads(self._read_line(timeout_seconds, heartbeat))
        except (ValueError, RecursionError):
            self.close()
            raise ProcessLost("its response is not JSON") from None
        except BaseException:
            self.close()
            raise
        return response

    def _read_line(self, timeout_seconds: float, heartbeat: Callable[[], None]) -> bytearray:
        poll = select.poll()
        poll.register(self._stdout, select.POLLIN)
        line = bytearray()
        deadline = time.monotonic() + timeout_seconds
        while not line.endswith(b"\n"):
            if not _wait(poll, deadline, heartbeat):
                continue
            piece = os.read(self._stdout.fileno(), 1 << 16)
            if not piece:
                raise ProcessLost("its process died")
            line += piece
            if len(line) > MAX_RESPONSE_BYTES:
                raise ProcessLost(f"its response is larger than {MAX_RESPONSE_BYTES >> 20} MiB")
        return line

    def close(self) -> None:
        """Close its input and give it time to end; then kill it, with all that it started in its
        session.
        """
        self.closed = True
        self._stdin.close()
        self._stdout.close()
        if self._close_grace_seconds:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(self._close_grace_seconds)
        # Without a return code it was not reaped, and its pid is still its own.
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _wait(poll: select.poll, deadline: float, heartbeat: Callable[[], None]) -> bool:
    """Call `heartbeat` and wait for at most a second.

    Returns whether there is something; raises TimeoutError at the end.
    """
    heartbeat()
    if poll.poll(1000 * max(0.0, min(HEARTBEAT_CALL_SECONDS, deadline - time.monotonic()))):
        return True
    if time.monotonic() >= deadline:
        raise TimeoutError
    return False
