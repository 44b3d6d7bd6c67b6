"""Sampling by servers: the policy's weights go to them as a folder, requests to those that
confirmed the version.

A server that fails is left out, and its requests go to others; it is taken back once it has the
current weights. One that the run has started is started again and waited for where there is no
other. HTTP is in engines/.
"""

import os
import platform
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.errors import RunFailed, UserError
from lmforge.core.files.atomic_files import atomic_write_json
from lmforge.core.files.own_folders import (
    TOKEN_NAME,
    is_trusted_folder,
    make_own_folder,
    remove_own_folder,
)
from lmforge.core.files.untrusted import MAX_LISTED, cut, read_json
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import LORA_SUFFIXES, named_tensors
from lmforge.core.model.lora import adapted_name, lora_delta
from lmforge.core.parallel.parallel_model import ParallelModel, full_tensor
from lmforge.core.records.runs import Run, storage_errors
from lmforge.post.options.align import RolloutOptions, split_server
from lmforge.post.rl.engines.rollout_server import (
    API_KEY_VARIABLE,
    RolloutServer,
    SampledTokens,
    ServerProblem,
    build_server,
)
from lmforge.post.rl.engines.started_servers import MAX_RESTARTS, RESTART_FOLDER, ServerStarter
from lmforge.post.rl.sampler import (
    SampledCompletion,
    SampleRequest,
    SamplingSession,
    SamplingSettings,
)
from lmforge.serve.decoding.sampling import SamplingParams
from lmforge.serve.decoding.weights_folder import write_weights

LORA_A = LORA_SUFFIXES[0]
# Where a folder is in memory.
MEMORY_FOLDER = Path("/dev/shm")
# In the run's folder: the host, path and token of folders of weights that may be left, the newest
# last.
FOLDERS_NAME = ".weights-folders.json"
MAX_FOLDERS = 64  # in that file: hosts whose names change leave entries that nobody removes
# Requests that a session has at one server. They wait there, and for each a thread here: with
# `max_staleness` the sessions of all sets that are sampled at once have as many.
MAX_IN_FLIGHT = 1024
POLL_SECONDS = 1.0
# The number of no request: something else has happened.
WOKEN = 0
# How often, with the same weights, servers are used again after all of them have failed.
MAX_TAKE_BACKS = 2


