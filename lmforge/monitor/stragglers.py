"""Stragglers: ranks whose own work in a phase takes clearly longer than the others'.

Whoever is quick waits for whoever is slow, inside the same phases, so that times as such accuse the wrong rank: what is
compared is a rank's own seconds. On a CPU waiting is measured where it happens, in torch's `Work.wait`. On a GPU the
device's own clock is read at the marks of one step in each interval; there `forward` and `backward` contain what
the device waited for in sharding's all-gathers, which makes ranks look alike, never the quick one slow.
"""

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lmforge.cluster.distributed import DistributedContext
from lmforge.monitor.heartbeat import Heartbeat

# Phases in which a rank works on its own; reduce and barrier are waiting.
COMPARED_PHASES = ("data", "forward", "backward", "optimizer", "save", "evaluate")
# Healthy ranks differ by a few per cent; what takes half as long again is worth a line where it is a tenth of the step,
# since only that much can be won by mending it. Once may be a page fault or a neighbour: it has to be seen twice.
SLOW_RATIO, SLOW_FRACTION, TIMES_SEEN = 1.5, 0.1, 2
RECOVERED_RATIO = 1.25
# Over less than this, quick steps are judged together: a pause of the system's is not the rank's pace.
MIN_WINDOW_SECONDS = 1.0


@dataclass
class _Suspect:
    times_seen: int = 0
    reported: bool = False


class StragglerDetector:
    """Own seconds of every rank in, lines out: who stands out, and who no longer does. Everything here is arithmetic."""

    def __init__(self) -> None:
        self._suspects: dict[tuple[int, str], _Suspect] = {}
        self._steps = self._seconds = 0.0
        self._sums: list[list[float]] = []

    def update(
        self,
        seconds_by_rank: Sequence[Sequence[float]],
        pipeline_parallel_degree: Sequence[int],
        steps: float,
        step_seconds: float,
    ) -> list[str]:
        """`table[rank][phase]` own seconds over `steps` steps, phases as COMPARED; only ranks of one part are compared.

        Returns (rank, what to say), as "rank 3: forward takes 1.8 times the median (0.42 s against 0.23 s a step)".
        """
        sums = self._sums or [[0.0] * len(COMPARED_PHASES) for _ in seconds_by_rank]
        self._sums = [[a + b for a, b in zip(old, new, strict=True)] for old, new in zip(sums, seconds_by_rank, strict=True)]
        self._steps += steps
        self._seconds += steps * step_seconds
        if self._seconds < MIN_WINDOW_SECONDS or not self._steps:
            return []
        lines = []
        for part in sorted(set(pipeline_parallel_degree)):
            ranks = [rank for rank, its in enumerate(pipeline_parallel_degree) if its == part]
            for number, phase in enumerate(COMPARED_PHASES):
                own = {rank: self._sums[rank][number] / self._steps for rank in ranks}
                # The lower one: of two ranks, the slower is compared with the quicker.
                usual = statistics.median_low(own.values())
                for rank, seconds in own.items():
                    lines += self._compare(rank, phase, seconds, usual, self._seconds / self._steps)
        self._steps, self._seconds, self._sums = 0.0, 0.0, []
        return lines

    def _compare(self, rank: int, phase: str, seconds: float, median_seconds: float, step_seconds: float) -> list[str]:
        suspect = self._suspects.setdefault((rank, phase), _Suspect())
        if suspect.reported:
            if seconds > RECOVERED_RATIO * median_seconds and seconds - median_seconds > SLOW_FRACTION / 2 * step_seconds:
                return []
            suspect.reported, suspect.times_seen = False, 0
            return [f"rank {rank}: {phase} takes as long as elsewhere again ({_format_comparison(seconds, median_seconds)})"]
        clear = seconds >= SLOW_RATIO * median_seconds and seconds - median_seconds >= SLOW_FRACTION * step_seconds
        suspect.times_seen = suspect.times_seen + 1 if clear else 0
        if suspect.times_seen < TIMES_SEEN:
            return []
        suspect.reported = True
        times = f"{seconds / median_seconds:.1f} times the median" if median_seconds > 0.01 * seconds else "long"
        return [f"rank {rank}: {phase} takes {times} ({_format_comparison(seconds, median_seconds)}); the others wait for it"]


