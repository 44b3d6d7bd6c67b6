"""Reports of the ranks to rank 0 before they have joined: through the store of the rendezvous, in bounded time.

No process group is needed: a rank that is missing, stuck or disconnected costs the others a time-out, and is named by its
number.
"""

import json
import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from lmforge.cluster.joining import find_rank0
from lmforge.cluster.rank_info import RankInfo, count_restarts
from lmforge.cluster.waiting import await_listener, call_bounded, wait_until
from lmforge.errors import RunFailed

# The others time out later than rank 0, which waits for a late rank in each of several phases.
PATIENCE_FACTOR = 3.0


class RankReports:
    """The reports of each phase, by rank. Values are whatever JSON holds.

    Raises RunFailed where rank 0 cannot be reached in time.
    """

    def __init__(self, info: RankInfo, timeout_seconds: float) -> None:
        self._rank, self._timeout = info.rank, timeout_seconds
        self._ranks = list(range(info.world_size))
        self.missing: list[int] = []
        self.store: dist.Store = dist.HashStore()
        self._own: dict[str, Any] = {}
        if info.world_size > 1:
            find_rank0(info)
            self.store = _connect(info, timeout_seconds)

    def post(self, phase: str, value: Any) -> None:
        """Send this rank's report of a phase to rank 0."""
        if self._rank == 0:
            self._own[phase] = value
        else:
            self.store.set(f"{phase}/{self._rank}", json.dumps(value))

    def collect(self, phase: str) -> dict[int, Any]:
        """The reports by rank, on rank 0. A rank that has not answered in time is `missing` from then on."""
        reports, waited_for = {0: self._own[phase]}, [rank for rank in self._ranks if rank]

        def all_have_answered() -> bool:
            nonlocal waited_for
            for rank in waited_for:
                if self.store.check([f"{phase}/{rank}"]):
                    reports[rank] = json.loads(self.store.get(f"{phase}/{rank}"))
            waited_for = [rank for rank in waited_for if rank not in reports]
            return not waited_for

        wait_until(all_have_answered, self._timeout)
        self.missing += waited_for
        self._ranks = [rank for rank in self._ranks if rank not in waited_for]
        return dict(sorted(reports.items()))

    def publish(self, name: str, value: Any) -> None:
        """Publish a value for all ranks, on rank 0."""
        self.store.set(name, json.dumps(value))

    def receive(self, name: str) -> Any:
        """Wait for the value that rank 0 publishes."""
        answer = run_bounded(partial(self._wait_for, name), PATIENCE_FACTOR * self._timeout)
        if "error" in answer:
            raise RunFailed(f"rank {self._rank}: rank 0 has not answered ({answer['error'][:200]}); see its output")
        return answer["value"]

    def _wait_for(self, name: str) -> dict[str, Any]:
        self.store.wait([name], timedelta(seconds=PATIENCE_FACTOR * self._timeout))
        return {"value": json.loads(self.store.get(name))}

    def await_departures(self) -> None:
        """On rank 0, whose process serves the store: wait until the others have read the last answer, or a moment."""
        wait_until(lambda: self.store.add("left", 0) >= len(self._ranks) - 1, min(self._timeout, 5.0))

    def leave(self) -> None:
        """Tell rank 0 that this rank no longer needs the store."""
        run_bounded(lambda: {"left": self.store.add("left", 1)}, self._timeout)


def _connect(info: RankInfo, timeout_seconds: float) -> dist.Store:
    """The store of all ranks. Unlike `dist.rendezvous` this does not wait for the others."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = info.is_rank0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        if not serves:
            await_listener(address, port, timeout_seconds)
        store = dist.TCPStore(
            address,
            port,
            is_master=serves,
            wait_for_workers=False,
            multi_tenant=True,
            timeout=timedelta(seconds=timeout_seconds),
        )
    except (RuntimeError, OSError) as problem:
        what = "cannot listen at" if serves else "cannot reach"
        reason = " ".join(str(problem).split())[:200]
        hint = "choose a free MASTER_PORT" if serves else "check that rank 0 runs, MASTER_ADDR, and firewalls between hosts"
        raise RunFailed(f"rank {info.rank} {what} {address}:{port} ({reason}); {hint}") from None
    return dist.PrefixStore(f"lmforge-doctor-{count_restarts()}", store)


def run_bounded(fn: Callable[[], dict[str, Any]], seconds: float) -> dict[str, Any]:
    """The result of `fn`, or {"error": reason} where it raises or takes too long; it then continues in a thread."""
    try:
        return call_bounded(fn, seconds)
    except TimeoutError as problem:
        return {"error": f"{problem}" or f"not done after {seconds:g} s"}
    except Exception as problem:
        return {"error": " ".join(f"{problem}".split()) or type(problem).__name__}
