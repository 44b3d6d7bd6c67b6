"""A child process that exchanges lines of JSON: requests on its standard input, responses on its standard output."""

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

HEARTBEAT_CALL_SECONDS = 1.0
# The limit of one response: rewards of a batch, or the output of a program, are far smaller.
MAX_RESPONSE_BYTES = 64 << 20
MAX_LAST_WORDS = 200


class ProcessLost(Exception):
    """The process ended, or sent something that is not a response. It has to be closed."""


class JsonLineProcess:
    """The process of `command`, in a session of its own. Only one thread may use it at a time.

    It is `closed` by `close`, and by whatever `request` and `receive` raise while they wait for a response.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        close_grace_seconds: float = 0.0,
        capture_stderr: bool = False,
    ) -> None:
        """`close_grace_seconds` is how long the process is given to end by itself when it is closed. With `capture_stderr` the
        last line of its standard error is in the message of ProcessLost."""
        self._stderr = tempfile.TemporaryFile() if capture_stderr else None  # noqa: SIM115 (open as long as the process)
        self._process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._close_grace_seconds = close_grace_seconds
        self.closed = False

    @property
    def returncode(self) -> int | None:
        """The exit status of the closed process, negative for the signal that killed it."""
        return self._process.returncode

    def request(
        self,
        message: object,
        timeout_seconds: float,
        heartbeat: Callable[[], None] = lambda: None,
        default: Callable[[Any], str] | None = None,
    ) -> dict[str, Any]:
        """Send a message and return its response. `default` makes text of what JSON lacks.

        Raises TypeError or ValueError if the message is not JSON, and as `receive` does.
        """
        line = json.dumps(message, default=default).encode() + b"\n"
        try:
            while line:
                line = line[os.write(self._stdin.fileno(), line) :]
        except BrokenPipeError:
            pass  # the process died, as `receive` will find
        except BaseException:
            self.close()
            raise
        return self.receive(timeout_seconds, heartbeat)

    def receive(self, timeout_seconds: float, heartbeat: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """The next response. `heartbeat` is called every second while it is awaited.

        Raises TimeoutError if it takes longer than `timeout_seconds`, and ProcessLost if the process died or the response is
        not JSON or larger than MAX_RESPONSE_BYTES.
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
        line, deadline = bytearray(), time.monotonic() + timeout_seconds
        while not line.endswith(b"\n"):
            heartbeat()
            if not poll.poll(1000 * max(0.0, min(HEARTBEAT_CALL_SECONDS, deadline - time.monotonic()))):
                if time.monotonic() >= deadline:
                    raise TimeoutError
                continue
            piece = os.read(self._stdout.fileno(), 1 << 16)
            if not piece:
                raise ProcessLost(f"its process died{self._last_words()}")
            line += piece
            if len(line) > MAX_RESPONSE_BYTES:
                raise ProcessLost(f"its response is larger than {MAX_RESPONSE_BYTES >> 20} MiB")
        return line

    def _last_words(self) -> str:
        if self._stderr is None:
            return ""
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - MAX_LAST_WORDS))
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    def close(self) -> None:
        """Close its input and give it time to end; then kill it, with all that it started in its session."""
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
