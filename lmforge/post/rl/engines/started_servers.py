"""Servers that a run starts itself, here or by ssh on other hosts, and that end with it, however it
ends. One that ends before is started again.

A shell beside each server reads from a pipe of this process, and ends the server when the pipe is
closed: the kernel closes it when the process is killed, and ssh passes that on. What is asked of
servers is in rollout_server.py.
"""

import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.distributed.environment import RankInfo
from lmforge.core.distributed.hosts import export_lines, forwarded_variables, ssh_command
from lmforge.core.errors import UserError, format_count
from lmforge.core.files.untrusted import MAX_LISTED, cut
from lmforge.core.parallel.precision import DTYPES
from lmforge.post.options.align import AlignConfig, split_server
from lmforge.post.rl.engines.rollout_server import API_KEY_VARIABLE, ServerProblem, build_server
from lmforge.post.rl.sampler import SamplingSettings

# Variables that tell a rank where it belongs. A server is none.
RANK_VARIABLES = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT OMP_NUM_THREADS"
)
GRACE_SECONDS = 10
POLL_SECONDS = 0.2
# How often each server is started again. The folders that it then opens are called so.
MAX_RESTARTS = 3
RESTART_FOLDER = "restart-"
# It is read as a whole before it runs, since what follows it on standard input is for `cat`. The
# server has a process group of its own (set -m).
SCRIPT = """
run() {{
set -m
unset {rank_variables}
{exports}cd {folder} 2>/dev/null
port={port}
test "$port" || port=$({python} -c 'from lmforge.core.distributed.rendezvous import free_port; print(free_port())') || return 1
echo "lmforge-server {address} $port"
{command} --port "$port" </dev/null &
server=$!
{{ cat >/dev/null; kill -TERM -- -$server; sleep {grace}; kill -KILL -- -$server; }} <&0 2>/dev/null &
guard=$!
wait $server
status=$?
kill -KILL -- -$guard
return $status
}}
run; exit
"""
ADDRESS_PATTERN = re.compile(r"^lmforge-server (\S+) ([0-9]+)$", re.M)


@dataclass
class _Server:
    """One of them: how the recipe names it, its shell, and what it and its shell print.

    `url`: where it answered; `restarts`: how often it was started again, and `folder` the model
    that it then opens, until it answers.
    """

    name: str
    shell: "subprocess.Popen[bytes]"
    log: Path
    log_start: int
    url: str = ""
    restarts: int = 0
    folder: Path | None = None

    def printed(self) -> str:
        return self.log.read_bytes()[self.log_start :].decode("utf-8", "replace")


