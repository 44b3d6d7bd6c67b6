"""A stall, told: which rank is late, who waits for it, and where each of them is.

`evidence` is what a rank writes about itself when it has not gone on for too long; `look` reads what all ranks wrote;
`judge` says who is late, from that alone; `report` puts it in words. Nothing here asks a peer: one that hangs cannot answer.
"""

import json
import os
import platform
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmforge.monitor.flight_recorder import recent_collectives
from lmforge.monitor.heartbeat import FINAL_PHASES

# Of a stack, so many of the innermost calls are printed; the file has them all.
FRAMES_SHOWN = 8
# Parts of paths that are no one's own code.
LIBRARY_PATHS = (
    "site-packages",
    "dist-packages",
    f"{os.sep}lib{os.sep}python",
    "<frozen",
    __name__.split(".")[0] + "/train/stragglers.py",
)
HEALTHY, LATE, WAITING = "", "late", "waits"


@dataclass(frozen=True)
class StackFrame:
    """One call of a stack."""

    file: str
    line: int
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
    """What is known of a rank from outside. `beat` is its heartbeat; `state` is here, missing, ended, gone, stopped, waiting
    for a disk, or silent; `stack` and `collectives` are of this stall, or empty."""

    rank: int
    heartbeat: dict[str, Any]
    state: str
    silent_seconds: float = 0.0
    stack: Sequence[StackFrame] = ()
    collectives: Sequence[dict[str, Any]] = field(default=())

    @property
    def progress(self) -> tuple[int, int]:
        """How far it has come: step, and marks within it."""
        return (self.heartbeat["step"], self.heartbeat["number"])

    @property
    def pending_collective(self) -> dict[str, Any] | None:
        """The oldest collective that it has begun and that others have not come to."""
        return next((each for each in self.collectives if each["pending"]), None)

    @property
    def location(self) -> str:
        """The innermost call that is not a library's."""
        own = [frame for frame in self.stack if frame.is_user_code]
        return str(own[-1] if own else self.stack[-1]) if self.stack else ""


def stall_file(health_folder: Path, rank: int) -> Path:
    return health_folder / f"rank-{rank}.stall.json"


def write_evidence(health_folder: Path, stacks_file: Path, rank: int, progress: tuple[int, int], thread_id: int) -> None:
    """Write where this rank is: the stack of `thread` and its collectives for `look`, and all threads' into `stacks`."""
    names = {each.ident: each.name for each in threading.enumerate()}
    extracted = {ident: traceback.extract_stack(frame) for ident, frame in sys._current_frames().items()}
    collectives = recent_collectives()
    stack = [[frame.filename, frame.lineno, frame.name, frame.line] for frame in extracted.get(thread_id, [])]
    told = {"progress": progress, "stack": stack, "collectives": collectives}
    beside = stall_file(health_folder, rank).with_suffix(".partial")
    beside.write_text(json.dumps(told), encoding="utf-8")
    os.replace(beside, stall_file(health_folder, rank))
    lines = []
    for ident, calls in sorted(extracted.items(), key=lambda pair: pair[0] != thread_id):
        if ident == threading.get_ident():
            continue  # this one, which only looks
        lines += [f"thread {names.get(ident, ident)}{', which trains' if ident == thread_id else ''}:\n", *calls.format(), "\n"]
    lines += [
        f"{each['group']} {each['sequence']} {each['operation']}{' pending' if each['pending'] else ''}\n"
        for each in collectives
    ]
    stacks_file.write_text("".join(lines), encoding="utf-8")


def read_peer(health_folder: Path, rank: int, own_written_at: float, silent_after_seconds: float) -> PeerStatus:
    """What `rank` has told of itself. One whose file is older than `own_written`, a time of the same clock of the same
    file system, by more than `patience` seconds is silent."""
    path = health_folder / f"rank-{rank}.json"
    beat: dict[str, Any] = {}
    for _ in range(3):  # it may be caught half-written
        try:
            with open(path, encoding="utf-8") as file:
                written, beat = os.fstat(file.fileno()).st_mtime, json.load(file)
            break
        except FileNotFoundError:
            return PeerStatus(rank, {}, "missing")
        except ValueError:
            continue
    if not beat:
        return PeerStatus(rank, {}, "missing")
    if beat["phase"] in FINAL_PHASES:
        return PeerStatus(rank, beat, "ended")
    silent = max(0.0, own_written_at - written)
    state = _process_state(beat)
    if state in ("here", "elsewhere"):
        state = "silent" if silent > silent_after_seconds else "here"
    stack: list[StackFrame] = []
    collectives: list[dict[str, Any]] = []
    try:
        told = json.loads(stall_file(health_folder, rank).read_text(encoding="utf-8"))
        if told["progress"] == [beat["step"], beat["number"]]:
            stack, collectives = [StackFrame(*frame) for frame in told["stack"]], told["collectives"]
    except (OSError, ValueError):
        pass  # it has not noticed that it stalls, or cannot say so
    return PeerStatus(rank, beat, state, silent, stack, collectives)


def _process_state(heartbeat: dict[str, Any]) -> str:
    """How the process of a heartbeat is, where this host can tell."""
    if heartbeat["host"] != platform.node() or not os.path.isdir("/proc/self"):
        return "elsewhere"
    try:
        with open(f"/proc/{heartbeat['process']}/stat", encoding="utf-8", errors="replace") as file:
            letter = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(letter, "here")


