"""The state of a run, from its directory alone: heartbeats, the end of metrics.jsonl, what its
hosts publish.

It serves every command that shows a run, on any machine that sees the directory. Nothing is
written, and no rank is asked.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from lmforge.core.errors import UserError
from lmforge.core.records.kinds import Kind, unexpected
from lmforge.core.records.runs import JOB_FILE, LAUNCH_FOLDER, Run
from lmforge.ops.monitor.heartbeat import FINAL_PHASES, SILENT_AFTER_SECONDS, heartbeat_paths
from lmforge.ops.monitor.stall import PeerStatus, classify_ranks, read_peer
from lmforge.ops.monitor.usage.host import HostUsage, read_published
from lmforge.ops.terminal.cells import format_age

RankState = Literal["running", "missing", "ended", "gone", "stopped", "silent"]
# not started: no rank has written a heartbeat; lost: all ranks are gone or silent, and have not
# said how they ended;
# stalled: ranks have reported that nothing moves; degraded: some ranks go on, others do not.
RunState = Literal[
    "not started", "running", "stalled", "degraded", "done", "interrupted", "failed", "lost"
]
# Without a bound, one damaged heartbeat could claim a million ranks.
MAX_MISSING = 2**12
RUN_ENDED = ("done", "interrupted", "failed", "lost")
RUN_GOES_ON = ("running", "stalled", "degraded")


@dataclass(frozen=True)
class RankStatus:
    """What a rank does, by its heartbeat. `state` is as in `stall.PeerStatus`.

    heartbeat_time          when the file was written, by its host's clock; 0 where there is none
    heartbeat_age_seconds   since then, by the file system's clock; None where there is none
    slow                    the phases in which it is a straggler
    stalled                 it has noticed that it makes no progress
    verdict                 of a stalled run: stuck, waits, or empty where nothing tells
                            (`stall.classify_ranks`)
    """

    rank: int
    host: str
    process: int
    state: RankState
    step: int
    phase: str
    seconds_in_phase: float
    heartbeat_time: float
    heartbeat_age_seconds: float | None
    slow: str
    stalled: bool
    verdict: str

    @property
    def has_problem(self) -> bool:
        """Whether it cannot continue, or has failed."""
        return self.state in ("missing", "gone", "stopped", "silent") or self.phase == "failed"

    @property
    def severity(self) -> tuple[int, int, float]:
        """Sorts ranks, the worst first: that cannot go on, are stuck, are slow, are behind, are
        longest in a phase.
        """
        if self.has_problem:
            level = 0
        elif self.verdict == "stuck":
            level = 1
        elif self.slow:
            level = 2
        elif self.stalled:
            level = 3
        else:
            level = 4
        return level, self.step, -self.seconds_in_phase

    @property
    def note(self) -> str:
        """A description of its problem; empty if it has none."""
        age = format_age(self.heartbeat_age_seconds or 0.0)
        words = {
            "missing": "no heartbeat: it never joined",
            "gone": f"process {self.process} is gone; last heartbeat {age} ago",
            "stopped": f"process {self.process} is stopped (SIGSTOP)",
            "silent": f"no heartbeat for {age}",
        }.get(self.state, "")
        notes = [words, f"slow: {self.slow}" if self.slow else ""]
        if self.stalled and self.state == "running":
            notes.append(
                {"stuck": "stuck", "waits": "waits for others"}.get(self.verdict, "no progress")
            )
        return "; ".join(note for note in notes if note)


@dataclass(frozen=True)
class RunStatus:
    """A run at a time.

    `metrics` has the newest value of each metric that is finite; `steps` is None where the recipe
    cannot be read. `job` describes the job of a launched run that waits, or has ended before the
    run began.
    """

    path: str
    state: RunState
    attempt: int
    steps: int | None
    step: int
    metrics: dict[str, float]
    metrics_age_seconds: float | None
    ranks: list[RankStatus]
    hosts: list[HostUsage]
    job: str = ""


def read_run_status(run: Run) -> RunStatus:
    """The state of a run now. Raises UserError where the directory holds no run."""
    if not run.exists():
        if (run.path / LAUNCH_FOLDER / JOB_FILE).exists():
            return RunStatus(str(run.path), "not started", 0, None, 0, {}, None, [], [])
        raise unexpected(run.path, (Kind.RUN,))
    ranks = _read_ranks(run.health_folder)
    metrics = {name: value for name, value in run.read_last_metrics().items() if value is not None}
    steps = metrics_age = None
    with suppress(OSError):
        metrics_age = max(0.0, time.time() - run.metrics_path.stat().st_mtime)
    with suppress(UserError, OSError):  # a recipe of another version
        steps = run.load_config().train.steps
    running = [rank.step for rank in ranks if rank.state == "running"]
    step = max(int(metrics.pop("step", 0)), min(running, default=0))
    attempt = max(run.attempts(), default=0)
    hosts = read_published(run.health_folder)
    return RunStatus(
        str(run.path), run_state(ranks), attempt, steps, step, metrics, metrics_age, ranks, hosts
    )


def run_state(ranks: Sequence[RankStatus]) -> RunState:
    """The state of a run from that of its ranks."""
    if all(rank.state == "missing" for rank in ranks):
        return "not started"
    if not any(rank.state in ("running", "stopped") for rank in ranks):
        if all(rank.state == "ended" for rank in ranks):
            phases = {rank.phase for rank in ranks}
            if "failed" in phases:
                return "failed"
            if "interrupted" in phases:
                return "interrupted"
            return "done"
        if any(rank.phase == "failed" for rank in ranks):
            return "failed"
        return "lost"
    if any(rank.has_problem for rank in ranks):
        return "degraded"
    if any(rank.stalled for rank in ranks):
        return "stalled"
    return "running"


def _read_ranks(folder: Path) -> list[RankStatus]:
    """The ranks of the run, by rank; heartbeats contain their number.

    Of those without a heartbeat, the first MAX_MISSING.
    """
    written: dict[int, float] = {}
    for rank, path in heartbeat_paths(folder).items():
        with suppress(OSError):
            written[rank] = path.stat().st_mtime
    # The clock of a file server may be ahead of ours.
    now = max([time.time(), *written.values()])
    peers = [read_peer(folder, rank, now, SILENT_AFTER_SECONDS) for rank in sorted(written)]
    world_size = max([peer.heartbeat["world_size"] for peer in peers if peer.heartbeat], default=0)
    absent = islice((rank for rank in range(world_size) if rank not in written), MAX_MISSING)
    peers += [PeerStatus(rank, {}, "missing") for rank in absent]
    peers.sort(key=lambda peer: peer.rank)
    verdicts = {}
    if any(peer.heartbeat.get("noticed") for peer in peers):
        verdicts = classify_ranks(peers)
    return [
        _rank_status(
            peer,
            now - written[peer.rank] if peer.rank in written else None,
            verdicts.get(peer.rank, ""),
        )
        for peer in peers
    ]


def _rank_status(peer: PeerStatus, age: float | None, verdict: str) -> RankStatus:
    beat: dict[str, Any] = peer.heartbeat
    seconds = peer.seconds_in_phase
    if peer.state == "running":  # it goes on: the value at its last heartbeat
        seconds = beat["written"] - beat["since"]
    return RankStatus(
        peer.rank,
        beat.get("host", ""),
        beat.get("process", 0),
        peer.state,  # type: ignore[arg-type]
        beat.get("step", 0),
        beat.get("phase", ""),
        max(0.0, seconds),
        beat.get("written", 0.0),
        age,
        beat.get("slow", ""),
        beat.get("noticed", False) and beat["phase"] not in FINAL_PHASES,
        verdict,
    )
