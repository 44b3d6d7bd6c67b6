"""Servers that sample: which weights each has, which of them get requests, and when one is left
out.

The policy's weights go to servers as folders (engines/policy_weights.py), requests to those that
confirmed them (HTTP is in engines/rollout_server.py). Without staleness all ranks wait until rank 0
has had the weights of a step loaded. With staleness servers get new weights without ending what is
in flight: every rank follows each server in a thread, in which rank 0 asks it to load the newest
weights and the others ask which it has.

Every rank decides for itself which servers it uses, in two places: `Servers.leave_out`, after an
answer that cannot be used, and `_State.confirmed`, which a server loses that does not say that it
has the weights. Then its requests go to others. It is used again once it has newer weights, or
where no other is left.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any
from uuid import uuid4

from lmforge.core.distributed.waiting import start_in_thread
from lmforge.core.errors import RunFailed
from lmforge.core.files.untrusted import MAX_LISTED, cut
from lmforge.core.model.config import ModelConfig
from lmforge.core.parallel.parallel_model import ParallelModel
from lmforge.core.records.runs import Run
from lmforge.post.options.align import RolloutOptions
from lmforge.post.rl.engines.policy_weights import PolicyWeights
from lmforge.post.rl.engines.rollout_server import (
    API_KEY_VARIABLE,
    RolloutServer,
    SampledTokens,
    ServerProblem,
    build_server,
)
from lmforge.post.rl.engines.started_servers import MAX_RESTARTS, ServerStarter
from lmforge.post.rl.sampler import (
    SampledCompletion,
    SampleRequest,
    SamplingSession,
    SamplingSettings,
)
from lmforge.serve.decoding.sampling import SamplingParams

# Requests that a session has at one server. They wait there, and for each a thread here: with
# `max_staleness` the sessions of all sets that are sampled at once have as many.
MAX_IN_FLIGHT = 1024
POLL_SECONDS = 1.0
# The number of no request: something else has happened.
WOKEN = 0
# How often, with the same weights, a server is used again after all of them have failed.
MAX_TAKE_BACKS = 2
# How often a rank asks whether rank 0 has had the newest weights loaded.
FOLLOW_SECONDS = 0.1
# How often rank 0 asks a server whether it still has its weights: one that was started again has
# others.
CHECK_SECONDS = 5.0
# How long a rank waits for servers to come back when none of them answers.
COME_BACK_SECONDS = 30.0


@dataclass
class _State:
    """What a rank knows of a server.

    confirmed    the version of the weights that it has; None where it has others, or does not
                 answer
    problem      why it does not answer, or empty
    reason       why it is not used, or empty
    left_out_at  the newest version when an answer of it could not be used; None where it is used
    take_backs   how often it was used again since that version
    loading      the folder that it may be reading
    """

    confirmed: int | None = None
    problem: str = ""
    reason: str = ""
    left_out_at: int | None = None
    take_backs: int = 0
    loading: Path | None = None

    def take(self, version: int) -> None:
        """Use the server from now on: it has the weights of `version`."""
        self.confirmed = version
        self.left_out_at = None
        self.problem = self.reason = ""


class Servers:
    """Samples by servers: those of `rollout.engine_urls`, or those that `starter` starts.

    Every rank has one, with the same servers.
    """

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
        self._dist_ctx = parallel_model.dist_ctx
        self._settings = settings
        self._warn = warn
        self._timeout_seconds = options.engine_timeout_seconds
        self._starts_servers = bool(options.engine_start)
        self._max_take_backs = MAX_TAKE_BACKS + MAX_RESTARTS * self._starts_servers
        # Where weights change under requests, one that is lost holds up no other.
        self._follows = options.max_staleness > 0
        self.in_order = not self._follows
        # The weights of an earlier attempt may have been others: no version has the name of one of
        # them.
        self.attempt = self._new_name()
        self._weights = PolicyWeights(parallel_model, config, options, run)
        self._starter = starter
        self._loading = threading.Lock()  # one load at a time, where all ranks wait for it
        # Guards all that follows.
        self._changed = threading.Condition()
        self._newest: int | None = None
        self._folder: Path | None = None
        self._closed = False
        urls = options.engine_urls
        key = os.environ.get(API_KEY_VARIABLE)
        if starter is not None:
            try:
                urls, key = self._start_servers(starter)
            except BaseException:
                self.close()
                raise
        self.servers = [build_server(url, options, settings, key) for url in urls]
        self._states = [_State() for _ in self.servers]
        if starter is not None and self._dist_ctx.is_rank0:
            starter.keep_up(lambda: self._folder, self._load_current, warn)
        self._followers = [
            start_in_thread(partial(self._follow, index), f"follows {server.url}")
            for index, server in enumerate(self.servers if self._follows else ())
        ]

    def _start_servers(self, starter: ServerStarter) -> tuple[tuple[str, ...], str | None]:
        started: list[tuple[tuple[str, ...], str | None]] = []
        folder = self._weights.write("start")
        self._dist_ctx.run_on_rank0(
            lambda: started.append(starter.start(folder, self._dist_ctx.rank_info))
        )
        return self._dist_ctx.broadcast(started)[0]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._dist_ctx.is_rank0 and self._starter is not None:
            self._starter.close()
        self._weights.close()

    # --- sessions ---------------------------------------------------------------------------------

    @contextmanager
    def session(
        self, num_requests: int, version: int, *, greedy: bool = False
    ) -> Iterator[SamplingSession]:
        """As `InProcessSampler.session`: tokens of these weights alone.

        Raises RunFailed on all ranks where no server is left.
        """
        self.publish(version)
        with self._dist_ctx.raise_on_all():
            yield self.session_from(version, greedy=greedy)

    def session_from(self, first_version: int, *, greedy: bool = False) -> "ServerSession":
        """A session for one thread, with weights from `first_version` to the newest while it goes
        on. It raises RunFailed where no server is left.
        """
        return ServerSession(self, first_version, self._settings.params(greedy))

    # --- weights ----------------------------------------------------------------------------------

    def publish(self, version: int) -> None:
        """Write the weights as they are for the servers. Every rank calls it.

        Without staleness, also wait until servers have them, those that were left out too. Raises
        RunFailed where none has.
        """
        if version != self._newest:
            folder = self._weights.write(self._name_of(version))
            with self._changed:
                self._newest = version
                self._folder = folder
                for state in self._states:
                    state.take_backs = 0
                self._changed.notify_all()
        if not self._follows:
            self._load_everywhere(version)
        with self._changed:
            in_use = {self._folder, *(state.loading for state in self._states)}
        self._weights.remove_others({each for each in in_use if each is not None})

    def forget(self) -> None:
        """After a rollback a version is of other weights than before: from now on no token of those
        counts, and no server has weights before the next `publish`. Every rank calls it.
        """
        name = self._new_name()
        with self._changed:
            self._newest = None
            self.attempt = name
            for state in self._states:
                state.confirmed = None
                if state.left_out_at is not None:
                    # Before all versions: another chance with the next weights.
                    state.left_out_at = -1

    def _new_name(self) -> str:
        """The beginning of names that no version had before. Every rank calls it."""
        return self._dist_ctx.broadcast(uuid4().hex[:8])

    def _name_of(self, version: int | None) -> str:
        """What servers call the weights of a version."""
        return f"{self.attempt}-{version}"

    def _version_of(self, name: str) -> int | None:
        """The version that servers call so; None for weights that are not of this attempt at the
        run.
        """
        attempt, _, version = name.rpartition("-")
        return int(version) if attempt == self.attempt and version.isdecimal() else None

    # --- without staleness: all ranks wait for the weights ----------------------------------------

    def _load_everywhere(self, version: int) -> None:
        """Give all servers the newest weights. Every rank calls it."""
        problems = self._dist_ctx.decide_on_rank0(self._load_until_one_has_them)
        if all(problems):
            raise RunFailed(
                f"rollout.engine_urls: no server has the current weights: {'; '.join(problems)}"
            )
        for server, state, problem in zip(self.servers, self._states, problems, strict=True):
            was_used = not state.problem and state.left_out_at is None
            state.take(version)
            state.take_backs = 0
            if problem:
                state.confirmed = None
                state.problem = problem
            line = ""
            if problem and was_used:
                line = f"{problem}; it is left out until it has them"
            if not problem and not was_used:
                line = f"{server.url}: has the current weights, and is used again"
            if line and self._dist_ctx.is_rank0:
                self._warn(line)

    def _load_until_one_has_them(self) -> list[str]:
        """Why each server has not confirmed the newest weights, or an empty string.

        Where the run starts servers, one that was killed is waited for. On rank 0.
        """
        deadline = time.monotonic() + self._timeout_seconds
        while True:
            with self._loading, ThreadPoolExecutor(len(self.servers)) as pool:
                problems = [*pool.map(self._load_newest, self.servers)]
            if not all(problems) or not self._starts_servers or time.monotonic() > deadline:
                return problems
            time.sleep(POLL_SECONDS)

    def _load_newest(self, server: RolloutServer) -> str:
        with self._changed:  # a folder and its version belong together
            folder = self._folder
            name = self._name_of(self._newest)
        assert folder is not None
        return self._update(server, folder, name)[1]

    def _load_current(self, index: int) -> None:
        """Give a server that was started again the weights of this session, which may wait for it.

        On rank 0. A server that is followed gets them from its follower.
        """
        with self._loading:
            if self._newest is not None and not self._follows:
                self._load_newest(self.servers[index])

    def _take_back(self) -> None:
        """Use servers again that still have the newest weights, after all of them have failed."""
        assert self._newest is not None
        for server, state in zip(self.servers, self._states, strict=True):
            if state.take_backs < self._max_take_backs:
                with suppress(ServerProblem):
                    if server.version() == self._name_of(self._newest):
                        state.take(self._newest)
                        state.take_backs += 1

    # --- with staleness: a thread follows each server ---------------------------------------------

    def _follow(self, index: int) -> None:
        """Keep a server at the newest weights."""
        server = self.servers[index]
        state = self._states[index]
        while True:
            with self._changed:
                # Only rank 0 can give a server its weights again, and others may be the only ones
                # to notice that it lost them.
                seconds = CHECK_SECONDS if self._dist_ctx.is_rank0 else None
                self._changed.wait_for(lambda: self._closed or self._is_stale(state), seconds)
                if self._closed:
                    return
                if self._newest is None or self._folder is None:
                    continue
                state.loading = folder = self._folder
                wanted = self._name_of(self._newest)
            name, problem = self._update(server, folder, wanted)
            with self._changed:
                state.loading = None
                self._note(server, state, name, wanted, problem)
                if self._is_stale(state):
                    self._changed.wait_for(
                        lambda: self._closed, POLL_SECONDS if problem else FOLLOW_SECONDS
                    )

    def _is_stale(self, state: _State) -> bool:
        if self._newest is None:
            return False
        if state.left_out_at is None:
            return state.confirmed != self._newest
        # One that answered wrongly gets another chance with the next weights, or when all others
        # have failed too.
        others = any(
            each.left_out_at is None and each.confirmed is not None for each in self._states
        )
        may_take_back = not others and state.take_backs < self._max_take_backs
        return state.left_out_at < self._newest or may_take_back

    def _update(self, server: RolloutServer, folder: Path, wanted: str) -> tuple[str, str]:
        """What a server calls its weights now, empty if it does not say, and why they are not those
        that are wanted. Rank 0 has it load them.
        """
        try:
            name = server.version()
            if self._dist_ctx.is_rank0 and name != wanted:
                server.load(folder, wanted)
                name = wanted
        except ServerProblem as problem:
            return "", str(problem)
        return name, ""

    def _note(
        self, server: RolloutServer, state: _State, name: str, wanted: str, problem: str
    ) -> None:
        if problem and not state.problem and self._dist_ctx.is_rank0:
            self._warn(f"{problem}; it is left out until it has the weights")
        # None also for a name from before `forget`, which may have been called meanwhile.
        confirmed = self._version_of(name)
        takes_back = state.left_out_at is not None and self._is_stale(state)
        is_back = takes_back or bool(state.problem)
        state.confirmed = confirmed
        state.problem = problem
        if name != wanted or confirmed is None:
            others = f"{server.url}: has the weights {cut(name)}, not {wanted}"
            state.reason = problem or others
            return
        state.reason = ""
        if takes_back:
            state.take(confirmed)
            state.take_backs += 1
        if is_back and self._dist_ctx.is_rank0:
            self._warn(f"{server.url}: has the current weights, and is used again")
        self._changed.notify_all()

    # --- what sessions ask ------------------------------------------------------------------------

    def choose(
        self, first_version: int, in_flight: dict[int, int], none_since: float | None
    ) -> int | None:
        """The server with the fewest requests of those that have these weights or newer ones; None
        where none has for now, after a moment.

        `none_since`: when there was none first. Raises RunFailed where none is expected any more,
        and what ended a thread that follows a server.
        """
        for follower in self._followers:
            if follower.done():
                follower.result()

        def find() -> list[int]:
            return [
                index
                for index, state in enumerate(self._states)
                if state.left_out_at is None
                and state.confirmed is not None
                and state.confirmed >= first_version
            ]

        if self._follows:
            with self._changed:
                self._changed.wait_for(find, 0.0 if any(in_flight.values()) else POLL_SECONDS)
        elif not find():
            self._take_back()
        with self._changed:
            usable = find()
        if not usable:
            self._wait_or_give_up(none_since or time.monotonic())
            return None
        return min(usable, key=lambda index: (in_flight.get(index, 0), index))

    def _wait_or_give_up(self, none_since: float) -> None:
        """Raise RunFailed where it is too long ago that a server could be used."""
        waited = time.monotonic() - none_since
        if not self._follows:
            left = any(state.take_backs < self._max_take_backs for state in self._states)
            if not (left and self._starts_servers and waited < self._timeout_seconds):
                raise RunFailed(
                    "rollout.engine_urls: no server is left that answers with the current weights;"
                    " start one and resume"
                )
            time.sleep(POLL_SECONDS)
            return
        seconds = 1.5 * self._timeout_seconds
        if all(state.problem for state in self._states) and not self._starts_servers:
            seconds = min(COME_BACK_SECONDS, seconds)
        if waited > seconds:
            reasons = "; ".join(state.reason for state in self._states if state.reason)
            problems = f" ({reasons})" if reasons else ""
            raise RunFailed(
                f"rollout.engine_urls: no server has had weights that may be used for {seconds:g}"
                f" s{problems}"
            )

    def leave_out(self, index: int, problem: str, attempt: str) -> None:
        """An answer could not be used: the server gets no requests any more.

        `attempt`: that of the request. One from before a rollback says nothing of these weights.
        """
        with self._changed:
            state = self._states[index]
            if attempt == self.attempt and state.left_out_at is None:
                state.left_out_at = self._newest
                state.reason = problem
                self._warn(f"{problem}; its requests go to others")
                self._changed.notify_all()

    def versions_of(self, names: Sequence[str], first_version: int) -> list[int] | None:
        """The versions of tokens by what a server calls them; None where one of them is older than
        `first_version` or not of this run, so that the answer may not be used.
        """
        versions = [self._version_of(name) for name in names]
        newest = self._newest or 0
        known = [each for each in versions if each is not None and first_version <= each <= newest]
        return known if len(known) == len(versions) else None


class ServerSession:
    """Requests at servers, each in a thread that waits for its answer. One thread uses it."""

    def __init__(self, servers: Servers, first_version: int, params: SamplingParams) -> None:
        self._servers = servers
        self._attempt = servers.attempt
        self._first_version = first_version
        self._params = params
        self._none_since: float | None = None
        self._waiting: list[SampleRequest] = []
        # By a number of its own: the request, and its server.
        self._running: dict[int, tuple[SampleRequest, int]] = {}
        self._answers: SimpleQueue[tuple[int, SampledTokens | ServerProblem]] = SimpleQueue()
        self._last_number = WOKEN

    @property
    def in_order(self) -> bool:
        return self._servers.in_order

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
            try:
                finished.append((request, self._to_completion(answer, index)))
            except ServerProblem as problem:
                self._servers.leave_out(index, str(problem), self._attempt)
                self._waiting.append(request)
        return finished

    def wake(self) -> None:
        self._answers.put((WOKEN, ServerProblem("")))

    def _send_waiting(self) -> None:
        in_flight: dict[int, int] = {}
        for _, index in self._running.values():
            in_flight[index] = in_flight.get(index, 0) + 1
        chosen: list[tuple[SampleRequest, int]] = []
        while self._waiting:
            server = self._servers.choose(self._first_version, in_flight, self._none_since)
            if server is None:
                self._none_since = self._none_since or time.monotonic()
                break
            self._none_since = None
            if in_flight.get(server, 0) >= MAX_IN_FLIGHT:
                break
            in_flight[server] = in_flight.get(server, 0) + 1
            chosen.append((self._waiting.pop(0), server))
        counts: dict[int, int] = {}
        places = []
        for _, index in chosen:
            places.append(counts.get(index, 0))
            counts[index] = places[-1] + 1
        ids = {index: uuid4().hex for index in counts}
        for (request, index), place in zip(chosen, places, strict=True):
            starts_with = {"id": ids[index], "count": counts[index], "index": place}
            self._send(request, index, starts_with)

    def _send(self, request: SampleRequest, index: int, starts_with: dict[str, Any]) -> None:
        server = self._servers.servers[index]
        starts_together = self.in_order and server.kind == "lmforge"
        self._last_number += 1
        number = self._last_number

        def sample() -> SampledTokens | ServerProblem:
            try:
                return server.sample(
                    request, self._params, starts_with if starts_together else None
                )
            except ServerProblem as problem:
                return problem
            except Exception as problem:  # without an answer the request would wait forever
                cause = f"{type(problem).__name__}: {cut(str(problem), MAX_LISTED)}"
                return ServerProblem(f"{server.url}: {cause}")

        self._running[number] = request, index
        threading.Thread(
            target=lambda: self._answers.put((number, sample())),
            daemon=True,
            name="rollout request",
        ).start()

    def _arrived(self) -> Iterator[tuple[int, SampledTokens | ServerProblem]]:
        """What has come, after waiting a moment for the first."""
        try:
            if self._running:
                yield self._answers.get(timeout=POLL_SECONDS)
            while True:
                yield self._answers.get_nowait()
        except Empty:
            return

    def _to_completion(
        self, answer: SampledTokens | ServerProblem, index: int
    ) -> SampledCompletion:
        """Raises ServerProblem where a server failed, or its tokens are of other weights."""
        if isinstance(answer, ServerProblem):
            raise answer
        versions = self._servers.versions_of(answer.versions, self._first_version)
        if versions is None:
            url = self._servers.servers[index].url
            raise ServerProblem(f"{url}: answers with other weights than it was given")
        return SampledCompletion(
            answer.token_ids, answer.logprobs, versions, answer.stopped, answer.routed_experts
        )