def classify_ranks(peers: Sequence[PeerStatus]) -> dict[int, str]:
    """What each rank is in this stall: late, waits, or neither where nothing tells them apart.

    A rank that cannot go on (missing, ended, gone, stopped, silent) is late. Else those are late that wait in no
    collective while others do, the least far of them; where all wait, each in something else, nobody is: they diverged.
    Without collectives to go by, the least far are late.
    """
    unable = {peer.rank for peer in peers if peer.state != "here"}
    able = [peer for peer in peers if peer.state == "here"]
    verdict = dict.fromkeys(unable, LATE)
    if unable:
        return verdict | {peer.rank: WAITING for peer in able}
    waiting = {peer.rank for peer in able if peer.pending_collective}
    free = [peer for peer in able if peer.rank not in waiting]
    if waiting and not free:
        return dict.fromkeys(waiting, WAITING)
    least = min(peer.progress for peer in free)
    late = {peer.rank for peer in free if peer.progress == least}
    if len(late) == len(peers):
        return dict.fromkeys(late, HEALTHY)
    return {peer.rank: LATE if peer.rank in late else WAITING for peer in able}


def report_lines(
    peers: Sequence[PeerStatus], stalled_seconds: float, step_seconds: float | None, stacks_path: str
) -> list[str]:
    """The lines that tell of a stall. `stacks` says where all stacks are; `step_seconds` is what a step took, if known."""
    verdict = classify_ranks(peers)
    late = [peer for peer in peers if verdict[peer.rank] == LATE]
    waiting = [peer for peer in peers if verdict[peer.rank] == WAITING]
    steps = {peer.heartbeat["step"] for peer in peers if peer.heartbeat}
    usual = f" (a step takes {_format_seconds(step_seconds)})" if step_seconds else ""
    lines = [
        f"STALL: no progress for {_format_seconds(stalled_seconds)} at step {min(steps)}{usual}: {_summary(peers, late, waiting)}"
    ]
    groups: dict[tuple[str, ...], list[PeerStatus]] = {}
    for peer in [*late, *(peer for peer in peers if peer not in late)]:
        groups.setdefault((*_describe(peer, verdict[peer.rank]), verdict[peer.rank]), []).append(peer)
    rows = [
        (_format_ranks(group), _format_hosts(group), phase, _format_time_in_phase(group), word, where)
        for (phase, where, word), group in groups.items()
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  " + "  ".join([*cells, row[-1]]).rstrip())
    if not late and waiting:
        lines += _divergence_lines(waiting)
    for peer in [each for each in (late or peers) if each.stack][:1]:
        lines.append(f"  stack of rank {peer.rank}, most recent call last:")
        lines += [f"    {frame}: {frame.source_line}" for frame in peer.stack[-FRAMES_SHOWN:]]
    return [*lines, f"  all stacks: {stacks_path}"]


def _summary(peers: Sequence[PeerStatus], late: Sequence[PeerStatus], waiting: Sequence[PeerStatus]) -> str:
    if late and waiting:
        return (
            f"{_format_ranks(late)} {'is' if len(late) == 1 else 'are'} late, {_format_ranks(waiting)} {_wait_words(waiting)}"
        )
    if waiting:
        return "the ranks wait for each other, each in another collective"
    if len(peers) == 1:
        return f"in {peers[0].heartbeat['phase']}"
    if late:
        return f"{_format_ranks(late)} cannot go on"
    return f"all {len(peers)} ranks are in {peers[0].heartbeat['phase']}"


def _wait_words(waiting: Sequence[PeerStatus]) -> str:
    return "waits for it" if len(waiting) == 1 else "wait for it"


def _describe(peer: PeerStatus, verdict: str) -> tuple[str, str]:
    """(phase, where): ranks that have both in common share a line."""
    if not peer.heartbeat:
        return "", "never joined this run: it has no heartbeat"
    beat = peer.heartbeat
    process = f"process {beat['process']}"
    where = {
        "here": peer.location,
        "ended": f"its run ended: {beat['phase']}",
        "gone": f"{process} is gone: killed, or the host ran out of memory",
        "stopped": f"{process} is stopped (SIGSTOP); kill -CONT {beat['process']} lets it go on",
        "silent": f"{process} has no heartbeat: it or its host is dead, or cannot write to the run's directory",
    }[peer.state]
    pending = peer.pending_collective
    if peer.state == "here" and pending and verdict != LATE:
        where = f"{pending['operation']} {pending['sequence']} of {pending['group']}, from {peer.location}"
    return beat["phase"], where


def _format_hosts(peers: Sequence[PeerStatus]) -> str:
    hosts = {peer.heartbeat["host"] for peer in peers if peer.heartbeat}
    return hosts.pop() if len(hosts) == 1 else f"{len(hosts)} hosts" if hosts else ""


def _format_time_in_phase(peers: Sequence[PeerStatus]) -> str:
    """For how long the ranks have been where they are."""
    known = [peer.heartbeat["written"] - peer.heartbeat["since"] + peer.silent_seconds for peer in peers if peer.heartbeat]
    return _format_seconds(max(known)) if known else ""


def _divergence_lines(waiting: Sequence[PeerStatus]) -> list[str]:
    """What the ranks had in common last, and a guess at where they parted."""
    pending = [peer.pending_collective for peer in waiting if peer.pending_collective]
    same = {(each["group"], each["sequence"]) for each in pending}
    if len(same) == 1 and len({each["operation"] for each in pending}) > 1:
        group, sequence = same.pop()
        told = {
            each["operation"]
            for peer in waiting
            for each in peer.collectives
            if each["group"] == group and each["sequence"] == sequence - 1
        }
        last = (
            f"last in common: {sequence - 1} of {group}{f', {told.pop()}' if len(told) == 1 else ''}. " if sequence > 1 else ""
        )
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
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2g} s"
