"""Real ranks: processes with their own rendezvous, gloo and files, forked from a process that has
imported torch.

Importing torch takes longer than a life of these small runs. Some of the attempts use the command
instead.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lmforge import cli
from lmforge.core.distributed.rendezvous import free_port
from lmforge.core.steps import checkpoints

COMMAND = [sys.executable, "-m", "lmforge"]


class Outlet:
    """Where standard output or error, or both, of an attempt go until they are lost: nowhere, since
    they were "closed" before; to a "reader" that goes away; to a file on a "disk" of its own, which
    fills up.
    """

    def __init__(self, how: str, streams: tuple[int, ...], folder: Path) -> None:
        self.how, self.streams, self.path = how, streams, folder / "said before.txt"
        self._file = -1
        if how == "disk":
            (folder / "disk").mkdir(exist_ok=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "chaos", str(folder / "disk")], check=True)
            self.path = folder / "disk" / "said before.txt"
        self.path.write_bytes(b"")
        if how == "disk":
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        elif how == "reader":
            reading, self._file = os.pipe()
            with open(self.path, "wb") as file:
                self._reader = subprocess.Popen(["cat"], stdin=reading, stdout=file)
            os.close(reading)

    def give(self) -> None:
        """To this process, in place of what it has."""
        for stream in self.streams:
            if self.how == "closed":
                os.close(stream)
                setattr(sys, "stdout" if stream == 1 else "stderr", None)  # as Python finds it when it starts
            else:
                os.dup2(self._file, stream)

    def lose(self) -> None:
        if self.how == "reader":
            self._reader.kill()
            self._reader.wait()
        elif self.how == "disk":
            with contextlib.suppress(OSError), open(self.path.with_name("ballast"), "wb", buffering=0) as ballast:
                while True:
                    ballast.write(bytes(512))
            with contextlib.suppress(OSError):  # what is left of the last page, too much for some runs to fill
                while True:
                    os.write(self._file, b"\n")

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        if self.how == "reader":
            self.lose()
        elif self.how == "disk":
            subprocess.run(["umount", "--lazy", str(self.path.parent)], check=True)


class Attempt:
    """The processes of one attempt at a run.

    `ended` has exit statuses by rank, negative for a signal; the launcher is -1.
    """

    def __init__(self, pids: dict[int, int], outputs: dict[int, Path], outlet: Outlet | None = None) -> None:
        self.pids = pids
        self.outlet = outlet
        self.outputs = outputs
        self.began = time.monotonic()
        self.ended: dict[int, int] = {}
        self.sent: set[int] = set()  # signals
        self.launched = -1 in pids

    def look(self) -> bool:
        """Whether any process is left."""
        for rank, pid in self.pids.items():
            if rank not in self.ended:
                result, status = os.waitpid(pid, os.WNOHANG)
                if result:
                    self.ended[rank] = os.waitstatus_to_exitcode(status)
        return len(self.ended) < len(self.pids)

    def send(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """A signal to those of the ranks (default: all) that are still there."""
        self.look()
        self.sent.add(number)
        for rank in self.pids if ranks is None else ranks:
            if rank not in self.ended:
                os.kill(self.pids[rank], number)

    def wait(self, seconds: float) -> bool:
        """Whether all ended within so many seconds."""
        deadline = time.monotonic() + seconds
        while self.look():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    def said(self) -> str:
        """All that all of them said, in order of ranks."""
        outputs = [*self.outputs.values(), *([self.outlet.path] if self.outlet else [])]
        return "\n".join(path.read_text(errors="replace") for path in outputs)

    def out(self) -> str:
        """What the first rank said, which speaks for the run."""
        return self.outputs[min(self.outputs)].read_text(errors="replace")


def forked(
    words: list[str], ranks: int, folder: Path, largest_file: int | None = None, outlet: Outlet | None = None
) -> Attempt:
    """A command line of lmforge on so many ranks, with what they say in FOLDER/said-R.txt."""
    port = free_port()
    sys.stdout.flush()
    pids, outputs = {}, {rank: folder / f"said-{rank}.txt" for rank in range(ranks)}
    for rank, path in outputs.items():
        place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
        place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
        path.unlink(missing_ok=True)
        path.touch()
        pids[rank] = os.fork()
        if pids[rank] == 0:
            variables = {name: str(value) for name, value in place.items()} if ranks > 1 else {}
            _be_rank(words, variables, path, largest_file, outlet)
    return Attempt(pids, outputs, outlet)


def _be_rank(words: list[str], place: dict[str, str], outputs: Path, largest_file: int | None, outlet: Outlet | None) -> None:
    """What a forked rank does, as `python -m lmforge` would."""
    status = 1
    try:
        os.environ.update(place)
        file = os.open(outputs, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        if outlet is not None:
            outlet.give()
        if largest_file is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
        checkpoints.RETRY_SECONDS = checkpoints.FINAL_RETRY_SECONDS = 0.2
        status = cli.run(words)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, AttributeError):
            sys.stdout.flush()
        os._exit(status)


def launched(words: list[str], ranks: int, folder: Path, outlet: Outlet | None = None) -> Attempt:
    """The same through the command, which starts its ranks itself: only the launcher is a child of
    ours.
    """
    outputs = folder / "said-0.txt"
    for path in folder.glob("said-*.txt"):
        path.unlink()
    with open(outputs, "w") as file:
        words = [*words, "--launch.processes", str(ranks)]
        variables = {**os.environ, "PYTHONUNBUFFERED": "1"}
        give = outlet and outlet.give
        process = subprocess.Popen([*COMMAND, *words], stdout=file, stderr=subprocess.STDOUT, env=variables, preexec_fn=give)
    process.returncode = 0  # it is waited for here, by its number
    return Attempt({-1: process.pid}, {-1: outputs}, outlet)


def in_a_child(work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work` returns, as JSON can say it, from a process of its own: threads that it starts
    are not here at a fork.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            with os.fdopen(writing, "w") as out:
                json.dump(work(*arguments), out)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"{work.__name__} failed with status {os.waitstatus_to_exitcode(status)}")
    return json.loads(text)


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, and theirs."""
    results = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                results += [child, *descendants(child)]
    return results


def gone(pid: int) -> bool:
    """Whether a process has ended, buried by its parent or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def stop_for(pid: int, seconds: Callable[[], bool], at_most: float) -> None:
    """SIGSTOP until a condition holds, `at_most` so many seconds, then SIGCONT."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + at_most
    try:
        while not seconds() and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        os.kill(pid, signal.SIGCONT)