class RemoteSampler:
    """Samples by servers: those of `rollout.engine_urls`, or those that `starter` starts.

    Every rank has the same.
    """

    in_order = True  # and so decodes the same batches as a rank in its own process

    def __init__(
        self,
        parallel_model: ParallelModel,
        config: ModelConfig,
        options: RolloutOptions,
        settings: SamplingSettings,
        run: Run,
        warn: Callable[[str], None],
        starter: ServerStarter | None = None,
    ) -> None:
        """Every rank calls it.

        Raises UserError where a server does not start, or weights cannot be written.
        """
        self._parallel_model, self._config, self.warn = parallel_model, config, warn
        self._ensure_lock = run.ensure_lock
        self.dist_ctx: DistributedContext = parallel_model.dist_ctx
        self.settings, self.timeout_seconds = settings, options.engine_timeout_seconds
        # The weights of an earlier attempt may have been others: no version has the name of one of
        # them.
        self.name = self.new_name()
        self._folder, self._token = self.dist_ctx.decide_on_rank0(
            partial(_make_weights_folder, options, run)
        )
        self._version: int | None = None
        # The servers with the current weights, by index; the same on all ranks when a session
        # begins.
        self._confirmed: set[int] = set()
        self._take_backs = 0
        self._none_since: float | None = None
        # Guards loads on rank 0, of which `_written` is the newest folder.
        self._loading = threading.Lock()
        self._written: Path | None = None
        self.starts_servers = bool(options.engine_start)
        self._max_take_backs = MAX_TAKE_BACKS + MAX_RESTARTS * len(options.engine_start)
        self._starter = starter
        urls, key = options.engine_urls, os.environ.get(API_KEY_VARIABLE)
        if starter is not None:
            try:
                urls, key = self._start_servers(starter)
            except BaseException:
                self.close()
                raise
        self.servers = [build_server(url, options, settings, key) for url in urls]
        if starter is not None and self.dist_ctx.is_rank0:
            starter.keep_up(lambda: self._written, self._load_current, warn)

    def new_name(self) -> str:
        """The beginning of names that no version had before. Every rank calls it."""
        return self.dist_ctx.broadcast(uuid4().hex[:8])

    def _start_servers(self, starter: ServerStarter) -> tuple[tuple[str, ...], str | None]:
        started: list[tuple[tuple[str, ...], str | None]] = []
        folder = self._folder / "start"
        self._write_to(folder)
        self.dist_ctx.run_on_rank0(
            lambda: started.append(starter.start(folder, self.dist_ctx.rank_info))
        )
        return self.dist_ctx.broadcast(started)[0]

    @contextmanager
    def session(
        self, num_requests: int, version: int, *, greedy: bool = False
    ) -> Iterator[SamplingSession]:
        """As `InProcessSampler.session`. Raises RunFailed on all ranks where no server is left."""
        self._publish(version)
        with self.dist_ctx.raise_on_all():
            yield RemoteSession(self, self.settings.params(greedy))

    def _publish(self, version: int) -> None:
        """Give the weights as they are to all servers, also to those that were left out."""
        folder = self.folder_of(version)
        if version != self._version:
            self.write(version)
        before = self._confirmed if self._version is not None else set(range(len(self.servers)))
        self._version, self._take_backs, self._none_since = version, 0, None
        self._confirmed, problems = self.dist_ctx.decide_on_rank0(
            lambda: self._load_everywhere(folder)
        )
        if not self._confirmed:
            raise RunFailed(
                "rollout.engine_urls: no server has the current weights:"
                f" {'; '.join(problems.values())}"
            )
        lost = [
            f"{problem}; it is left out until it has them"
            for index, problem in problems.items()
            if index in before
        ]
        back = [
            f"{self.servers[index].url}: has the current weights, and is used again"
            for index in self._confirmed - before
        ]
        for line in (*lost, *back) if self.dist_ctx.is_rank0 else ():
            self.warn(line)

    def _load_everywhere(self, folder: Path) -> tuple[set[int], dict[int, str]]:
        """The servers that confirmed the current version, and what is wrong with the others.

        On rank 0.
        """

        def load(server: RolloutServer) -> str | None:
            try:
                if server.version() != self.version_name:
                    server.load(folder, self.version_name)
            except ServerProblem as problem:
                return str(problem)
            return None

        deadline = time.monotonic() + self.timeout_seconds
        while True:
            with self._loading, ThreadPoolExecutor(len(self.servers)) as pool:
                outcomes = dict(enumerate(pool.map(load, self.servers)))
            if None in outcomes.values() or not self.starts_servers or time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        _remove_weights(self._folder, keep=[folder])
        problems = {index: problem for index, problem in outcomes.items() if problem is not None}
        return set(outcomes.keys() - problems.keys()), problems

    def _load_current(self, index: int) -> None:
        """Give a server that was started again the weights of this session, which may wait for it.

        On rank 0.
        """
        with self._loading, suppress(ServerProblem):
            if self._version is not None and self.servers[index].version() != self.version_name:
                self.servers[index].load(self.folder_of(self._version), self.version_name)

    @property
    def version_name(self) -> str:
        """What servers call the current weights."""
        return self.name_of(self._version)

    def name_of(self, version: int | None) -> str:
        """What servers call the weights of a version."""
        return f"{self.name}-{version}"

    def version_of(self, name: str) -> int | None:
        """The version that servers call so; None for weights that are not of this attempt at the
        run.
        """
        attempt, _, version = name.rpartition("-")
        return int(version) if attempt == self.name and version.isdecimal() else None

    def folder_of(self, version: int) -> Path:
        # Servers may still load weights of another name.
        return self._folder / self.name_of(version)

    def remove_weights(self, keep: Collection[Path]) -> None:
        """Delete the folders of weights but some."""
        if self.dist_ctx.is_rank0:
            _remove_weights(self._folder, keep)

    def write(self, version: int) -> Path:
        """Write the weights as they are. Returns the folder. Every rank calls it."""
        self._write_to(folder := self.folder_of(version))
        self._written = folder
        return folder

    def _write_to(self, folder: Path) -> None:
        """One tensor at a time: rank 0 says which one is next, and the ranks that hold parts of it
        gather it.
        """
        model, is_rank0 = self._parallel_model.model, self.dist_ctx.is_rank0
        tensors = dict(named_tensors(model))
        layers = [name.removesuffix(LORA_A) for name in tensors if name.endswith(LORA_A)]
        layer_of = {adapted_name(layer): layer for layer in layers}
        # Of the tensors of each stage of a pipeline: the shape, and the rank from which rank 0 gets
        # them.
        own = _full_shapes(tensors) if is_rank0 or self._parallel_model.pipeline_rank else {}
        shapes, senders = dict[str, Tensor](), dict[str, int]()
        for rank, stage in enumerate(self.dist_ctx.gather(own) or []):
            senders = dict.fromkeys(stage, rank) | senders
            shapes |= stage

        def gather(name: str) -> Tensor:
            value = full_tensor(tensors[name].detach())
            if (layer := layer_of.get(name)) is None:
                return value
            a, b = (full_tensor(tensors[layer + suffix].detach()) for suffix in LORA_SUFFIXES)
            module: Any = model.get_submodule(layer)
            return value + lora_delta(module.scaling, a, b, getattr(module, "transposed", False))

        def get(name: str) -> Tensor:
            self.dist_ctx.broadcast((name, senders[name]))
            if name in tensors:
                return gather(name)
            value = torch.empty_like(shapes[name], device=self.dist_ctx.device)
            dist.recv(value, src=senders[name])
            return value

        with torch.no_grad(), self.dist_ctx.raise_on_all():
            if is_rank0:
                try:
                    self._ensure_lock()  # the folder may be in that of the run
                    write_weights(folder, shapes, self._config, get)
                finally:
                    self.dist_ctx.broadcast(None)
                return
            while (asked := self.dist_ctx.broadcast(None)) is not None:
                name, sender = asked
                if name not in tensors:
                    continue
                value = gather(name)
                if sender == self.dist_ctx.rank_info.rank:
                    dist.send(
                        value.to(self.dist_ctx.device, tensors[name].dtype).contiguous(), dst=0
                    )

    def choose(self, in_flight: dict[int, int]) -> int | None:
        """The server with the fewest requests of this rank; None where one may be started again,
        after a moment. Raises RunFailed where none has the current weights.
        """
        if not self._confirmed and self._take_backs < self._max_take_backs:
            for index, server in enumerate(self.servers):
                with suppress(ServerProblem):
                    if server.version() == self.version_name:
                        self._confirmed.add(index)
            self._none_since = self._none_since or time.monotonic()
            waits = (
                self.starts_servers and time.monotonic() < self._none_since + self.timeout_seconds
            )
            if not self._confirmed and waits:
                time.sleep(POLL_SECONDS)
                return None
            self._take_backs += 1
            self._none_since = None
        if not self._confirmed:
            raise RunFailed(
                "rollout.engine_urls: no server is left that answers with the current weights;"
                " start one and resume"
            )
        return min(self._confirmed, key=lambda index: (in_flight.get(index, 0), index))

    def leave_out(self, index: int, problem: str) -> None:
        if index in self._confirmed:
            self._confirmed.discard(index)
            self.warn(f"{problem}; its requests go to others")

    def server(self, index: int) -> RolloutServer:
        return self.servers[index]

    def read_versions(self, names: Sequence[str]) -> list[int] | None:
        """The versions that a server named, or None where one of them is not that of the current
        weights.
        """
        assert self._version is not None
        return [self._version] * len(names) if {*names} == {self.version_name} else None

    def close(self) -> None:
        if self.dist_ctx.is_rank0:
            if self._starter is not None:
                self._starter.close()
            remove_own_folder(self._folder, self._token)