class ServerStarter:
    """Starts the servers of `rollout.engine_start`. On rank 0."""

    def __init__(
        self,
        config: AlignConfig,
        settings: SamplingSettings,
        tokenizer: Tokenizer,
        dtype: torch.dtype,
        logs_folder: Path,
    ) -> None:
        """`dtype`: in which they compute."""
        self._config = config
        self._options = config.rollout
        self._settings = settings
        self._tokenizer = tokenizer
        self._dtype = dtype
        self._logs_folder = logs_folder
        self._servers: list[_Server] = []
        self._own_address = ""
        self._key = secrets.token_urlsafe(16)
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None

    def start(self, model_folder: Path, rank_info: RankInfo) -> tuple[tuple[str, ...], str]:
        """Start all with the model of a folder, to which the tokenizer is added, and wait until
        they answer.

        Returns their addresses and key. Raises UserError with the end of what one printed that does
        not come up.
        """
        self._tokenizer.save(model_folder)
        here_only = rank_info.local_world_size == rank_info.world_size
        self._own_address = "127.0.0.1" if here_only else os.environ.get("MASTER_ADDR", "127.0.0.1")
        for number in range(len(self._options.engine_start)):
            self._servers.append(self._start(number, model_folder))
        deadline = time.monotonic() + self._options.engine_timeout_seconds
        for server in self._servers:
            self._await(server, deadline)
        return tuple(server.url for server in self._servers), self._key

    def keep_up(
        self,
        weights: Callable[[], Path | None],
        on_answer: Callable[[int], None],
        warn: Callable[[str], None],
    ) -> None:
        """From now on start servers again that end, at their addresses, each at most MAX_RESTARTS
        times.

        `weights`: the newest folder of weights, if there is one; `on_answer`: called with the
        number of a server that answers again; `warn`: gets a line for each. All three are called in
        a thread.
        """

        def watch() -> None:
            while not self._closed.wait(POLL_SECONDS):
                for number, server in enumerate(self._servers):
                    if server.shell.poll() is not None and server.restarts <= MAX_RESTARTS:
                        self._restart(number, weights(), warn)
                    elif server.folder is not None and self._answers(server):
                        shutil.rmtree(server.folder, ignore_errors=True)
                        server.folder = None
                        on_answer(number)

        self._watcher = threading.Thread(target=watch, daemon=True, name="starts servers again")
        self._watcher.start()

    def _restart(self, number: int, weights: Path | None, warn: Callable[[str], None]) -> None:
        server = self._servers[number]
        what = (
            f"rollout.engine_start: {server.name}: its server ended with status"
            f" {server.shell.returncode} ({server.log})"
        )
        if server.restarts == MAX_RESTARTS:
            server.restarts += 1
            warn(f"{what}; it is left out, since it was started again {MAX_RESTARTS} times")
            return
        if weights is None or self._closed.is_set():
            return
        folder = weights.with_name(f"{RESTART_FOLDER}{number}-{server.restarts}")
        try:
            shutil.copytree(weights, folder, copy_function=_link_or_copy, dirs_exist_ok=True)
            self._tokenizer.save(folder)
            again = self._start(number, folder, server.url.rpartition(":")[2])
        except (OSError, shutil.Error):  # other weights have come meanwhile
            shutil.rmtree(folder, ignore_errors=True)
            return
        except UserError as problem:
            server.restarts = MAX_RESTARTS + 1
            warn(f"{what}; it cannot be started again: {problem}")
            return
        self._servers[number] = again
        again.url = server.url
        again.restarts = server.restarts + 1
        again.folder = folder
        warn(f"{what}; it is started again ({again.restarts} of {MAX_RESTARTS})")

    def _answers(self, server: _Server) -> bool:
        try:
            build_server(server.url, self._options, self._settings, self._key).version()
        except ServerProblem:
            return False
        return True

    def _start(self, number: int, model_folder: Path, port: str = "") -> _Server:
        """Start a server at a port; without one, at a port that is free on its host."""
        name = self._options.engine_start[number]
        own_address = self._own_address
        host, device = split_server(name)
        here = host is None and own_address == "127.0.0.1"
        command = self._command(model_folder, device, "127.0.0.1" if here else "0.0.0.0")
        variables = {API_KEY_VARIABLE: self._key, "VLLM_API_KEY": self._key}
        if self._options.engine == "vllm":
            variables["VLLM_SERVER_DEV_MODE"] = "1"
        if device.startswith("cuda:"):
            variables["CUDA_VISIBLE_DEVICES"] = (
                device[5:] if host else _visible_gpu(name, int(device[5:]))
            )
        script = SCRIPT.format(
            rank_variables=RANK_VARIABLES,
            exports=export_lines({**(forwarded_variables() if host else {}), **variables}),
            folder=shlex.quote(os.getcwd()),
            port=port,
            python=shlex.quote(sys.executable),
            # As this host reaches the other one.
            address=own_address if host is None else "$(set -- $SSH_CONNECTION; echo $3)",
            command=shlex.join(command),
            grace=GRACE_SECONDS,
        )
        log = self._logs_folder / f"server-{number}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            log_start = out.tell()
            words = ["bash", "-s"] if host is None else ssh_command(host, "bash -s")
            try:
                # In a session of its own: Ctrl-C is for the run, which goes on until it has saved.
                shell = subprocess.Popen(
                    words, stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True
                )
            except FileNotFoundError:
                raise UserError(
                    f"rollout.engine_start: {name}: {words[0]} is not installed here"
                ) from None
        assert shell.stdin
        with suppress(BrokenPipeError):  # it has ended, as `_await` finds
            shell.stdin.write(script.encode())
            shell.stdin.flush()
        return _Server(name, shell, log, log_start)

    def _command(self, model_folder: Path, device: str, address: str) -> list[str]:
        words: list[Any]
        if self._options.engine == "vllm":
            words = ["vllm", "serve", model_folder, "--host", address]
            words += ["--max-model-len", self._settings.max_length]
            words += ["--dtype", str(self._dtype).removeprefix("torch.")]
            words += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
            if self._settings.replayed:
                words.append("--enable-return-routed-experts")
            return [*map(str, words)]
        dtype = next(name for name, value in DTYPES.items() if value == self._dtype)
        words = [sys.executable, "-m", "lmforge", "serve", model_folder, "--weight_updates"]
        words += ["--host", address, "--device", device.partition(":")[0], "--dtype", dtype]
        if self._settings.replayed:
            words.append("--return_routed_experts")
        words += ["--max_length", self._settings.max_length]
        words += ["--max_batch_size", self._options.decode_batch_size]
        if self._config.plugins:
            words += ["--plugins", *self._config.plugins]
        return [*map(str, words)]

    def _await(self, server: _Server, deadline: float) -> None:
        """Wait until a server answers, and note its address."""
        problem = "did not start"
        while time.monotonic() < deadline:
            if server.shell.poll() is not None:
                problem = f"ended with status {server.shell.returncode} before it answered"
                break
            if found := ADDRESS_PATTERN.search(server.printed()):
                server.url = f"http://{found[1]}:{found[2]}"
                if self._answers(server):
                    return
                problem = (
                    f"{server.url}: no answer within {self._options.engine_timeout_seconds:g} s"
                )
            time.sleep(POLL_SECONDS)
        lines = [
            line.strip()
            for line in server.printed().splitlines()
            if line.strip() and "lmforge-server " not in line
        ]
        tail = f": {cut(lines[-1], MAX_LISTED)}" if lines else ""
        self.close()
        raise UserError(
            f"rollout.engine_start: {server.name}: {problem}{tail}; its log is {server.log}"
        )

    def close(self) -> None:
        """End all servers."""
        self._closed.set()
        if self._watcher is not None:
            self._watcher.join(GRACE_SECONDS)  # it may wait for a server
        for server in self._servers:
            assert server.shell.stdin
            with suppress(BrokenPipeError):
                server.shell.stdin.close()
        for server in self._servers:
            try:
                server.shell.wait(GRACE_SECONDS + 5)
            except subprocess.TimeoutExpired:
                server.shell.kill()
                server.shell.wait()
        self._servers.clear()


def _link_or_copy(source: str, target: str) -> None:
    """A second name of a file, which needs no memory; where the file system has none, a copy."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, target)


def _visible_gpu(name: str, number: int) -> str:
    """What CUDA calls a GPU of this host: numbers count those that the run may use.

    Raises UserError for others.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return str(number)
    visible = [each for each in given.split(",") if each]
    if number >= len(visible):
        count = format_count(len(visible), "GPU")
        raise UserError(
            f"rollout.engine_start: {name}: CUDA_VISIBLE_DEVICES = {given!r} has {count}, and the"
            " first is cuda:0"
        )
    return visible[number]
