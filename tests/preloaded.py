"""A fork server: starts one or more ranks without importing torch again.

Most of the time of a small run is spent on imports. `Preloaded` runs this file as a server process, once for all tests, and
sends it requests as lines of JSON. The server forks a process for each rank, with its own output, environment, folder and
exit status; it continues where `python -m lmforge` is after its imports. Other tests cover real starts.
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
    """The fork server. It ends when its standard input is closed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(
        self,
        args: Sequence[str],
        folder: Path,
        *,
        script: Path | None = None,
        ranks: int = 1,
        stdin: str = "",
        cwd: Path | None = None,
        variables: Mapping[str, str] | None = None,
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        """Run `lmforge ARGS`, or a script with these arguments, on `ranks` ranks and wait; its output goes to `folder`.

        The status is the first that is not 0. When one of several ranks fails, the others are killed after ten seconds.
        """
        rank_variables: list[dict[str, str]] = [{}]
        if ranks > 1:
            with socket.socket() as free:
                free.bind(("localhost", 0))
                common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "localhost"}
                common |= {"MASTER_PORT": free.getsockname()[1]}
            rank_variables = [
                {name: str(value) for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
                for rank in range(ranks)
            ]
        number = len(list(folder.glob("out-*")))
        requests = [
            {
                "args": [str(arg) for arg in args],
                "script": str(script) if script else None,
                "environment": {**os.environ, **(variables or {}), **of_rank},
                "cwd": str(cwd or os.getcwd()),
                "stdin": stdin,
                "out": str(folder / f"out-{number + at}"),
                "errors": str(folder / f"errors-{number + at}"),
            }
            for at, of_rank in enumerate(rank_variables)
        ]
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps({"processes": requests, "timeout": timeout}) + "\n")
        self._process.stdin.flush()
        response = json.loads(self._process.stdout.readline())
        if response["timed_out"]:
            raise subprocess.TimeoutExpired(list(args), timeout)
        stdout, stderr = (
            "".join(Path(request[kind]).read_text(errors="replace") for request in requests) for kind in ("out", "errors")
        )
        status = next((status for status in response["statuses"] if status), 0)
        return subprocess.CompletedProcess(list(args), status, stdout, stderr)


@cache
def preloaded() -> Preloaded:
    """The fork server of this test run."""
    return Preloaded()


def on_ranks(ranks: int, script: Path, folder: Path, *args: object, timeout: float = 500) -> str:
    """Run a script on `ranks` ranks, which must succeed. Returns their output, which is also in a new folder in `folder`."""
    output = folder / f"output-{len(list(folder.glob('output-*')))}"
    output.mkdir()
    done = preloaded().run([str(arg) for arg in args], output, script=script, ranks=ranks, timeout=timeout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def _serve() -> dict[str, Any] | None:
    """Fork the processes of each request until the input ends. Returns its request in a child, None in the parent."""
    for line in sys.stdin:
        message = json.loads(line)
        children = []
        for request in message["processes"]:
            child = os.fork()
            if child == 0:
                return dict(request)
            children.append(child)
        statuses, timed_out = _await(children, message["timeout"])
        print(json.dumps({"statuses": statuses, "timed_out": timed_out}), flush=True)
    return None


def _await(children: list[int], timeout: float) -> tuple[list[int], bool]:
    deadline, timed_out = time.monotonic() + timeout, False
    ended: dict[int, int] = {}
    while len(ended) < len(children):
        for child in children:
            if child not in ended:
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
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
    # A rank that failed by itself comes before those that were killed because of it.
    order = [ended[child] for child in children]
    return sorted(order, key=lambda status: status < 0), timed_out


def _run_request(request: dict[str, Any]) -> None:
    reading, writing = os.pipe()
    os.write(writing, request["stdin"].encode()[:60_000])
    os.close(writing)
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, file in enumerate((reading, os.open(request["out"], append), os.open(request["errors"], append))):
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = (open(number, mode) for number, mode in ((0, "r"), (1, "w"), (2, "w")))  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    if request["script"]:
        sys.argv = [request["script"], *request["args"]]
        sys.path.insert(0, str(Path(request["script"]).parent))
        runpy.run_path(request["script"], run_name="__main__")
        cli.exit_process(0)
    else:
        sys.argv = ["lmforge", *request["args"]]
        cli.main()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import matplotlib.pyplot  # noqa: F401  imported at the end of a training run

    from lmforge import cli
    from lmforge.verbs.table import VERBS

    for verb in VERBS.values():  # a verb's modules are imported when it is called
        verb.load()
    gc.freeze()  # the collector of a child does not scan what is loaded already
    own_request = _serve()
    if own_request is not None:
        _run_request(own_request)
