"""The watch over a run: heartbeats, stalls told while they last, stragglers, drift, and the disk.

The loop says where it is (`mark`) and what a log step took (`log_step`). A thread of its own writes the heartbeat and looks
at this rank's clock alone; only when a phase has lasted too long does it read what the other ranks wrote. So a run that
goes on pays for a small file every two seconds, and a rank that hangs need not answer anyone.
"""

import os
import threading
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

from lmforge.cluster.ranks import Ranks
from lmforge.errors import LOST
from lmforge.train import stall
from lmforge.train.disk import DiskWatch
from lmforge.train.drift import Drift
from lmforge.train.heartbeat import Heartbeat
from lmforge.train.stragglers import Stragglers

# Between two heartbeats; less where a stall is to be told sooner.
LONGEST_BEAT_SECONDS = 2.0
# A stall is noticed so many heartbeats before it is told: the ranks that wait for each other notice it within one
# of each other, and what they write is to be there when one of them tells.
BEATS_TO_GATHER = 3
# A phase that is known to take long may take so many times that before it is a stall.
PATIENCE = 3.0
# A file server may be late with what another host wrote.
SILENT_SECONDS = 10.0
# A rank that has moved less in half the time to give up reads nothing large: it hangs.
BYTES_OF_WORK = 16 * 2**20


@dataclass
class _Stall:
    """A stall that this rank has noticed: the mark it stands at, when it is told next, and how far all ranks were then."""

    began: float
    phase: str
    next_told: float
    evident: bool = False
    told_late: str = ""
    far: dict[int, tuple[int, int, int]] | None = None
    far_at: float = 0.0


