"""The nodes of one run: how their launchers connect, which nodes are missing or lost, and how all
end with one exit status.

On each node one launcher (`lmforge pretrain …` with NODES_VARIABLE and its neighbours set) starts
the ranks of that node. The first one serves a store for the others. torch's launcher, which starts
the ranks, does not name a missing node, and does not distinguish an interruption from invalid
input. This store serves both. Ranks themselves are in `distributed.py`.
"""

import json
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from lmforge import __version__
from lmforge.core.distributed.environment import (
    ADDRESS_VARIABLE,
    NODE_RANK_VARIABLE,
    NODES_VARIABLE,
    STATUS_VARIABLE,
)
from lmforge.core.distributed.launch import (
    Rendezvous,
    launcher_environment,
    print_restart,
    start_ranks,
)
from lmforge.core.distributed.processes import INTERRUPTED_STATUSES
from lmforge.core.distributed.rendezvous import answer_with_port, ask_rank0, free_port
from lmforge.core.distributed.waiting import (
    await_listener,
    call_bounded,
    describe_connection_error,
    print_line,
    wait_until,
)
from lmforge.core.errors import EXIT_PEER_LOST, PeerLost, UserError, name_some
from lmforge.core.files.atomic_files import atomic_write_text
from lmforge.core.files.untrusted import cut, quoted
from lmforge.core.options.operation import MAX_PORT

JOIN_SECONDS = 600.0
# These distinguish the starts of a job, which is queued again.
START_VARIABLES = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "PBS_JOBID")
# After this time a node whose launcher sends no heartbeat is lost, and so is the first node if it
# does not answer.
LOST_AFTER_SECONDS = 60.0
BEAT_SECONDS = 2.0
# The time that ranks get to end by themselves after another node's have failed; and again after
# SIGTERM.
PATIENCE_SECONDS = 30.0
# The first node waits this long for the others to read its decision.
READ_SECONDS = 10.0
# The precedence of statuses where nodes end with different ones: invalid input, interrupted,
# failed, a lost peer.
PRECEDENCE = [2, *INTERRUPTED_STATUSES, 1, EXIT_PEER_LOST]
T = TypeVar("T")


@dataclass(frozen=True)
class NodeGroup:
    """The nodes of a run, by name; `rank` is this one's index, `address` and `port` are of the
    first. Where the port is 0, it takes a free one.
    """

    names: tuple[str, ...]
    rank: int
    address: str
    port: int

    def describe(self, ranks: Sequence[int]) -> str:
        """Names of some of the nodes, cut where there are many."""
        return name_some([self.names[rank] for rank in ranks])

    def first_lost(self) -> PeerLost:
        """The error to raise where the launcher of the first node does not answer."""
        return PeerLost(f"{self.names[0]} does not answer: lost, or its launcher has ended")


def read_node_group() -> NodeGroup | None:
    """The nodes from the variables of a launcher script; None where there is no such script, or
    this process is a rank.

    Raises UserError where the variables do not fit together.
    """
    if NODES_VARIABLE not in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        return None
    nodes = os.environ[NODES_VARIABLE]
    address = os.environ.get(ADDRESS_VARIABLE, "")
    names = tuple(name for name in nodes.split(",") if name)
    host, _, port = address.rpartition(":")
    if not names or not host or not port.isdecimal() or int(port) > MAX_PORT:
        raise UserError(
            f"environment: {NODES_VARIABLE} = {cut(nodes)!r}, {ADDRESS_VARIABLE} ="
            f" {cut(address)!r}: expected comma-separated names, and HOST:PORT"
        )
    return NodeGroup(names, _node_rank(names), host, int(port))


def _node_rank(names: tuple[str, ...]) -> int:
    text = os.environ.get(NODE_RANK_VARIABLE, os.environ.get("SLURM_NODEID", ""))
    if text:
        if not text.isdecimal() or int(text) >= len(names):
            raise UserError(
                f"environment: {NODE_RANK_VARIABLE} = {quoted(text)}: expected a number below"
                f" {len(names)}"
            )
        return int(text)
    own = socket.gethostname()
    short = [name.partition(".")[0] for name in names]
    if len(names) == 1:
        return 0
    if own.partition(".")[0] not in short:
        raise UserError(
            f"environment: {NODES_VARIABLE} names {cut(', '.join(names))}, and this host is {own}"
        )
    return short.index(own.partition(".")[0])


