"""A contender as the judge sees it: a process behind a pipe, which may end early and then says why."""

import multiprocessing
from typing import Any

from contenders import Contest, Turn, contend


class EndedEarly(SystemExit):
    """A contender that failed: its exit status, what it said last, and a message with both."""

    def __init__(self, name: str, status: int | None, said: str) -> None:
        super().__init__(f"{name} ended early, status {status}:\n{said}")
        self.status, self.said = status, said


class Contender:
    """A process of its own, from its start until `leave`. `limit_seconds`: how long to wait for anything that it does."""

    def __init__(self, name: str, contest: Contest, limit_seconds: float | None = None) -> None:
        self.name = name
        self._limit = limit_seconds
        self._log = contest.folder / f"{name}-{contest.dtype}.log"
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=contend, args=(name, contest, theirs, self._log), name=name)
        self._process.start()
        theirs.close()

    def _hear(self) -> Any:
        if not self._pipe.poll(self._limit):
            raise EndedEarly(self.name, None, f"nothing was heard of it for {self._limit:.0f} s")
        try:
            return self._pipe.recv()
        except EOFError:
            self._process.join()
            tail = self._log.read_text(encoding="utf-8", errors="replace")[-3000:] if self._log.exists() else ""
            raise EndedEarly(self.name, self._process.exitcode, tail) from None

    def take_turn(self, seconds: float) -> Turn:
        """Let it step for so long, the first time through its warm-up. Raises EndedEarly where it fails."""
        self._pipe.send(seconds)
        return self._hear()

    def finish(self) -> float:
        """Mean loss of its first steps."""
        self._pipe.send(None)
        return self._hear()

    def leave(self) -> None:
        self._pipe.close()
        self._process.join(30)
        if self._process.is_alive():  # in the middle of something that it will not come back from
            self._process.kill()
            self._process.join()
