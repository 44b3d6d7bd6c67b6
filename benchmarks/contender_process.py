"""A contender in a separate process, controlled through a pipe.

If it ends early, EndedEarly says why.
"""

import multiprocessing
import time
from typing import Any

from contenders import Contest, Turn, contend


class EndedEarly(SystemExit):
    """A contender failed.

    `status` is its exit status (None: time-out), `said` the end of its log.
    """

    def __init__(self, name: str, status: int | None, said: str) -> None:
        super().__init__(f"{name} ended early, status {status}:\n{said}")
        self.status, self.said = status, said


class Contender:
    """A separate process, from its start until `leave`; after `limit_seconds` it is ended."""

    def __init__(self, name: str, contest: Contest, limit_seconds: float | None = None) -> None:
        self.name = name
        self._limit, self._began = limit_seconds, time.monotonic()
        self._log = contest.folder / f"{name}-{contest.dtype}.log"
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=contend, args=(name, contest, theirs, self._log), name=name)
        self._process.start()
        theirs.close()

    def _receive(self) -> Any:
        left = None if self._limit is None else max(0.0, self._began + self._limit - time.monotonic())
        if not self._pipe.poll(left):
            self._process.kill()
            raise EndedEarly(self.name, None, f"not done after {self._limit:.0f} s")
        try:
            return self._pipe.recv()
        except EOFError:
            self._process.join()
            tail = self._log.read_text(encoding="utf-8", errors="replace")[-3000:] if self._log.exists() else ""
            raise EndedEarly(self.name, self._process.exitcode, tail) from None

    def take_turn(self, seconds: float) -> Turn:
        """Let it run steps for this long, the first time through its warm-up.

        Raises EndedEarly where it fails.
        """
        self._pipe.send(seconds)
        return self._receive()

    def finish(self) -> float:
        """Mean loss of its first steps."""
        self._pipe.send(None)
        return self._receive()

    def leave(self) -> None:
        self._pipe.close()
        self._process.join(30)
        if self._process.is_alive():  # it hangs and will not answer
            self._process.kill()
            self._process.join()
