"""The report of a stall: which rank is stuck, which ranks wait for it, and where each of them is.

`write_evidence` writes what a stalled rank knows about itself, `read_peer` reads what another rank
wrote, `classify_ranks` decides from that which ranks are stuck, and `report_lines` writes the
report. Only files are read, since a rank that hangs cannot answer.
"""

import json
import os
import platform
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lmforge.core.distributed.processes import read_process_stat
from lmforge.core.errors import UserError
from lmforge.core.files.atomic_files import atomic_write_text
from lmforge.core.files.untrusted import read_json
from lmforge.core.records.run_records import Count
from lmforge.ops.monitor.flight_recorder import CollectiveRecord, recent_collectives
from lmforge.ops.monitor.heartbeat import (
    COMPILING,
    FINAL_PHASES,
    HeartbeatRecord,
    heartbeat_path,
    read_overwritten,
)

# How many of the innermost calls of a stack are printed; the file has them all.
FRAMES_SHOWN = 8
# Parts of the paths of code that is not the user's and not ours, apart from the wrapper of
# `Work.wait`.
LIBRARY_PATHS = (
    "site-packages",
    "dist-packages",
    f"{os.sep}lib{os.sep}python",
    "<frozen",
    os.path.join("lmforge", "ops", "monitor", "stragglers.py"),
)
HEALTHY = ""
STUCK = "stuck"
WAITING = "waits"


class StackFrame(NamedTuple):
    """One call of a stack."""

    file: str
    line: Count
    function: str
    source_line: str

    @property
    def is_user_code(self) -> bool:
        """Whether it is of this program or its user, and not of a library."""
        return not any(part in self.file for part in LIBRARY_PATHS)

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} {self.function}"


@dataclass(frozen=True)
class PeerStatus:
    """What is known of a rank from its files.

    `heartbeat` is a HeartbeatRecord, empty where there is none; `state` is running, missing, ended,
    gone, stopped or silent; `stack` and `collectives` are those of this stall, or empty.
    """

    rank: int
    heartbeat: dict[str, Any]
    state: str
    silent_seconds: float = 0.0
    stack: Sequence[StackFrame] = ()
    collectives: Sequence[CollectiveRecord] = ()

    @property
    def progress(self) -> tuple[int, int]:
        """How far it is: its step, and the number of phases begun in it."""
        return (self.heartbeat["step"], self.heartbeat["number"])

    @property
    def seconds_in_phase(self) -> float:
        """How long it has been in its phase; 0 where there is no heartbeat."""
        beat = self.heartbeat
        if beat:
            return beat["written"] - beat["since"] + self.silent_seconds
        return 0.0

    @property
    def is_compiling(self) -> bool:
        return self.state == "running" and self.heartbeat["phase"] == COMPILING

    @property
    def pending_collective(self) -> CollectiveRecord | None:
        """The oldest collective that it has begun and that is not complete."""
        return next((each for each in self.collectives if each.pending), None)

    @property
    def location(self) -> str:
        """The innermost call that is not a library's."""
        own = [frame for frame in self.stack if frame.is_user_code]
        if self.stack:
            return str(own[-1] if own else self.stack[-1])
        return ""


@dataclass(frozen=True)
class StallEvidence:
    """The content of `stall_file`. `progress` says which stall it is of."""

    progress: tuple[int, int]
    stack: list[StackFrame]
    collectives: list[CollectiveRecord]


def stall_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.stall.json"


def write_evidence(
    folder: Path, stacks_file: Path, rank: int, progress: tuple[int, int], thread_id: int
) -> None:
    """Write where this rank is: the stack of the training thread and its collectives for
    `read_peer`, and the stacks of all threads into `stacks_file`.
    """
    names = {each.ident: each.name for each in threading.enumerate()}
    extracted = {
        ident: traceback.extract_stack(frame) for ident, frame in sys._current_frames().items()
    }
    collectives = recent_collectives()
    stack = [
        StackFrame(call.filename, call.lineno or 0, call.name, call.line or "")
        for call in extracted.get(thread_id, [])
    ]
    evidence = StallEvidence(progress, stack, collectives)
    atomic_write_text(stall_file(folder, rank), json.dumps(asdict(evidence)), sync=False)
    lines = []
    del extracted[threading.get_ident()]  # the watchdog's own thread
    for ident, calls in sorted(extracted.items(), key=lambda pair: pair[0] != thread_id):
        suffix = ""
        if ident == thread_id:
            suffix = ", the training thread"
        lines += [f"thread {names.get(ident, ident)}{suffix}:\n", *calls.format(), "\n"]
    lines += [
        f"{each.group} {each.sequence} {each.operation}{' pending' if each.pending else ''}\n"
        for each in collectives
    ]
    stacks_file.write_text("".join(lines), encoding="utf-8")