class Watch:
    """`mark(phase, step)` says what this rank does from now on; `barrier()` is around waiting for other ranks.

    `folder` is for heartbeats, `log` this rank's log file (None: reports go to standard error only). The first rank also
    watches `disk`.
    """

    def __init__(
        self,
        ranks: Ranks,
        folder: Path,
        log: Path | None = None,
        *,
        stall_seconds: float = 30.0,
        give_up_seconds: float | None = None,
        disk: DiskWatch | None = None,
    ) -> None:
        self._ranks, self._folder, self._log = ranks, folder, log
        self._stall_seconds, self._give_up_seconds = stall_seconds, give_up_seconds
        self._beat = min(LONGEST_BEAT_SECONDS, stall_seconds / 10)
        self._heartbeat = Heartbeat(folder, ranks.place.rank)
        self._stragglers = Stragglers(ranks, self._heartbeat)
        self._drift = Drift()
        self._step_seconds: float | None = None
        self._stall: _Stall | None = None
        self._evident_at = -1.0
        self._thread_watched = threading.get_ident()
        self._stopped = threading.Event()
        ranks.waiting = self.barrier
        self._disk = disk
        if disk is not None and ranks.first:
            disk.start(self._say)
        self._thread = threading.Thread(target=self._keep, name="watch", daemon=True)
        self._thread.start()

    def mark(self, phase: str, step: int) -> None:
        """Say what this rank does from now on; phases are those of heartbeat.PHASES."""
        self._heartbeat.mark(phase, step)

    def where(self) -> str:
        """Step and phase, in words."""
        return f"step {self._heartbeat.now.step}, {self._heartbeat.now.phase}"

    def barrier(self) -> AbstractContextManager[None]:
        """Around waiting for other ranks: the phase is `barrier` inside. Changes nothing in other threads."""
        return self._heartbeat.barrier()

    def log_step(self, step: int, step_seconds: float, part: int = 0) -> list[str]:
        """What stands out by now, in lines for the reader; every rank calls it at the same steps and none waits.

        `step_seconds` is what a step took since the last log step, of training alone. Ranks of the same `part` do equal
        work. Call it where something has just waited for the device.
        """
        self._step_seconds = step_seconds
        return [*self._stragglers.read(step, step_seconds, part), *self._drift.read(step, step_seconds)]

    def stop(self, phase: str) -> None:
        """Write the last word and end."""
        self._ranks.waiting = None
        self._stragglers.close()
        if self._disk is not None:
            self._disk.stop()
        self.mark(phase, self._heartbeat.now.step)
        self._stopped.set()
        self._thread.join(timeout=LONGEST_BEAT_SECONDS)  # a disk that hangs must not hang the end

    def _keep(self) -> None:
        while True:
            last = self._stopped.wait(self._beat)
            # What cannot be written or read must not stop the training it tells of.
            with suppress(OSError):
                self._heartbeat.write()
            if last:
                return
            with suppress(OSError):
                self._look()

    def _look(self) -> None:
        now, clock = self._heartbeat.now, time.perf_counter()
        age = clock - now.began
        if self._stall is not None and self._stall.began != now.began:
            self._go_on(self._stall, now.began)
        gathering = BEATS_TO_GATHER * self._beat
        # Whoever stalls with this rank may lose patience earlier, and then wants to know where this rank is.
        if age >= self._stall_seconds - gathering and self._evident_at != now.began:
            self._evident_at = now.began
            self._show()
        limit = max(self._stall_seconds, PATIENCE * self._heartbeat.usual(now.phase))
        if self._stall is None:
            if age < limit - gathering:
                return
            self._stall = _Stall(now.began, now.phase, limit - self._beat)
            self._heartbeat.noticed = True
            self._heartbeat.write()
        found = self._stall
        if age >= found.next_told - gathering and not found.evident:
            found.evident = True
            self._show()
        if age >= found.next_told:
            found.next_told, found.evident = 2 * age, False
            self._tell(found, age)
        if self._give_up_seconds is not None and self._ranks.count > 1:
            self._consider_giving_up(found, age, self._give_up_seconds)

    def _show(self) -> None:
        now = self._heartbeat.now
        stall.evidence(self._folder, self._stacks(), self._ranks.place.rank, (now.step, now.number), self._thread_watched)

    def _stacks(self) -> Path:
        rank = self._ranks.place.rank
        return self._log.with_suffix(".stack.txt") if self._log is not None else self._folder / f"rank-{rank}.stack.txt"

    def _peers(self) -> list[stall.Peer]:
        self._heartbeat.write()
        written = self._heartbeat.path.stat().st_mtime
        patience = max(SILENT_SECONDS, 3 * self._beat)
        return [stall.look(self._folder, rank, written, patience) for rank in range(self._ranks.count)]

    def _reports(self, peers: list[stall.Peer]) -> bool:
        """Whether this rank is the one that tells: the one that has told of this stall already, or the lowest that noticed."""
        able = [peer for peer in peers if peer.state == "here" and peer.beat["noticed"]]
        telling = [peer.rank for peer in able if peer.beat["reported"]] or [peer.rank for peer in able]
        return min(telling, default=self._ranks.place.rank) == self._ranks.place.rank

    def _tell(self, found: _Stall, age: float) -> None:
        rank = self._ranks.place.rank
        if rank and not self._heartbeat.reported:
            # The first rank tells as a rule: of thousands, not each has to read what all the others wrote.
            self._heartbeat.write()
            first = stall.look(self._folder, 0, self._heartbeat.path.stat().st_mtime, SILENT_SECONDS)
            if first.state == "here" and first.beat["noticed"]:
                return
        peers = self._peers()
        if not self._reports(peers):
            return
        self._heartbeat.reported = True
        verdict = stall.judge(peers)
        found.told_late = ", ".join(
            f"rank {peer.rank} {'in ' + peer.beat['phase'] if peer.beat else 'missing'}"
            for peer in peers
            if verdict[peer.rank] == stall.LATE
        )
        stacks = str(self._stacks()).replace(f"rank-{rank}.", "rank-*.")
        self._say("\n".join(stall.report(peers, age, self._step_seconds, stacks)))

    def _go_on(self, found: _Stall, began: float) -> None:
        if self._heartbeat.reported:
            late = f" ({found.told_late} had been late)" if found.told_late else ""
            seconds = self._heartbeat.last_seconds if self._heartbeat.last_began == found.began else began - found.began
            self._say(f"going on after {seconds:.0f} s in {found.phase}{late}")
        self._stall, self._heartbeat.noticed, self._heartbeat.reported = None, False, False

    def _consider_giving_up(self, found: _Stall, age: float, limit: float) -> None:
        """End this process where no rank has gone on, nor moved much data, for `limit` seconds.

        Looked at twice, half of that apart: a peer that is slow, and alive, has gone on or read something by then.
        """
        if age < limit / 2 or (found.far is not None and age < found.far_at + limit / 2):
            return
        peers = self._peers()
        far = {peer.rank: (*peer.progress, peer.beat["bytes"]) for peer in peers if peer.state == "here"}
        if found.far is None or any(_gone_on(found.far.get(rank), place) for rank, place in far.items()):
            found.far, found.far_at = far, age
            return
        if self._reports(peers):
            self._say(
                f"no rank has gone on for {age:.0f} s (watch.give_up_seconds = {limit:g}): this run ends itself,"
                f" with status {LOST}; the same command continues it from its last checkpoint"
            )
        else:
            time.sleep(3 * self._beat)  # the launcher ends all when one has ended: let it be told why before
        with suppress(OSError):
            self._heartbeat.write("failed")
        os._exit(LOST)

    def _say(self, lines: str) -> None:
        """On standard error, which a rank has even where its own output goes to a file, and in the log."""
        with suppress(OSError):
            os.write(
                2, "".join(f"lmforge: {line}\n" if line[:1] != " " else f"{line}\n" for line in lines.split("\n")).encode()
            )
        if self._log is not None:
            with suppress(OSError), open(self._log, "a", encoding="utf-8") as log:
                log.write(f"{time.strftime('%H:%M:%S')} {lines}\n")


def _gone_on(before: tuple[int, int, int] | None, now: tuple[int, int, int]) -> bool:
    return before is None or before[:2] != now[:2] or now[2] - before[2] > BYTES_OF_WORK