def _format_comparison(seconds: float, median_seconds: float) -> str:
    return f"{seconds:.2g} s against {median_seconds:.2g} s a step"


class StragglerMonitor:
    """This rank's own seconds, told to the others at each log step, and what that shows. With one rank it does nothing."""

    def __init__(self, dist_ctx: DistributedContext, heartbeat: Heartbeat) -> None:
        self._dist_ctx, self._heartbeat = dist_ctx, heartbeat
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
        """Lines about what was told at the last log step, and tell the others of this one: nobody waits for anybody."""
        if self._dist_ctx.control_group is None:
            return []
        own = self._heartbeat.take_busy_seconds()
        steps = step - self._last_step if self._last_step is not None else 0
        if self._phase_timer is not None:
            own |= {phase: seconds * steps for phase, seconds in self._phase_timer.read().items()}
        lines = self._finish_exchange()
        # The first interval has what happens once: compiling, allocating, reading ahead.
        first, self._last_step = self._last_step is None, step
        if first:
            return lines
        row = torch.tensor([float(pipeline_rank), *(own.get(phase, 0.0) for phase in COMPARED_PHASES)])
        table = [torch.empty_like(row) for _ in range(self._dist_ctx.world_size)]
        work = dist.all_gather(table, row, group=self._dist_ctx.control_group, async_op=True)
        assert work is not None
        self._pending = (table, work, float(steps), step_seconds)
        return lines

    def _finish_exchange(self) -> list[str]:
        if self._pending is None:
            return []
        table, work, steps, step_seconds = self._pending
        self._pending = None
        work.wait()
        rows = [row.tolist() for row in table]
        return self._detector.update([row[1:] for row in rows], [int(row[0]) for row in rows], steps, step_seconds)

    def close(self) -> None:
        """Stop measuring."""
        self._restore_wait()
        if self._phase_timer is not None:
            self._phase_timer.close()


def _exclude_wait_time(heartbeat: Heartbeat) -> Callable[[], None]:
    """Take what this thread waits in collectives out of its phases. Returns what undoes it."""
    thread, wait = threading.get_ident(), dist.Work.wait

    def counted(work: dist.Work, *arguments: Any) -> Any:
        if threading.get_ident() != thread:
            return wait(work, *arguments)
        began = time.perf_counter()
        try:
            return wait(work, *arguments)
        finally:
            heartbeat.waited_seconds += time.perf_counter() - began

    dist.Work.wait = counted  # type: ignore[method-assign, assignment]

    def undo() -> None:
        dist.Work.wait = wait  # type: ignore[method-assign]

    return undo


class _CudaPhaseTimer:
    """The GPU's own times of the phases of one step: an event at each mark, read once something has waited for the device."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._events: list[tuple[str, torch.cuda.Event]] = []
        self._timed_step: int | None = None
        self._arm()

    def _arm(self) -> None:
        """From the next step on, note its marks."""
        self._events, self._timed_step = [], None
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
        """Seconds of forward, backward and optimizer in the step that was timed; data and files are the host's affair."""
        seconds: dict[str, float] = {}
        complete = self._heartbeat.on_phase is None
        if complete:
            for (phase, begin), (_, end) in zip(self._events, self._events[1:], strict=False):
                if phase in ("forward", "backward", "optimizer"):
                    seconds[phase] = seconds.get(phase, 0.0) + begin.elapsed_time(end) / 1000
            self._arm()
        return seconds

    def close(self) -> None:
        self._heartbeat.on_phase = None
