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

from lmforge.cluster.ranks import Ranks
from lmforge.train.heartbeat import Heartbeat

# Phases in which a rank works on its own; reduce and barrier are waiting.
COMPARED = ("data", "forward", "backward", "optimizer", "save", "evaluate")
# Healthy ranks differ by a few per cent; what takes half as long again is worth a line where it is a tenth of the step,
# since only that much can be won by mending it. Once may be a page fault or a neighbour: it has to be seen twice.
CLEAR_RATIO, CLEAR_SHARE, TIMES_SEEN = 1.5, 0.1, 2
RECOVERED_RATIO = 1.25
# Over less than this, quick steps are judged together: a pause of the system's is not the rank's pace.
JUDGED_SECONDS = 1.0


@dataclass
class _Suspect:
    seen: int = 0
    named: bool = False


class Judge:
    """Own seconds of every rank in, lines out: who stands out, and who no longer does. Everything here is arithmetic."""

    def __init__(self) -> None:
        self._suspects: dict[tuple[int, str], _Suspect] = {}
        self._steps = self._seconds = 0.0
        self._sums: list[list[float]] = []

    def hear(self, table: Sequence[Sequence[float]], parts: Sequence[int], steps: float, step_seconds: float) -> list[str]:
        """`table[rank][phase]` own seconds over `steps` steps, phases as COMPARED; only ranks of one part are compared.

        Returns (rank, what to say), as "rank 3: forward takes 1.8 times the median (0.42 s against 0.23 s a step)".
        """
        sums = self._sums or [[0.0] * len(COMPARED) for _ in table]
        self._sums = [[a + b for a, b in zip(old, new, strict=True)] for old, new in zip(sums, table, strict=True)]
        self._steps += steps
        self._seconds += steps * step_seconds
        if self._seconds < JUDGED_SECONDS or not self._steps:
            return []
        lines = []
        for part in sorted(set(parts)):
            ranks = [rank for rank, its in enumerate(parts) if its == part]
            for number, phase in enumerate(COMPARED):
                own = {rank: self._sums[rank][number] / self._steps for rank in ranks}
                # The lower one: of two ranks, the slower is compared with the quicker.
                usual = statistics.median_low(own.values())
                for rank, seconds in own.items():
                    lines += self._weigh(rank, phase, seconds, usual, self._seconds / self._steps)
        self._steps, self._seconds, self._sums = 0.0, 0.0, []
        return lines

    def _weigh(self, rank: int, phase: str, seconds: float, usual: float, step_seconds: float) -> list[str]:
        suspect = self._suspects.setdefault((rank, phase), _Suspect())
        if suspect.named:
            if seconds > RECOVERED_RATIO * usual and seconds - usual > CLEAR_SHARE / 2 * step_seconds:
                return []
            suspect.named, suspect.seen = False, 0
            return [f"rank {rank}: {phase} takes as long as elsewhere again ({_both(seconds, usual)})"]
        clear = seconds >= CLEAR_RATIO * usual and seconds - usual >= CLEAR_SHARE * step_seconds
        suspect.seen = suspect.seen + 1 if clear else 0
        if suspect.seen < TIMES_SEEN:
            return []
        suspect.named = True
        times = f"{seconds / usual:.1f} times the median" if usual > 0.01 * seconds else "long"
        return [f"rank {rank}: {phase} takes {times} ({_both(seconds, usual)}); the others wait for it"]


def _both(seconds: float, usual: float) -> str:
    return f"{seconds:.2g} s against {usual:.2g} s a step"


class Stragglers:
    """This rank's own seconds, told to the others at each log step, and what that shows. With one rank it does nothing."""

    def __init__(self, ranks: Ranks, heartbeat: Heartbeat) -> None:
        self._ranks, self._heartbeat = ranks, heartbeat
        self._judge = Judge()
        self._step: int | None = None
        self._pending: tuple[list[torch.Tensor], dist.Work, float, float] | None = None
        self._on_device: _DeviceClock | None = None
        self._undo: Callable[[], None] = lambda: None
        if ranks.count > 1 and ranks.device.type == "cpu":
            self._undo = _count_waiting(heartbeat)
        elif ranks.count > 1:
            self._on_device = _DeviceClock(heartbeat)

    def read(self, step: int, step_seconds: float, part: int) -> list[str]:
        """Lines about what was told at the last log step, and tell the others of this one: nobody waits for anybody."""
        if self._ranks.control is None:
            return []
        own = self._heartbeat.take_own_seconds()
        steps = step - self._step if self._step is not None else 0
        if self._on_device is not None:
            own |= {phase: seconds * steps for phase, seconds in self._on_device.read().items()}
        lines = self._told()
        # The first interval has what happens once: compiling, allocating, reading ahead.
        first, self._step = self._step is None, step
        if first:
            return lines
        row = torch.tensor([float(part), *(own.get(phase, 0.0) for phase in COMPARED)])
        table = [torch.empty_like(row) for _ in range(self._ranks.count)]
        work = dist.all_gather(table, row, group=self._ranks.control, async_op=True)
        assert work is not None
        self._pending = (table, work, float(steps), step_seconds)
        return lines

    def _told(self) -> list[str]:
        if self._pending is None:
            return []
        table, work, steps, step_seconds = self._pending
        self._pending = None
        work.wait()
        rows = [row.tolist() for row in table]
        return self._judge.hear([row[1:] for row in rows], [int(row[0]) for row in rows], steps, step_seconds)

    def close(self) -> None:
        """Stop measuring."""
        self._undo()
        if self._on_device is not None:
            self._on_device.close()


def _count_waiting(heartbeat: Heartbeat) -> Callable[[], None]:
    """Take what this thread waits in collectives out of its phases. Returns what undoes it."""
    thread, wait = threading.get_ident(), dist.Work.wait

    def counted(work: dist.Work, *arguments: Any) -> Any:
        if threading.get_ident() != thread:
            return wait(work, *arguments)
        began = time.perf_counter()
        try:
            return wait(work, *arguments)
        finally:
            heartbeat.waited += time.perf_counter() - began

    dist.Work.wait = counted  # type: ignore[method-assign, assignment]

    def undo() -> None:
        dist.Work.wait = wait  # type: ignore[method-assign]

    return undo


class _DeviceClock:
    """The GPU's own times of the phases of one step: an event at each mark, read once something has waited for the device."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._events: list[tuple[str, torch.cuda.Event]] = []
        self._timed: int | None = None
        self._mark()

    def _mark(self) -> None:
        """From the next step on, note its marks."""
        self._events, self._timed = [], None
        self._heartbeat.began_phase = self._note

    def _note(self, phase: str, step: int) -> None:
        if self._timed is None and phase == "data":
            self._timed = step
        if self._timed is None:
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append((phase, event))
        if step != self._timed:
            self._heartbeat.began_phase = None

    def read(self) -> dict[str, float]:
        """Seconds of forward, backward and optimizer in the step that was timed; data and files are the host's affair."""
        seconds: dict[str, float] = {}
        complete = self._heartbeat.began_phase is None
        if complete:
            for (phase, begin), (_, end) in zip(self._events, self._events[1:], strict=False):
                if phase in ("forward", "backward", "optimizer"):
                    seconds[phase] = seconds.get(phase, 0.0) + begin.elapsed_time(end) / 1000
            self._mark()
        return seconds

    def close(self) -> None:
        self._heartbeat.began_phase = None
