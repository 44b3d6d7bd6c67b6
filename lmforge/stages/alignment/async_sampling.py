"""Sampling by servers while the policy is trained: they get new weights without ending what is in flight.

Every rank follows each server in a thread: rank 0 asks it to load the newest weights, the others ask which it has. Each token
keeps the version of the weights that sampled it. Weights are written by remote_sampling.py, requests are sent there.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lmforge.cluster.waiting import start_in_thread
from lmforge.errors import RunFailed
from lmforge.stages.alignment.engines.rollout_server import RolloutServer, ServerProblem
from lmforge.stages.alignment.remote_sampling import MAX_TAKE_BACKS, POLL_SECONDS, RemoteSampler, RemoteSession
from lmforge.stages.alignment.sampling import SamplingSession

# How often a rank asks whether rank 0 has had the newest weights loaded.
FOLLOW_SECONDS = 0.1
# How long a rank waits for servers to come back when none of them answers.
COME_BACK_SECONDS = 30.0


@dataclass
class _State:
    """What a rank knows of a server. `problem`: why it does not answer, or empty; `left_out_at`: the newest version when an
    answer of it could not be used; `take_backs`: how often it was used again since that version."""

    confirmed: int | None = None
    loading: int | None = None
    problem: str = ""
    left_out_at: int | None = None
    take_backs: int = 0


class AsyncSampler:
    """Samples by the servers of a RemoteSampler, which gives them weights while they sample. Every rank has one."""

    def __init__(self, remote: RemoteSampler) -> None:
        self._remote, self._dist_ctx = remote, remote.dist_ctx
        # Guards all that follows.
        self._changed = threading.Condition()
        self._states = [_State() for _ in remote.servers]
        self._newest: int | None = None
        self._folder = Path()
        self._closed = False
        for index in range(len(remote.servers)):
            start_in_thread(partial(self._follow, index), f"follows {remote.servers[index].url}")

    def publish(self, version: int) -> None:
        """Write the weights as they are for the servers, and go on. Every rank calls it."""
        if version == self._newest:
            return
        folder = self._remote.write(version)
        with self._changed:
            self._newest, self._folder = version, folder
            for state in self._states:
                state.take_backs = 0
            in_use = {state.loading for state in self._states} | {version}
            self._changed.notify_all()
        self._remote.remove_weights({self._remote.folder_of(each) for each in in_use if each is not None})

    @contextmanager
    def session(self, num_requests: int, version: int, *, greedy: bool = False) -> Iterator[SamplingSession]:
        """As `RemoteSampler.session`: tokens of these weights alone."""
        self.publish(version)
        with self._dist_ctx.raise_on_all():
            yield self.session_from(version, greedy=greedy)

    def session_from(self, first_version: int, *, greedy: bool = False) -> RemoteSession:
        """A session for one thread, with weights from `first_version` to the newest while it goes on. It raises RunFailed where
        no server is left."""
        return RemoteSession(_ServersFrom(self, first_version), self._remote.settings.params(greedy))

    # --- what a server has -------------------------------------------------------------------------------------------

    def _follow(self, index: int) -> None:
        """Keep a server at the newest weights."""
        server, state = self._remote.servers[index], self._states[index]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._is_stale(state))
                if self._closed:
                    return
                assert self._newest is not None
                version, folder = self._newest, self._folder
                state.loading = version
            confirmed, problem = self._update(server, version, folder)
            with self._changed:
                state.loading = None
                self._note(server, state, version, confirmed, problem)
                if self._is_stale(state):
                    self._changed.wait_for(lambda: self._closed, POLL_SECONDS if problem else FOLLOW_SECONDS)

    def _is_stale(self, state: _State) -> bool:
        if self._newest is None:
            return False
        if state.left_out_at is None:
            return state.confirmed != self._newest
        # One that answered wrongly gets another chance with the next weights, or when all others have failed too.
        others = any(each.left_out_at is None and each.confirmed is not None for each in self._states)
        return state.left_out_at < self._newest or (not others and state.take_backs < MAX_TAKE_BACKS)

    def _update(self, server: RolloutServer, version: int, folder: Path) -> tuple[int | None, str]:
        """The version that a server has now, None if it is not one of this run's, and why it does not have the newest."""
        try:
            name = server.version()
            if self._dist_ctx.is_rank0 and name != self._remote.name_of(version):
                server.load(folder, self._remote.name_of(version))
                name = self._remote.name_of(version)
        except ServerProblem as problem:
            return None, str(problem)
        return self._remote.version_of(name), ""

    def _note(self, server: RolloutServer, state: _State, version: int, confirmed: int | None, problem: str) -> None:
        if problem and not state.problem and self._dist_ctx.is_rank0:
            self._remote.warn(f"{problem}; it is left out until it has the weights")
        is_back = confirmed == version and bool(state.problem or state.left_out_at is not None)
        state.confirmed, state.problem = confirmed, problem
        if confirmed == version:
            if state.left_out_at is not None:
                state.left_out_at, state.take_backs = None, state.take_backs + 1
            if is_back and self._dist_ctx.is_rank0:
                self._remote.warn(f"{server.url}: has the current weights, and is used again")
            self._changed.notify_all()

    # --- what sessions ask --------------------------------------------------------------------------------------------

    def choose(self, first_version: int, in_flight: dict[int, int], seconds: float) -> int | None:
        """The server with the fewest requests of those that have these weights or newer ones, waited for some seconds."""

        def find() -> list[int]:
            usable = (each.left_out_at is None and each.confirmed is not None for each in self._states)
            return [at for at, each in enumerate(usable) if each and (self._states[at].confirmed or 0) >= first_version]

        with self._changed:
            self._changed.wait_for(find, seconds)
            return min(find(), key=lambda index: (in_flight.get(index, 0), index), default=None)

    def leave_out(self, index: int, problem: str) -> None:
        with self._changed:
            state = self._states[index]
            if state.left_out_at is None:
                state.left_out_at = self._newest
                self._remote.warn(f"{problem}; its requests go to others")
                self._changed.notify_all()

    def versions_from(self, first_version: int, names: Sequence[str]) -> list[int] | None:
        """The versions that a server named, or None where one of them is none of these."""
        versions = [self._remote.version_of(name) for name in names]
        known = [each for each in versions if each is not None and each >= first_version]
        return known if len(known) == len(versions) else None

    def give_up_after(self) -> tuple[float, str]:
        """How long to wait for a server, and what is wrong with them."""
        problems = [state.problem for state in self._states]
        longest = 1.5 * self._remote.timeout_seconds
        return min(COME_BACK_SECONDS, longest) if all(problems) else longest, "; ".join(filter(None, problems))

    @property
    def remote(self) -> RemoteSampler:
        return self._remote

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._remote.close()


class _ServersFrom:
    """The servers that have weights from a version on, for one session."""

    in_order = False  # a request that is lost holds up no other

    def __init__(self, sampler: AsyncSampler, first_version: int) -> None:
        self._sampler, self._first_version = sampler, first_version
        self.timeout_seconds, self.server = sampler.remote.timeout_seconds, sampler.remote.server
        self.leave_out = sampler.leave_out
        self._none_since: float | None = None

    def choose(self, in_flight: dict[int, int]) -> int | None:
        chosen = self._sampler.choose(self._first_version, in_flight, 0.0 if any(in_flight.values()) else POLL_SECONDS)
        if chosen is not None:
            self._none_since = None
            return chosen
        self._none_since = self._none_since or time.monotonic()
        seconds, problems = self._sampler.give_up_after()
        if time.monotonic() - self._none_since > seconds:
            problems = f" ({problems})" if problems else ""
            raise RunFailed(f"rollout.engine_urls: no server has had weights that may be used for {seconds:g} s{problems}")
        return None

    def read_versions(self, names: Sequence[str]) -> list[int] | None:
        return self._sampler.versions_from(self._first_version, names)