def read_peer(
    folder: Path, rank: int, own_written_at: float, silent_after_seconds: float
) -> PeerStatus:
    """What `rank` has written about itself.

    A rank is silent if its heartbeat is older than `own_written_at`, a time of the same file
    system's clock, by more than `silent_after_seconds`.
    """
    if (content := read_overwritten(heartbeat_path(folder, rank), HeartbeatRecord)) is None:
        return PeerStatus(rank, {}, "missing")
    written_at = content[0]
    heartbeat = asdict(content[1])
    if heartbeat["phase"] in FINAL_PHASES:
        return PeerStatus(rank, heartbeat, "ended")
    silent = max(0.0, own_written_at - written_at)
    state = _process_state(heartbeat)
    if state == "running" and silent > silent_after_seconds:
        state = "silent"
    with suppress(OSError, UserError):  # it has not noticed that it stalls, or cannot write
        evidence = read_json(stall_file(folder, rank), StallEvidence)
        if evidence.progress == (heartbeat["step"], heartbeat["number"]):
            return PeerStatus(rank, heartbeat, state, silent, evidence.stack, evidence.collectives)
    return PeerStatus(rank, heartbeat, state, silent)


def _process_state(heartbeat: dict[str, Any]) -> str:
    """The state of the process of a heartbeat. On another host it is taken to be running."""
    if heartbeat["host"] != platform.node() or not os.path.isdir("/proc/self"):
        return "running"
    stat = read_process_stat(heartbeat["process"])
    if stat is None:
        return "gone"
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(stat.state, "running")


def classify_ranks(peers: Sequence[PeerStatus]) -> dict[int, str]:
    """Which ranks are stuck in this stall and which wait; neither where nothing distinguishes them.

    A rank that cannot continue (missing, ended, gone, stopped, silent) is stuck. Otherwise the
    ranks that wait in no collective while others do are stuck, those with the least progress among
    them. Where all wait in collectives, none is stuck: they diverged. Where none waits in a
    collective, the ranks with the least progress are stuck.
    """
    if any(peer.state != "running" for peer in peers):
        return {peer.rank: WAITING if peer.state == "running" else STUCK for peer in peers}
    free = [peer for peer in peers if not peer.pending_collective]
    least = min((peer.progress for peer in free), default=None)
    stuck = {peer.rank for peer in free if peer.progress == least}
    if len(stuck) == len(peers):
        return dict.fromkeys(stuck, HEALTHY)
    return {peer.rank: STUCK if peer.rank in stuck else WAITING for peer in peers}


def compiling_peers(peers: Sequence[PeerStatus], patience_seconds: float) -> list[PeerStatus]:
    """The ranks that the others wait for, if they have been compiling for less than
    `patience_seconds`: this is not reported as a stall.
    """
    verdict = classify_ranks(peers)
    return [
        peer
        for peer in peers
        if peer.is_compiling
        and verdict[peer.rank] != WAITING
        and peer.seconds_in_phase < patience_seconds
    ]


def compiling_line(compiling: Sequence[PeerStatus], num_ranks: int) -> str:
    """The report about ranks that compile, instead of a stall."""
    who = ""
    if num_ranks > 1:
        who = f"{_format_ranks(compiling)}: "
    longest = max(peer.seconds_in_phase for peer in compiling)
    return f"{who}still compiling after {_format_seconds(longest)} (a long first step is normal)"


