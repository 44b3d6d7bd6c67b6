"""Processes that need not import torch first: forked, one or many ranks, from one that has.

Most of what a small run costs is starting. This file is that process: `Preloaded` starts it, once for all tests, and asks
it for processes by lines of JSON. Each is a process of its own, with its own output, environment, folder and exit, which
begins where `python -m lmforge` is after its imports. What is about starting itself is tested with real starts elsewhere.
"""

import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any


class Preloaded:
    """The process that forks. It ends when nobody is left to ask it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(
        self,
        words: Sequence[str],
        folder: Path,
        *,
        script: Path | None = None,
        ranks: int = 1,
        stdin: str = "",
        cwd: Path | None = None,
        variables: Mapping[str, str] | None = None,
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        """The command `lmforge WORDS`, or a script with these words, on so many ranks, awaited; its output goes to `folder`.

        The status is the first that is not 0. On several ranks, when one fails the others have ten seconds to follow.
        """
        places: list[dict[str, str]] = [{}]
        if ranks > 1:
            with socket.socket() as free:
                free.bind(("localhost", 0))
                common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "localhost"}
                common |= {"MASTER_PORT": free.getsockname()[1]}
            places = [
                {name: str(value) for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
                for rank in range(ranks)
            ]
        number = len(list(folder.glob("out-*")))
        wanted = [
            {
                "words": [str(word) for word in words],
                "script": str(script) if script else None,
                "environment": {**os.environ, **(variables or {}), **place},
                "cwd": str(cwd or os.getcwd()),
                "stdin": stdin,
                "out": str(folder / f"out-{number + at}"),
                "errors": str(folder / f"errors-{number + at}"),
            }
            for at, place in enumerate(places)
        ]
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps({"processes": wanted, "timeout": timeout}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if answer["timed_out"]:
            raise subprocess.TimeoutExpired(list(words), timeout)
        said, complained = (
            "".join(Path(each[kind]).read_text(errors="replace") for each in wanted) for kind in ("out", "errors")
        )
        status = next((status for status in answer["statuses"] if status), 0)
        return subprocess.CompletedProcess(list(words), status, said, complained)


@cache
def preloaded() -> Preloaded:
    """The one of this test run."""
    return Preloaded()


def on_ranks(ranks: int, script: Path, folder: Path, *words: object, timeout: float = 500) -> str:
    """Carry out a script on so many ranks that succeed; what they said, which goes to a new folder in `folder`, too."""
    said = folder / f"said-{len(list(folder.glob('said-*')))}"
    said.mkdir()
    done = preloaded().run([str(word) for word in words], said, script=script, ranks=ranks, timeout=timeout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def _serve() -> dict[str, Any] | None:
    """Fork what is asked for until nobody asks any more. Returns what to be in a child, None in the end of the parent."""
    for line in sys.stdin:
        asked = json.loads(line)
        children = []
        for wanted in asked["processes"]:
            child = os.fork()
            if child == 0:
                return dict(wanted)
            children.append(child)
        statuses, timed_out = _await(children, asked["timeout"])
        print(json.dumps({"statuses": statuses, "timed_out": timed_out}), flush=True)
    return None


def _await(children: list[int], timeout: float) -> tuple[list[int], bool]:
    deadline, timed_out = time.monotonic() + timeout, False
    ended: dict[int, int] = {}
    while len(ended) < len(children):
        for child in children:
            if child not in ended:
                found, status = os.waitpid(child, os.WNOHANG)
                if found:
                    ended[child] = os.waitstatus_to_exitcode(status)
                    if ended[child]:
                        deadline = min(deadline, time.monotonic() + 10)
        if time.monotonic() > deadline:
            timed_out = timed_out or not any(ended.values())
            for child in children:
                if child not in ended:
                    os.kill(child, signal.SIGKILL)
            deadline += 60
        time.sleep(0.005)
    # Who failed first by itself speaks for all; those that were ended for it come last.
    order = [ended[child] for child in children]
    return sorted(order, key=lambda status: status < 0), timed_out


def _become(wanted: dict[str, Any]) -> None:
    reading, writing = os.pipe()
    os.write(writing, wanted["stdin"].encode()[:60_000])
    os.close(writing)
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, file in enumerate((reading, os.open(wanted["out"], append), os.open(wanted["errors"], append))):
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = (open(number, mode) for number, mode in ((0, "r"), (1, "w"), (2, "w")))  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.environ.clear()
    os.environ.update(wanted["environment"])
    os.chdir(wanted["cwd"])
    if wanted["script"]:
        sys.argv = [wanted["script"], *wanted["words"]]
        sys.path.insert(0, str(Path(wanted["script"]).parent))
        runpy.run_path(wanted["script"], run_name="__main__")
        cli.exit_process(0)
    else:
        sys.argv = ["lmforge", *wanted["words"]]
        cli.main()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import matplotlib.pyplot  # noqa: F401  what a training imports as it ends

    from lmforge import cli
    from lmforge.verbs.table import VERBS

    for verb in VERBS.values():  # a verb's modules are imported when it is called
        verb.load()
    gc.freeze()  # what is here to stay need not be looked through by every child again and again
    asked_to_be = _serve()
    if asked_to_be is not None:
        _become(asked_to_be)