class SessionServers(Protocol):
    """The servers of a session, by index: which of them get requests, and which versions of weights
    their answers may have.

    in_order: whether a server begins requests that are sent together only once it has all, in their
    order.
    """

    in_order: bool

    def server(self, index: int) -> RolloutServer: ...

    def choose(self, in_flight: dict[int, int]) -> int | None:
        """The one that gets the next request; None where none can take it now.

        Raises RunFailed where none is left.
        """

    def leave_out(self, index: int, problem: str) -> None:
        """An answer could not be used."""

    def read_versions(self, names: Sequence[str]) -> list[int] | None:
        """The versions of tokens by what a server calls them, or None where one of them may not be
        used.
        """


class RemoteSession:
    """Requests at servers, each in a thread that waits for its answer."""

    def __init__(self, servers: SessionServers, params: SamplingParams) -> None:
        self.servers, self._params = servers, params
        self._waiting: list[SampleRequest] = []
        # By a number of its own: the request, and its server.
        self._running: dict[int, tuple[SampleRequest, int]] = {}
        self._answers: SimpleQueue[tuple[int, SampledTokens | ServerProblem]] = SimpleQueue()
        self._last_number = WOKEN

    @property
    def in_order(self) -> bool:
        return self.servers.in_order

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._running)

    def add(self, request: SampleRequest) -> None:
        self._waiting.append(request)

    def step(self) -> list[tuple[SampleRequest, SampledCompletion]]:
        self._send_waiting()
        finished = []
        for number, answer in self._arrived():
            if number not in self._running:
                continue  # it is WOKEN
            request, index = self._running.pop(number)
            completion = self._to_completion(answer)
            if completion is None:
                url = self.servers.server(index).url
                is_late = isinstance(answer, SampledTokens)
                problem = (
                    f"{url}: answers with other weights than it was given"
                    if is_late
                    else str(answer)
                )
                self.servers.leave_out(index, problem)
                self._waiting.append(request)
            else:
                finished.append((request, completion))
        return finished

    def wake(self) -> None:
        self._answers.put((WOKEN, ServerProblem("")))

    def _send_waiting(self) -> None:
        in_flight: dict[int, int] = {}
        for _, index in self._running.values():
            in_flight[index] = in_flight.get(index, 0) + 1
        chosen: list[tuple[SampleRequest, int]] = []
        while self._waiting:
            place = self.servers.choose(in_flight)
            if place is None or in_flight.get(place, 0) >= MAX_IN_FLIGHT:
                break
            in_flight[place] = in_flight.get(place, 0) + 1
            chosen.append((self._waiting.pop(0), place))
        starts = {index: {"id": uuid4().hex, "count": 0} for _, index in chosen}
        places = []
        for _, index in chosen:
            places.append(starts[index]["count"])
            starts[index]["count"] = places[-1] + 1  # type: ignore[operator]
        for (request, index), at in zip(chosen, places, strict=True):
            self._send(request, index, {**starts[index], "index": at})

    def _send(self, request: SampleRequest, index: int, starts_with: dict[str, Any]) -> None:
        server, answers = self.servers.server(index), self._answers
        self._last_number += 1
        number, params = self._last_number, self._params
        starts_together = self.servers.in_order and server.kind == "lmforge"

        def wait() -> None:
            try:
                answers.put(
                    (
                        number,
                        server.sample(request, params, starts_with if starts_together else None),
                    )
                )
            except ServerProblem as problem:
                answers.put((number, problem))
            except Exception as problem:  # without an answer the request would wait forever
                answers.put(
                    (
                        number,
                        ServerProblem(
                            f"{server.url}: {type(problem).__name__}:"
                            f" {cut(str(problem), MAX_LISTED)}"
                        ),
                    )
                )

        self._running[number] = request, index
        threading.Thread(target=wait, daemon=True, name="rollout request").start()

    def _arrived(self) -> Iterator[tuple[int, SampledTokens | ServerProblem]]:
        """What has come, after waiting a moment for the first."""
        try:
            if self._running:
                yield self._answers.get(timeout=POLL_SECONDS)
            while True:
                yield self._answers.get_nowait()
        except Empty:
            return

    def _to_completion(self, answer: SampledTokens | ServerProblem) -> SampledCompletion | None:
        """None where a server failed, or its tokens are of other weights."""
        versions = (
            None
            if isinstance(answer, ServerProblem)
            else self.servers.read_versions(answer.versions)
        )
        if isinstance(answer, ServerProblem) or versions is None:
            return None
        return SampledCompletion(
            answer.token_ids, answer.logprobs, versions, answer.stopped, answer.routed_experts
        )


