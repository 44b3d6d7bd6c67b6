"""Stragglers: ranks whose own work in a phase takes clearly longer than that of the others.

Fast ranks wait for slow ones inside the same phases, so that phase times alone point to the wrong
rank. A rank's own seconds are compared. On a CPU, waiting is measured in torch's `Work.wait` and
subtracted. On a GPU, events time the phases of one step in each interval; there `forward` and
`backward` include waiting in the all-gathers of sharding, which makes ranks look alike, but never a
fast one slow.
"""

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lmforge.core.distributed.distributed import DistributedContext
from lmforge.ops.monitor.heartbeat import Heartbeat

# Phases in which a rank works by itself; reduce and barrier are waiting.
COMPARED_PHASES = ("data", "forward", "backward", "optimizer", "save", "evaluate")
# Healthy ranks differ by a few per cent. A phase that takes 50 % longer is reported if the
# difference is at least a tenth of the step, and only when seen twice: once may be a page fault or
# another process.
SLOW_RATIO = 1.5
SLOW_FRACTION = 0.1
TIMES_SEEN = 2
RECOVERED_RATIO = 1.25
# Short steps are combined until they cover this time, so that a pause of the system does not count
# as a slow rank.
MIN_WINDOW_SECONDS = 1.0


class StragglerDetector:
    """Takes the own seconds of every rank, and returns lines about ranks that are slow, or no
    longer slow.
    """

    def __init__(self) -> None:
        # How often in a row a (rank, phase) was slow; from TIMES_SEEN on it is reported.
        self._times_seen: Counter[tuple[int, str]] = Counter()
        self._steps = self._seconds = 0.0
        self._tables: list[Sequence[Sequence[float]]] = []

    def update(
        self,
        seconds_by_rank: Sequence[Sequence[float]],
        pipeline_ranks: Sequence[int],
        steps: float,
        step_seconds: float,
    ) -> list[str]:
        """Lines such as "rank 3: forward takes 1.8 times the median (0.42 s against 0.23 s per
        step); …".

        `seconds_by_rank[rank]` has the own seconds over `steps` steps of each of COMPARED_PHASES.
        Only ranks of one pipeline rank are compared.
        """
        self._tables.append(seconds_by_rank)
        self._steps += steps
        self._seconds += steps * step_seconds
        # After a rollback, steps are repeated.
        if self._seconds < MIN_WINDOW_SECONDS or self._steps <= 0:
            return []
        lines = []
        for pipeline_rank in sorted(set(pipeline_ranks)):
            ranks = [rank for rank, each in enumerate(pipeline_ranks) if each == pipeline_rank]
            for number, phase in enumerate(COMPARED_PHASES):
                own = {
                    rank: sum(table[rank][number] for table in self._tables) / self._steps
                    for rank in ranks
                }
                # The lower median: of two ranks, the slower is compared with the faster.
                usual = statistics.median_low(own.values())
                for rank, seconds in own.items():
                    lines += self._compare(rank, phase, seconds, usual, self._seconds / self._steps)
        self._steps = 0.0
        self._seconds = 0.0
        self._tables = []
        return lines

    def slow_phases(self, rank: int) -> list[str]:
        """The phases in which a rank is slow at present, as was reported."""
        return [phase for phase in COMPARED_PHASES if self._times_seen[rank, phase] >= TIMES_SEEN]

    def _compare(
        self, rank: int, phase: str, seconds: float, median: float, step_seconds: float
    ) -> list[str]:
        key = rank, phase
        if self._times_seen[key] >= TIMES_SEEN:
            if (
                seconds > RECOVERED_RATIO * median
                and seconds - median > SLOW_FRACTION / 2 * step_seconds
            ):
                return []
            self._times_seen[key] = 0
            return [
                (
                    f"rank {rank}: {phase} takes as long as elsewhere again"
                    f" ({_format_comparison(seconds, median)})"
                )
            ]
        clear = seconds >= SLOW_RATIO * median and seconds - median >= SLOW_FRACTION * step_seconds
        self._times_seen[key] = self._times_seen[key] + 1 if clear else 0
        if self._times_seen[key] < TIMES_SEEN:
            return []
        times = "long"
        if median > 0.01 * seconds:
            times = f"{seconds / median:.1f} times the median"
        return [
            (
                f"rank {rank}: {phase} takes {times} ({_format_comparison(seconds, median)}); the"
                " others wait for it"
            )
        ]