def report_lines(
    peers: Sequence[PeerStatus],
    stalled_seconds: float,
    step_seconds: float | None,
    stacks_path: str,
) -> list[str]:
    """The lines of the report.

    `stacks_path` says where all stacks are; `step_seconds` is what a step took, if known.
    """
    verdict = classify_ranks(peers)
    stuck = [peer for peer in peers if verdict[peer.rank] == STUCK]
    waiting = [peer for peer in peers if verdict[peer.rank] == WAITING]
    step = min(peer.heartbeat["step"] for peer in peers if peer.heartbeat)
    usual = ""
    if step_seconds:
        usual = f" (a step takes {_format_seconds(step_seconds)})"
    stalled = f"no progress for {_format_seconds(stalled_seconds)} at step {step}{usual}"
    groups: dict[tuple[str, ...], list[PeerStatus]] = {}
    for peer in sorted(peers, key=lambda peer: verdict[peer.rank] != STUCK):
        groups.setdefault((*_describe(peer, verdict[peer.rank]), verdict[peer.rank]), []).append(
            peer
        )
    rows = [
        (
            _format_ranks(group),
            _format_hosts(group),
            phase,
            _format_time_in_phase(group),
            word,
            where,
        )
        for (phase, where, word), group in groups.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines = [f"STALL: {stalled}: {_summary(peers, stuck, waiting)}", *table]
    if not stuck and waiting:
        lines += _divergence_lines(waiting)
    # A compiler's stack is of no use to most readers.
    for peer in [each for each in stuck or peers if each.stack and not each.is_compiling][:1]:
        lines.append(f"  stack of rank {peer.rank}, most recent call last:")
        lines += [f"    {frame}: {frame.source_line}" for frame in peer.stack[-FRAMES_SHOWN:]]
    return [*lines, f"  all stacks: {stacks_path}"]


def _summary(
    peers: Sequence[PeerStatus], stuck: Sequence[PeerStatus], waiting: Sequence[PeerStatus]
) -> str:
    if stuck and waiting:
        wait = "wait"
        if len(waiting) == 1:
            wait = "waits"
        return (
            f"{_format_ranks(stuck)} {'is' if len(stuck) == 1 else 'are'} stuck,"
            f" {_format_ranks(waiting)} {wait} for it"
        )
    if waiting:
        same = _wait_in_one_collective(waiting)
        return (
            f"the ranks wait for each other, {'all in the same' if same else 'each in another'}"
            " collective"
        )
    if len(peers) == 1:
        return f"in {peers[0].heartbeat['phase']}"
    if stuck:
        return f"{_format_ranks(stuck)} cannot continue"
    return f"all {len(peers)} ranks are in {peers[0].heartbeat['phase']}"


def _describe(peer: PeerStatus, verdict: str) -> tuple[str, str]:
    """(phase, where): ranks with the same two share a line."""
    if not peer.heartbeat:
        return "", "never joined this run: it has no heartbeat"
    beat = peer.heartbeat
    process = f"process {beat['process']}"
    where = {
        "running": peer.location,
        "ended": f"its run ended: {beat['phase']}",
        "gone": f"{process} is gone: killed, or the host ran out of memory",
        "stopped": f"{process} is stopped (SIGSTOP); kill -CONT {beat['process']} lets it continue",
        "silent": (
            f"{process} has no heartbeat: it or its host is dead, or cannot write to the run's"
            " directory"
        ),
    }[peer.state]
    pending = peer.pending_collective
    if peer.state == "running" and pending and verdict != STUCK:
        where = f"{pending.operation} {pending.sequence} of {pending.group}, from {peer.location}"
    return beat["phase"], where


def _format_hosts(peers: Sequence[PeerStatus]) -> str:
    hosts = {peer.heartbeat["host"] for peer in peers if peer.heartbeat}
    if len(hosts) == 1:
        return hosts.pop()
    if hosts:
        return f"{len(hosts)} hosts"
    return ""


def _format_time_in_phase(peers: Sequence[PeerStatus]) -> str:
    """How long the ranks have been in their phase."""
    known = [peer.seconds_in_phase for peer in peers if peer.heartbeat]
    if known:
        return _format_seconds(max(known))
    return ""


def _wait_in_one_collective(waiting: Sequence[PeerStatus]) -> bool:
    """Whether each of these ranks has begun the same collective: then the code is not the reason
    that it does not end.
    """
    pending = [peer.pending_collective for peer in waiting]
    return (
        None not in pending
        and len({(each.group, each.sequence, each.operation) for each in pending if each}) == 1
    )


def _divergence_lines(waiting: Sequence[PeerStatus]) -> list[str]:
    """The last collective that the ranks had in common, and where they probably diverged; or that
    they did not diverge.
    """
    if _wait_in_one_collective(waiting):
        return [
            (
                "  Likely the network between these ranks, or a device: `lmforge doctor` on the same"
                " hosts names a bad link."
            )
        ]
    pending = [peer.pending_collective for peer in waiting if peer.pending_collective]
    same = {(each.group, each.sequence) for each in pending}
    if len(same) == 1 and len({each.operation for each in pending}) > 1:
        group, sequence = same.pop()
        seen = [each for peer in waiting for each in peer.collectives]
        operations = {
            each.operation for each in seen if (each.group, each.sequence) == (group, sequence - 1)
        }
        operation = ""
        if len(operations) == 1:
            operation = f", {operations.pop()}"
        last = ""
        if sequence > 1:
            last = f"last in common: {sequence - 1} of {group}{operation}. "
        return [f"  {last}Likely a branch that not every rank took, before one of these lines."]
    return ["  Likely a branch that not every rank took, or two threads that use one group."]


def _format_ranks(peers: Sequence[PeerStatus]) -> str:
    """rank 1 · ranks 0, 2-5"""
    numbers = [peer.rank for peer in peers]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return "ranks " + ", ".join("-".join(map(str, span)) for span in spans)


def _format_seconds(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:.0f} s"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds:.2g} s"