def launch_on_node(
    group: NodeGroup,
    num_processes: int,
    arguments: list[str],
    *,
    max_restarts: int,
    restart_arguments: Sequence[str],
    has_begun: Callable[[], bool],
) -> int:
    """As `launch_local`, together with the launchers of the other nodes: all return the same
    status. Where STATUS_VARIABLE names a file, the first node writes it there.

    Returns EXIT_PEER_LOST where a node was lost: the program that started the launchers may start
    them again. Raises UserError where the nodes do not fit together or the port is taken, PeerLost
    where some nodes do not join.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    with launcher_environment() as interruption:
        try:
            node_store = NodeStore(group)
            node_store.check_in(num_processes)
            for number in range(max_restarts + 1):
                words = [*arguments, *(restart_arguments if number else ())]
                with StartAttempt(node_store, number) as attempt:
                    attempt.status, attempt.reason = start_ranks(
                        num_processes, words, interruption, attempt.rendezvous
                    )
                if attempt.ended_by_watcher:
                    interruption.status = 0  # the signal was our own
                attempt.was_interrupted = interruption.status != 0
                status, again = attempt.agree(number < max_restarts and has_begun())
                if group.rank == 0 and (
                    again or (status == EXIT_PEER_LOST and number == max_restarts)
                ):
                    print_restart(number, max_restarts, attempt.reason, arguments)
                if not again:
                    write_status(group, status)
                    return status
        except SignalException:
            write_status(group, interruption.status)
            return interruption.status
        except UserError:
            if path := os.environ.get(STATUS_VARIABLE):
                atomic_write_text(Path(path), "2\n")
            raise
    return EXIT_PEER_LOST


def write_status(group: NodeGroup, status: int) -> None:
    """On the first node, write the status of all to the file that STATUS_VARIABLE names."""
    if group.rank == 0 and (path := os.environ.get(STATUS_VARIABLE)):
        atomic_write_text(Path(path), f"{status}\n")


class NodeStore:
    """The store of a run's launchers, from this node's point of view."""

    def __init__(self, group: NodeGroup) -> None:
        self.group = group
        self._store = _open_store(group)
        self._is_cut_off = False
        self.lost: set[int] = set()

    def call(self, fn: Callable[[Any], T]) -> T:
        """`fn` of the store.

        Raises PeerLost where the first node, which serves it, does not answer.
        """
        if not self._is_cut_off:
            try:
                if self.group.rank == 0:
                    return fn(self._store)
                return call_bounded(partial(fn, self._store), LOST_AFTER_SECONDS)
            except (RuntimeError, TimeoutError):
                # A call that has not returned blocks the store's client: later calls would wait for
                # it.
                self._is_cut_off = True
        raise self.group.first_lost()

    def check_in(self, num_processes: int) -> None:
        """Wait for all nodes, and report which are missing.

        Raises PeerLost after the time limit, UserError where the versions or numbers of processes
        differ.
        """
        group = self.group
        own = {"lmforge": __version__, "processes": num_processes}
        self.put(f"node/{group.rank}", json.dumps(own))
        if group.rank == 0:
            problem = self._await_nodes() or self._differences(own)
            self.put("met", problem or "")
        else:
            problem = self.get("met", JOIN_SECONDS + 30)
        if problem:
            raise (PeerLost if problem.endswith("not joined") else UserError)(problem)

    def _await_nodes(self) -> str | None:
        """The message about nodes that have not joined; on the first node."""
        group = self.group
        missing = list(range(len(self.group.names)))

        def are_all_here() -> bool:
            missing[:] = [rank for rank in missing if not self._store.check([f"node/{rank}"])]
            return not missing

        def line(waited: float) -> str:
            reason = (
                "not started, or cannot reach"
                f" {group.address}{f':{group.port}' if group.port else ''}"
            )
            return f"waiting for {group.describe(missing)}: {reason} ({waited:.0f} s)"

        if wait_until(are_all_here, JOIN_SECONDS, line):
            return None
        count = f"{len(missing)} of {len(group.names)} nodes have not joined"
        return f"{group.describe(missing)}: after {JOIN_SECONDS:.0f} s {count}"

    def _differences(self, own: dict[str, Any]) -> str | None:
        for rank, name in enumerate(self.group.names):
            theirs = json.loads(self._store.get(f"node/{rank}"))
            for what, value in own.items():
                if theirs.get(what) != value:
                    return (
                        f"{name} has {what} {theirs.get(what)}, {self.group.names[0]} has {value};"
                        " use the same on all nodes"
                    )
        return None

    def put(self, key: str, value: str) -> None:
        """Set a value. Raises PeerLost where the first node does not answer."""
        self.call(lambda store: store.set(key, value))

    def get(self, key: str, seconds: float) -> str:
        """A value that the first node sets. Raises PeerLost where it does not arrive in time."""
        if not wait_until(lambda: self.call(lambda store: bool(store.check([key]))), seconds):
            raise self.group.first_lost()
        return self.call(lambda store: str(store.get(key).decode()))


class StartAttempt:
    """One start of all ranks, a context that every node enters.

    In it, a thread watches the other nodes and ends this node's ranks if another one fails.
    """

    def __init__(self, node_store: NodeStore, number: int) -> None:
        self._node_store = node_store
        self._group = node_store.group
        self._prefix = f"attempt/{number}"
        self.status = EXIT_PEER_LOST
        self.reason = ""
        self.ended_by_watcher = self.was_interrupted = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="nodes", daemon=True)
        if self._group.rank == 0:
            port = str(free_port())
            node_store.put(f"{self._prefix}/port", port)
        else:
            port = node_store.get(f"{self._prefix}/port", JOIN_SECONDS)
        self.rendezvous = Rendezvous(
            len(self._group.names),
            self._group.rank,
            f"{self._group.address}:{port}",
            f"lmforge-{number}",
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        if self.ended_by_watcher and self.status in INTERRUPTED_STATUSES:
            self.status = EXIT_PEER_LOST

    def agree(self, may_restart: bool) -> tuple[int, bool]:
        """(status of all nodes, whether all start again). The first node decides."""
        if self._group.rank == 0:
            return self._node_store.call(partial(self._decide, may_restart))
        node_store = self._node_store
        prefix = self._prefix
        try:
            node_store.put(f"{prefix}/reason/{self._group.rank}", self.reason)
            node_store.put(f"{prefix}/status/{self._group.rank}", str(self.status))
            status, again = json.loads(node_store.get(f"{prefix}/verdict", math.inf))
            node_store.call(lambda store: store.add(f"{prefix}/read", 1))
        except PeerLost as problem:
            for line in ([self.reason] if self.reason else []) + (
                [] if self.ended_by_watcher else [str(problem)]
            ):
                print_line(line)
            return (self.status if self.status in INTERRUPTED_STATUSES else EXIT_PEER_LOST), False
        return int(status), bool(again)

    def _decide(self, may_restart: bool, store: Any) -> tuple[int, bool]:
        """The result of `agree` for all nodes, from the status of each; on the first node."""
        node_store = self._node_store
        num_nodes = len(self._group.names)
        heartbeats = _PeerHeartbeats()
        statuses = {0: self.status}
        reasons = [self.reason]
        store.set(f"{self._prefix}/status/0", str(self.status))

        def have_all_ended() -> bool:
            for rank in set(range(num_nodes)) - statuses.keys():
                if store.check([key := f"{self._prefix}/status/{rank}"]):
                    statuses[rank] = int(store.get(key))
                    reasons.append(store.get(f"{self._prefix}/reason/{rank}").decode())
                elif rank in node_store.lost or heartbeats.is_lost(store, rank):
                    node_store.lost.add(rank)
                    statuses[rank] = EXIT_PEER_LOST
                    reasons.append(f"{self._group.names[rank]}: its launcher or the host is lost")
            return len(statuses) == num_nodes

        wait_until(have_all_ended)
        for reason in filter(None, reasons):
            print_line(reason)
            self.reason = reason
        status = next(
            (each for each in PRECEDENCE if each in statuses.values()), max(statuses.values())
        )
        if node_store.lost and status in INTERRUPTED_STATUSES and not self.was_interrupted:
            status = EXIT_PEER_LOST  # the ranks of a lost launcher have made all of them save
        again = status == EXIT_PEER_LOST and may_restart and not node_store.lost
        store.set(f"{self._prefix}/verdict", json.dumps([status, again]))
        readers = num_nodes - 1 - len(node_store.lost)
        # The store ends with this process.
        wait_until(lambda: store.add(f"{self._prefix}/read", 0) >= readers, READ_SECONDS)
        return status, again

    def _watch(self) -> None:
        """Send heartbeats of this node; end its ranks when another node is lost or its ranks have
        failed.
        """
        heartbeats = _PeerHeartbeats()
        failed_at = None
        while not self._stop.wait(BEAT_SECONDS):
            try:
                lost, has_failed = self._node_store.call(partial(self._look, heartbeats))
            except PeerLost as problem:
                self._end_ranks(str(problem))
                return
            if lost:
                self._end_ranks(
                    f"{self._group.describe(lost)}: no heartbeat for {LOST_AFTER_SECONDS:.0f} s"
                )
                return
            if has_failed and failed_at is None:
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > PATIENCE_SECONDS:
                self._end_ranks("")
                return

    def _look(self, heartbeats: "_PeerHeartbeats", store: Any) -> tuple[list[int], bool]:
        """(nodes that are lost, whether ranks of another node have failed)."""
        group = self._group
        prefix = self._prefix
        store.set(f"beat/{group.rank}", str(time.monotonic()))
        others = [rank for rank in range(len(group.names)) if rank != group.rank]
        if group.rank == 0 and (
            lost := [rank for rank in others if heartbeats.is_lost(store, rank)]
        ):
            self._node_store.lost |= set(lost)
            store.set(f"{prefix}/lost", json.dumps(lost))
        if store.check([f"{prefix}/lost"]):
            return json.loads(store.get(f"{prefix}/lost")), False
        statuses = (f"{prefix}/status/{rank}" for rank in others)
        return [], any(store.check([key]) and store.get(key) != b"0" for key in statuses)

    def _end_ranks(self, reason: str) -> None:
        if self._stop.is_set():
            return
        self.ended_by_watcher = True
        if reason and self._group.rank in (0, 1):
            print_line(f"{reason}; the ranks of {self._group.names[self._group.rank]} end")
        os.kill(os.getpid(), signal.SIGTERM)
        # They may wait forever for lost ranks, and have nothing to save.
        if not self._stop.wait(PATIENCE_SECONDS):
            for process in _children():
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)


class _PeerHeartbeats:
    """When the other nodes were last heard of, by this node's clock."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[bytes, float]] = {}

    def is_lost(self, store: Any, rank: int) -> bool:
        """Whether a node has sent no heartbeat for LOST_AFTER_SECONDS, as seen in calls to this
        object.
        """
        key = f"beat/{rank}"
        now = time.monotonic()
        value = store.get(key) if store.check([key]) else b""
        last, since = self._seen.get(rank, (None, now))
        if value != last:
            self._seen[rank] = value, now
            return False
        return now - since > LOST_AFTER_SECONDS


