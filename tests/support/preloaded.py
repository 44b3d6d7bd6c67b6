"""A fork server: starts one or more ranks without importing torch again.

Most of the time of a small run is spent on imports. `Preloaded` runs this file as a server process,
once for all tests, and sends it requests as lines of JSON. The server forks a process for each
rank, with its own output, environment, folder and exit status; it continues where `python -m
lmforge` is after its imports. Where such a process starts `python -m lmforge` itself, as a launcher
starts ranks, that is forked too (`ForkingPopen`). Other tests cover real starts.
"""

import atexit
import ctypes
import gc
import importlib
import json
import logging
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

import pydantic

from lmforge.core.distributed.rendezvous import free_port

# For the processes of one request.
TIMEOUT_SECONDS = float(os.environ.get("LMFORGE_TEST_SECONDS", "300"))


class Forked:
    """A process of the fork server that runs beside the tests, with the methods of a Popen.

    `out` and `errors` are files.
    """

    def __init__(self, pid: int, out: Path, errors: Path, status: Path) -> None:
        self.pid, self.out, self.errors, self._status = pid, out, errors, status

    def poll(self) -> int | None:
        return int(text) if self._status.exists() and (text := self._status.read_text()) else None

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.005)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended, and that is not written down yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Preloaded:
    """The fork server. It ends when its standard input is closed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

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
        timeout: float = TIMEOUT_SECONDS,
    ) -> subprocess.CompletedProcess[str]:
        """Run `lmforge ARGS`, or a script with these arguments, on `ranks` ranks and wait; its
        output goes to `folder`.

        The status is the first that is not 0. When one of several ranks fails, the others are
        killed after ten seconds.
        """
        number = len(list(folder.glob("out-*")))
        requests = [
            _request(
                args,
                folder,
                number + at,
                {**(variables or {}), **of_rank},
                script=script,
                stdin=stdin,
                cwd=cwd,
            )
            for at, of_rank in enumerate(rank_variables(ranks) if ranks > 1 else [{}])
        ]
        response = self._ask({"processes": requests, "timeout": timeout})
        if response["timed_out"]:
            raise subprocess.TimeoutExpired(list(args), timeout)
        stdout, stderr = (
            "".join(Path(request[kind]).read_text(errors="replace") for request in requests)
            for kind in ("out", "errors")
        )
        status = next((status for status in response["statuses"] if status), 0)
        return subprocess.CompletedProcess(list(args), status, stdout, stderr)

    def start(
        self,
        args: Sequence[object],
        folder: Path,
        *,
        script: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> Forked:
        """Start `lmforge ARGS`, or a script with these arguments, and do not wait for it; its
        output goes to `folder`.
        """
        number = len(list(folder.glob("out-*")))
        request, status = (
            _request(args, folder, number, variables, script=script),
            folder / f"status-{number}",
        )
        out, errors = Path(request["out"]), Path(request["errors"])
        out.touch()
        errors.touch()
        return Forked(
            self._ask({"beside": request, "status": str(status)})["pid"], out, errors, status
        )

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        try:
            return dict(json.loads(self._process.stdout.readline()))
        except BaseException:
            # The time of the test was over: the response would be taken for that of the next
            # request.
            self._process.kill()
            preloaded.cache_clear()
            raise


def rank_variables(ranks: int) -> list[dict[str, str]]:
    """The environment variables of each of so many ranks on this machine, as torchrun sets them."""
    common = {
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": free_port(),
    }
    return [
        {name: str(value) for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
        for rank in range(ranks)
    ]


def _request(
    args: Sequence[object],
    folder: Path,
    number: int,
    variables: Mapping[str, str] | None = None,
    *,
    script: Path | None = None,
    stdin: str = "",
    cwd: Path | None = None,
) -> dict[str, Any]:
    """What a forked process gets: its arguments, environment and files."""
    return {
        "args": [str(arg) for arg in args],
        "script": str(script) if script else None,
        "environment": {**os.environ, **(variables or {})},
        "cwd": str(cwd or os.getcwd()),
        "stdin": stdin,
        "out": str(folder / f"out-{number}"),
        "errors": str(folder / f"errors-{number}"),
    }


@cache
def preloaded() -> Preloaded:
    """The fork server of this test run."""
    return Preloaded()


def on_ranks(
    ranks: int,
    script: Path,
    folder: Path,
    *args: object,
    timeout: float = 500,
    variables: Mapping[str, str] | None = None,
) -> str:
    """Run a script on `ranks` ranks, which must succeed.

    Returns their output, which is also in a new folder in `folder`.
    """
    output = folder / f"output-{len(list(folder.glob('output-*')))}"
    output.mkdir()
    words = [str(arg) for arg in args]
    done = preloaded().run(
        words, output, script=script, ranks=ranks, timeout=timeout, variables=variables
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def _serve() -> dict[str, Any] | None:
    """Fork the processes of each request until the input ends.

    Returns its request in a child, None in the parent.
    """
    for line in sys.stdin:
        message = json.loads(line)
        if "beside" in message:
            if os.fork() == 0:
                return _keep(message["beside"], Path(message["status"]))
            continue
        children = []
        for request in message["processes"]:
            child = os.fork()
            if child == 0:
                parent_death_signal = 1
                ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
                return dict(request)
            children.append(child)
        statuses, timed_out = _await(children, message["timeout"])
        print(json.dumps({"statuses": statuses, "timed_out": timed_out}), flush=True)
    return None


def _keep(request: dict[str, Any], status_file: Path) -> dict[str, Any]:
    """Fork a process, answer with its process id, and write down how it ends.

    Returns its request in the process itself.
    """
    child = os.fork()
    if child == 0:
        # The kernel halts no process of a group that has no parent in its session, such as setsid
        # makes.
        os.setpgid(0, 0)
        return request
    print(json.dumps({"pid": child}), flush=True)
    _, status = os.waitpid(child, 0)
    status_file.write_text(str(os.waitstatus_to_exitcode(status)))
    os._exit(0)


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
    for number, file in enumerate(
        (reading, os.open(request["out"], append), os.open(request["errors"], append))
    ):
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0)  # noqa: SIM115
    sys.stdout = open(1, "w")  # noqa: SIM115
    sys.stderr = open(2, "w")  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    # It trains before it starts ranks, and OpenMP's threads do not survive a fork.
    if request["args"][:1] != ["quickstart"]:
        subprocess.Popen = subprocess_handler.Popen = ForkingPopen  # type: ignore[misc]
    rounding.obey_environment()
    if request["script"]:
        sys.argv = [request["script"], *request["args"]]
        sys.path.insert(0, str(Path(request["script"]).parent))
        runpy.run_path(request["script"], run_name="__main__")
        cli.exit_process(0)
    else:
        sys.argv = ["lmforge", *request["args"]]
        cli.main()


class ForkingPopen(subprocess.Popen[Any]):
    """A Popen that forks this process where `python -m lmforge` would be started: ranks, stages of
    a pipeline, trials.
    """

    def __init__(
        self, args: Sequence[Any], env: Mapping[str, str] | None = None, **named: Any
    ) -> None:
        if list(args[:3]) == [sys.executable, "-m", "lmforge"]:
            sys.stdout.flush()
            sys.stderr.flush()
            # Called in the child, when it has its files, folder and session, in the place of the
            # program.
            named["preexec_fn"] = partial(
                _become_command,
                [str(arg) for arg in args[3:]],
                dict(os.environ if env is None else env),
            )
        super().__init__(args, env=env, **named)


def _become_command(arguments: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Be `lmforge ARGUMENTS` in a child that was forked within a call of its parent, with nothing
    of what the parent set.
    """
    gc.freeze()  # what the parent holds is not closed here
    gc.enable()
    # As when a program is executed; the parent's Popen waits for it.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    logging.disable(logging.NOTSET)
    atexit._clear()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["lmforge", *arguments]
    status = 1
    try:
        cli.main()
    except SystemExit as ended:
        status = int(ended.code or 0)
    finally:
        cli._leave(status)


def build_schemas(options: type[pydantic.BaseModel]) -> None:
    """Build the schemas of all options that are derived from `options`."""
    for derived in options.__subclasses__():
        derived.model_rebuild()
        build_schemas(derived)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from lmforge import cli

    cli.limit_spinning()  # read when torch is imported
    import torch._dynamo  # imported by the first optimizer
    import torch.distributed.launcher.api  # noqa: F401  imported by a launcher
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    from lmforge import core, ops, post
    from lmforge.core.options.options import Options
    from lmforge.core.options.verbs import VERBS
    from tests.support import rounding

    for verb in VERBS.values():  # a verb's modules are imported when it is called
        verb.load()
    # So are those that an option chooses, and schemas of options are built when they are used.
    for wing in (core, post, ops):
        for module in pkgutil.walk_packages(wing.__path__, f"{wing.__name__}."):
            importlib.import_module(module.name)
    build_schemas(Options)
    gc.freeze()  # the collector of a child does not scan what is loaded already
    own_request = _serve()
    if own_request is not None:
        _run_request(own_request)
