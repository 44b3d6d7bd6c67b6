"""Sampling by servers while the policy is trained: they get new weights without ending what is in
flight.

Every rank follows each server in a thread: rank 0 asks it to load the newest weights, the others
ask which it has. Each token keeps the version of the weights that sampled it. Weights are written
by remote_sampling.py, requests are sent there.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lmforge.core.distributed.waiting import start_in_thread
from lmforge.core.errors import RunFailed
from lmforge.core.files.untrusted import cut
from lmforge.post.rl.engines.rollout_server import RolloutServer, ServerProblem
from lmforge.post.rl.remote_sampling import (
    MAX_TAKE_BACKS,
    POLL_SECONDS,
    RemoteSampler,
    RemoteSession,
)
from lmforge.post.rl.sampler import SamplingSession

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

    `problem`: why it does not answer, or empty; `reason`: why it is not used, or empty;
    `left_out_at`: the newest version when an answer of it could not be used; `take_backs`: how
    often it was used again since that version.
    """

    confirmed: int | None = None
    loading: Path | None = None
    problem: str = ""
    reason: str = ""
    left_out_at: int | None = None
    take_backs: int = 0


class AsyncSampler:
    """Samples by the servers of a RemoteSampler, which gives them weights while they sample.

    Every rank has one.
    """

    def __init__(self, remote: RemoteSampler) -> None:
        self._remote, self._dist_ctx = remote, remote.dist_ctx
        # Guards all that follows.
        self._changed = threading.Condition()
        self._states = [_State() for _ in remote.servers]
        self._newest: int | None = None
        self._folder = Path()
        self._closed = False
        self._followers = [
            start_in_thread(partial(self._follow, index), f"follows {server.url}")
            for index, server in enumerate(remote.servers)
        ]

    def publish(self, version: int) -> None:
        """Write the weights as they are for the servers, and go on. Every rank calls it."""
        if version == self._newest:
            return
        folder = self._remote.write(version)
        with self._changed:
            self._newest, self._folder = version, folder
            for state in self._states:
                state.take_backs = 0
            in_use = {state.loading for state in self._states} | {folder}
            self._changed.notify_all()
        self._remote.remove_weights({each for each in in_use if each is not None})

    def forget(self) -> None:
        """After a rollback a version is of other weights than before: from now on no token of those
        counts, and no server has weights before the next `publish`. Every rank calls it.
        """
        name = self._remote.new_name()
        with self._changed:
            self._newest, self._remote.name = None, name
            for state in self._states:
                state.confirmed = None
                if state.left_out_at is not None:
                    # Before all versions: another chance with the next weights.
                    state.left_out_at = -1

    @contextmanager
    def session(
        self, num_requests: int, version: int, *, greedy: bool = False
    ) -> Iterator[SamplingSession]:
        """As `RemoteSampler.session`: tokens of these weights alone."""
        self.publish(version)
        with self._dist_ctx.raise_on_all():
            yield self.session_from(version, greedy=greedy)

    def session_from(self, first_version: int, *, greedy: bool = False) -> RemoteSession:
        """A session for one thread, with weights from `first_version` to the newest while it goes
        on. It raises RunFailed where no server is left.
        """
        return RemoteSession(
            _ServersFrom(self, first_version), self._remote.settings.params(greedy)
        )

    @property
    def name(self) -> str:
        """What all versions that servers have been given since the last `forget` are called."""
        return self._remote.name

    # --- what a server has ------------------------------------------------------------------------

    def _follow(self, index: int) -> None:
        """Keep a server at the newest weights."""
        server, state = self._remote.servers[index], self._states[index]
        while True:
            with self._changed:
                # Only rank 0 can give a server its weights again, and others may be the only ones
                # to notice that it lost them.
                seconds = CHECK_SECONDS if self._dist_ctx.is_rank0 else None
                self._changed.wait_for(lambda: self._closed or self._is_stale(state), seconds)
                if self._closed:
                    return
                if self._newest is None:
                    continue
                state.loading = folder = self._folder
                wanted = self._remote.name_of(self._newest)
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
        return state.left_out_at < self._newest or (
            not others and state.take_backs < MAX_TAKE_BACKS
        )

    def _update(self, server: RolloutServer, folder: Path, wanted: str) -> tuple[str, str]:
        """What a server calls its weights now, empty if it does not say, and why they are not those
        that are wanted.
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
            self._remote.warn(f"{problem}; it is left out until it has the weights")
        # None also for a name from before `forget`, which may have been called meanwhile.
        confirmed = self._remote.version_of(name)
        has_wanted = name == wanted and confirmed is not None
        takes_back = state.left_out_at is not None and self._is_stale(state)
        is_back = takes_back or bool(state.problem)
        state.confirmed, state.problem = confirmed, problem
        state.reason = (
            ""
            if has_wanted
            else problem or f"{server.url}: has the weights {cut(name)}, not {wanted}"
        )
        if has_wanted:
            if takes_back:
                state.left_out_at, state.take_backs = None, state.take_backs + 1
            if is_back and self._dist_ctx.is_rank0:
                self._remote.warn(f"{server.url}: has the current weights, and is used again")
            self._changed.notify_all()

    # --- what sessions ask ------------------------------------------------------------------------

    def choose(self, first_version: int, in_flight: dict[int, int], seconds: float) -> int | None:
        """The server with the fewest requests of those that have these weights or newer ones,
        waited for some seconds. Raises what ended a thread that follows a server.
        """
        for follower in self._followers:
            if follower.done():
                follower.result()

        def find() -> list[int]:
            usable = (
                each.left_out_at is None and each.confirmed is not None for each in self._states
            )
            return [
                at
                for at, each in enumerate(usable)
                if each and (self._states[at].confirmed or 0) >= first_version
            ]

        with self._changed:
            self._changed.wait_for(find, seconds)
            return min(find(), key=lambda index: (in_flight.get(index, 0), index), default=None)

    def leave_out(self, index: int, problem: str) -> None:
        with self._changed:
            state = self._states[index]
            if state.left_out_at is None:
                state.left_out_at, state.reason = self._newest, problem
                self._remote.warn(f"{problem}; its requests go to others")
                self._changed.notify_all()

    def versions_from(self, first_version: int, names: Sequence[str]) -> list[int] | None:
        """The versions that a server named, or None where one of them is none of these."""
        versions, newest = [self._remote.version_of(name) for name in names], self._newest or 0
        known = [each for each in versions if each is not None and first_version <= each <= newest]
        return known if len(known) == len(versions) else None

    def give_up_after(self) -> tuple[float, str]:
        """How long to wait for a server, and what is wrong with them."""
        longest, none_answers = (
            1.5 * self._remote.timeout_seconds,
            all(state.problem for state in self._states),
        )
        reasons = "; ".join(state.reason for state in self._states if state.reason)
        soon = none_answers and not self._remote.starts_servers
        return min(COME_BACK_SECONDS, longest) if soon else longest, reasons

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
        self.server = sampler.remote.server
        self._name = sampler.name
        self._none_since: float | None = None

    def choose(self, in_flight: dict[int, int]) -> int | None:
        chosen = self._sampler.choose(
            self._first_version, in_flight, 0.0 if any(in_flight.values()) else POLL_SECONDS
        )
        if chosen is not None:
            self._none_since = None
            return chosen
        self._none_since = self._none_since or time.monotonic()
        seconds, problems = self._sampler.give_up_after()
        if time.monotonic() - self._none_since > seconds:
            problems = f" ({problems})" if problems else ""
            raise RunFailed(
                f"rollout.engine_urls: no server has had weights that may be used for {seconds:g}"
                f" s{problems}"
            )
        return None

    def leave_out(self, index: int, problem: str) -> None:
        if self._name == self._sampler.name:  # else they are of weights from before a rollback
            self._sampler.leave_out(index, problem)

    def read_versions(self, names: Sequence[str]) -> list[int] | None:
        return self._sampler.versions_from(self._first_version, names)