def agree_on_address(group: NodeGroup, seconds: float = JOIN_SECONDS) -> tuple[str, int]:
    """The host and port where the others reach the first node; where the port is 0, it takes a free
    one, for which the others ask it. Raises PeerLost where it does not answer in so many seconds.
    """
    if group.port:
        return group.address, group.port
    identity = "-".join([*group.names, *(os.environ.get(name, "") for name in START_VARIABLES)])
    if group.rank:
        return ask_rank0(identity, group.rank, [group.address], group.names[group.rank], seconds)
    port = free_port()
    answer_with_port(identity, len(group.names), port)
    return group.address, port


def _open_store(group: NodeGroup) -> Any:
    """The store that the first node serves.

    Raises UserError where it cannot, PeerLost where it is not reached.
    """
    import torch.distributed as dist

    address, port = agree_on_address(group)
    where = f"{address}:{port}"
    if group.rank == 0:
        try:
            return dist.TCPStore(address, port, is_master=True, wait_for_workers=False)
        except dist.DistNetworkError as problem:
            if "failed to listen" in str(problem) or "in use" in str(problem):
                raise UserError(
                    f"port {port} of {group.names[0]} is in use: by another run? no other is taken,"
                    " since --launch.port names this one: give another, or none for any that is"
                    " free"
                ) from None
            raise UserError(
                f"{where}: this is not an address of {group.names[0]}; give its --launch.address"
            ) from None
    silence = f"{group.names[group.rank]} cannot reach {group.names[0]} at {where}"
    try:
        await_listener(
            address,
            port,
            JOIN_SECONDS,
            lambda reason, waited: f"{silence} yet: {reason} ({waited:.0f} s)",
        )
        return dist.TCPStore(
            address, port, is_master=False, timeout=timedelta(seconds=LOST_AFTER_SECONDS)
        )
    except OSError as problem:
        raise PeerLost(f"{silence}: {describe_connection_error(problem)}") from None
    except RuntimeError:
        raise PeerLost(f"{silence}: no answer") from None


def _children() -> list[int]:
    """The process ids of the ranks that this process has started."""
    lists = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
    return [int(pid) for pids in lists for pid in pids]