def _format_comparison(seconds: float, median: float) -> str:
    return f"{seconds:.2g} s against {median:.2g} s per step"


class StragglerMonitor:
    """Exchanges the own seconds of all ranks at each log step. With one rank it does nothing."""

    def __init__(self, dist_ctx: DistributedContext, heartbeat: Heartbeat) -> None:
        self._dist_ctx = dist_ctx
        self._heartbeat = heartbeat
        self._detector = StragglerDetector()
        self._last_step: int | None = None
        self._pending: tuple[list[torch.Tensor], dist.Work, float, float] | None = None
        self._phase_timer: _CudaPhaseTimer | None = None
        self._restore_wait: Callable[[], None] = lambda: None
        if dist_ctx.world_size > 1 and dist_ctx.device.type == "cpu":
            self._restore_wait = _exclude_wait_time(heartbeat)
        elif dist_ctx.world_size > 1:
            self._phase_timer = _CudaPhaseTimer(heartbeat)

    def exchange(self, step: int, step_seconds: float, pipeline_rank: int) -> list[str]:
        """Lines about the last log step; starts the exchange of this one. No rank waits."""
        if self._dist_ctx.control_group is None:
            return []
        own = self._heartbeat.busy_seconds
        self._heartbeat.busy_seconds = {}
        steps = 0
        if self._last_step is not None:
            steps = step - self._last_step
        if self._phase_timer is not None:
            own |= {phase: seconds * steps for phase, seconds in self._phase_timer.read().items()}
        lines = []
        if self._pending is not None:
            table, work, num_steps, seconds = self._pending
            work.wait()
            rows = [row.tolist() for row in table]
            lines = self._detector.update(
                [row[1:] for row in rows], [int(row[0]) for row in rows], num_steps, seconds
            )
            self._heartbeat.slow_phases = ", ".join(
                self._detector.slow_phases(self._dist_ctx.rank_info.rank)
            )
        # The first interval contains what happens once: compiling, allocating, reading ahead.
        first = self._last_step is None
        self._last_step = step
        if first:
            return lines
        row = torch.tensor(
            [float(pipeline_rank), *(own.get(phase, 0.0) for phase in COMPARED_PHASES)]
        )
        table = [torch.empty_like(row) for _ in range(self._dist_ctx.world_size)]
        work = dist.all_gather(table, row, group=self._dist_ctx.control_group, async_op=True)
        assert work is not None
        self._pending = (table, work, float(steps), step_seconds)
        return lines

    def close(self) -> None:
        """Stop measuring."""
        self._restore_wait()
        self._heartbeat.on_phase = None


def _exclude_wait_time(heartbeat: Heartbeat) -> Callable[[], None]:
    """Subtract what this thread waits in collectives from its phases.

    Returns a function that undoes it.
    """
    thread = threading.get_ident()
    wait = dist.Work.wait

    def counted(work: dist.Work, *arguments: Any) -> Any:
        if threading.get_ident() != thread:
            return wait(work, *arguments)
        began = time.perf_counter()
        try:
            return wait(work, *arguments)
        finally:
            heartbeat.waited_seconds += time.perf_counter() - began

    dist.Work.wait = counted  # type: ignore[method-assign, assignment]
    return partial(setattr, dist.Work, "wait", wait)


class _CudaPhaseTimer:
    """GPU times of the phases of one step: an event at each phase, read after something has waited
    for the device.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._arm()

    def _arm(self) -> None:
        """Record the phases of the next step."""
        self._events: list[tuple[str, torch.cuda.Event]] = []
        self._timed_step: int | None = None
        self._heartbeat.on_phase = self._record_event

    def _record_event(self, phase: str, step: int) -> None:
        if self._timed_step is None and phase == "data":
            self._timed_step = step
        if self._timed_step is None:
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append((phase, event))
        if step != self._timed_step:
            self._heartbeat.on_phase = None

    def read(self) -> dict[str, float]:
        """Seconds of forward, backward and optimizer in the step that was timed; the other phases
        are the host's work.
        """
        seconds: dict[str, float] = {}
        if self._heartbeat.on_phase is None:  # every phase of the step is recorded
            for (phase, begin), (_, end) in zip(self._events, self._events[1:], strict=False):
                if phase in ("forward", "backward", "optimizer"):
                    seconds[phase] = seconds.get(phase, 0.0) + begin.elapsed_time(end) / 1000
            self._arm()
        return seconds