def _full_shapes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a model without adapters, with their full shapes, on the meta device."""
    names = [name for name in tensors if not name.endswith(LORA_SUFFIXES)]
    return {
        name: torch.empty(tensors[name].shape, dtype=tensors[name].dtype, device="meta")
        for name in names
    }


def _make_weights_folder(options: RolloutOptions, run: Run) -> tuple[Path, str]:
    """A new folder for a run's weights, with its token: in the folder that was given, in memory, or
    in the run's own folder, which other hosts may see. Those of attempts that were killed are
    deleted; one that cannot be, or is another host's, stays in the record for a later attempt. On
    rank 0. Raises UserError and LockLost.
    """
    given, elsewhere = (
        options.weights_folder,
        any(split_server(name)[0] for name in options.engine_start),
    )
    in_memory = given is None and not elsewhere and os.access(MEMORY_FOLDER, os.W_OK)
    parent = MEMORY_FOLDER if in_memory else (given or run.path).resolve()
    record, host = run.path / FOLDERS_NAME, platform.node()
    run.check_lock()
    left: list[tuple[str, str, str]] = []
    with suppress(UserError, FileNotFoundError):
        left = read_json(record, list[tuple[str, str, str]])
    with storage_errors(parent, "weights cannot be written", "name another rollout.weights_folder"):
        kept = [each for each in left if not remove_own_folder(Path(each[1]), each[2])]
        # One of this host that is not trusted is gone, or was never ours.
        kept = [each for each in kept if each[0] != host or is_trusted_folder(Path(each[1]))]
        folder, token = make_own_folder(parent, "lmforge-weights-")
        atomic_write_json(record, [*kept, (host, str(folder), token)][-MAX_FOLDERS:])
    return folder, token


def _remove_weights(folder: Path, keep: Collection[Path]) -> None:
    """Delete the folders of weights but some."""
    for path in folder.iterdir():
        if (
            path.name != TOKEN_NAME
            and path not in keep
            and not path.name.startswith(RESTART_FOLDER)
        ):
            shutil.rmtree(path, ignore_errors=True)
