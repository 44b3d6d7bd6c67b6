"""The watchdog of a run: heartbeats, reports of stalls while they last, stragglers, drift, and the
disk.

The loop sets its phase (`set_phase`) and gives the time of its steps (`check_step_times`). A thread
writes the heartbeat and looks only at this rank's clock; when a phase lasts too long it reads what
the other ranks wrote. So a healthy run writes a small file every two seconds, and a rank that hangs
need not answer.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.errors import EXIT_PEER_LOST, UserError
from lmforge.core.records.runs import is_local
from lmforge.ops.monitor import stall
from lmforge.ops.monitor.heartbeat import MAX_HEARTBEAT_SECONDS, SILENT_AFTER_SECONDS, Heartbeat
from lmforge.ops.monitor.rank_log import stamp_lines, write_to_terminal
from lmforge.ops.monitor.step_time_drift import DriftDetector
from lmforge.ops.monitor.stragglers import StragglerMonitor
from lmforge.ops.monitor.usage.disk import DiskMonitor
from lmforge.ops.monitor.usage.host import publish_usage

# A stall is noticed this many heartbeats before it is reported: ranks that wait for each other
# notice it within one heartbeat, and what they write must exist when one of them reports.
HEARTBEATS_BEFORE_REPORT = 3
# A phase may take this many times its usual time before it is a stall.
PATIENCE_FACTOR = 3.0
# Compilation may take this many times `stall_seconds` before it is a stall; until then it is
# reported as what it is.
COMPILE_PATIENCE_FACTOR = 10.0
# A rank that has read and written less in half of `timeout_seconds` is not reading anything large:
# it hangs.
MIN_PROGRESS_BYTES = 16 * 2**20


@dataclass
class _Stall:
    """A stall that this rank has noticed: its phase, when it is reported next, and the progress of
    all ranks at a time.
    """

    started: float
    phase: str
    next_report: float
    evidence_written: bool = False
    stuck_ranks: str = ""
    progress: dict[int, tuple[int, int, int]] | None = None
    progress_at: float = 0.0


class Watchdog:
    """Watches this rank.

    `folder` is for heartbeats; reports go to standard error and to `log_path`, stacks beside it.

    `add_event(kind, step, **fields)` keeps what the rank that reports a stall says about it.
    `may_write`: whether `folder` is still that of this run.
    """

    def __init__(
        self,
        dist_ctx: DistributedContext,
        folder: Path,
        log_path: Path,
        *,
        stall_seconds: float = 30.0,
        timeout_seconds: float | None = None,
        may_write: Callable[[], bool] = lambda: True,
        add_event: Callable[..., None] = lambda kind, step, **fields: None,
    ) -> None:
        self._dist_ctx = dist_ctx
        self._folder = folder
        self._log_path = log_path
        self._rank = dist_ctx.rank_info.rank
        self._stacks_file = log_path.with_suffix(".stack.txt")
        self._stall_seconds = stall_seconds
        self._timeout_seconds = timeout_seconds
        self._heartbeat_seconds = min(MAX_HEARTBEAT_SECONDS, stall_seconds / 10)
        self._heartbeat = Heartbeat(folder, self._rank, dist_ctx.world_size)
        self._stragglers = StragglerMonitor(dist_ctx, self._heartbeat)
        self._drift = DriftDetector()
        self._step_seconds: float | None = None
        self._stall: _Stall | None = None
        self._evidence_mark = -1.0
        self._training_thread = threading.get_ident()
        self._stopped = threading.Event()
        self._to_stop: list[Callable[[], object]] = [self._stragglers.close]
        dist_ctx.wait_context = self._heartbeat.barrier
        self._add_event = add_event
        self._may_write = may_write
        if dist_ctx.rank_info.local_rank == 0:
            self._to_stop.append(publish_usage(folder, self._rank, self._owns_folder))
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def set_phase(self, phase: str, step: int | None = None) -> None:
        """Say what this rank does from now on, at the same step unless one is given.
        docs/watching.md lists the phases. Does nothing in threads that work beside the training.
        """
        if threading.get_ident() == self._training_thread:
            self._heartbeat.set_phase(phase, self._heartbeat.current.step if step is None else step)

    def follow_compilation(self) -> None:
        """Make the phase `compiling` while torch compiles. Imports torch's compiler."""
        from torch._dynamo.callback import callback_handler

        begin = self._heartbeat.begin_compiling
        end = self._heartbeat.end_compiling
        callback_handler.register_start_callback(begin)
        callback_handler.register_end_callback(end)
        self._to_stop += [partial(callback_handler.remove_start_callback, begin)]
        self._to_stop += [partial(callback_handler.remove_end_callback, end)]

    def watch_disk(self, folder: Path, next_checkpoint_bytes: Callable[[], int]) -> None:
        """Let rank 0 warn where the disk of the checkpoints has become full.

        A store does not say how much it has.
        """
        if self._dist_ctx.is_rank0 and is_local(folder):
            self._to_stop.append(DiskMonitor(folder, next_checkpoint_bytes).start(self._log_lines))

    def describe_progress(self) -> str:
        """Step and phase, in words."""
        return f"step {self._heartbeat.current.step}, {self._heartbeat.current.phase}"

    def check_step_times(self, step: int, step_seconds: float, pipeline_rank: int) -> list[str]:
        """Lines about stragglers and drift. Every rank calls it at the same steps, and none waits.

        `step_seconds` is the mean since the last log step, of training alone. Ranks of the same
        `pipeline_rank` do equal work. Call it after something has waited for the device.
        """
        self._step_seconds = step_seconds
        return [
            *self._stragglers.exchange(step, step_seconds, pipeline_rank),
            *self._drift.update(step, step_seconds),
        ]

    def stop(self, final_phase: str) -> None:
        """Write the final phase and end the thread."""
        self._dist_ctx.wait_context = None
        for stop in self._to_stop:
            with suppress(ValueError):  # torch.compiler.reset has removed a callback
                stop()
        self.set_phase(final_phase)
        self._stopped.set()
        self._thread.join(timeout=MAX_HEARTBEAT_SECONDS)  # a disk that hangs must not hang the end

    def _run(self) -> None:
        acts: list[Callable[[], None]] = [self._heartbeat.write, self._check_stall]
        last = False
        wait_seconds = 0.0  # the first at once: a rank that is killed soon has been there
        while not last:
            last = self._stopped.wait(wait_seconds)
            wait_seconds = self._heartbeat_seconds
            for act in acts[:1] if last else acts:
                # A heartbeat that cannot be written or read, as on a full disk, must not stop the
                # training or this thread.
                with suppress(OSError, UserError):
                    if self._owns_folder():
                        act()

    def _owns_folder(self) -> bool:
        """Whether the folder is this run's, as far as can be found out: a file server that fails is
        a stall to report.
        """
        with suppress(OSError):
            return self._may_write()
        return True

    def _check_stall(self) -> None:
        now = self._heartbeat.current
        age = time.perf_counter() - now.started
        if self._stall is not None and self._stall.started != now.started:
            self._end_stall(self._stall, now.started - self._stall.started)
        gathering = HEARTBEATS_BEFORE_REPORT * self._heartbeat_seconds
        # Another rank of this stall may report it earlier, and needs to know where this rank is.
        if age >= self._stall_seconds - gathering and self._evidence_mark != now.started:
            self._evidence_mark = now.started
            self._write_evidence()
        limit = max(self._stall_seconds, PATIENCE_FACTOR * self._heartbeat.usual_seconds(now.phase))
        if self._stall is None:
            if age < limit - gathering:
                return
            self._stall = _Stall(now.started, now.phase, limit - self._heartbeat_seconds)
            self._heartbeat.stall_noticed = True
            self._heartbeat.write()
        observed = self._stall
        if age >= observed.next_report - gathering and not observed.evidence_written:
            observed.evidence_written = True
            self._write_evidence()
        if age >= observed.next_report:
            observed.next_report = 2 * age
            observed.evidence_written = False
            self._report_stall(observed, age)
        if self._timeout_seconds is not None and self._dist_ctx.world_size > 1:
            self._check_timeout(observed, age, self._timeout_seconds)

    def _write_evidence(self) -> None:
        now = self._heartbeat.current
        progress = now.step, now.phase_number
        stall.write_evidence(
            self._folder, self._stacks_file, self._rank, progress, self._training_thread
        )

    def _read_peers(self) -> list[stall.PeerStatus]:
        self._heartbeat.write()
        written = self._heartbeat.path.stat().st_mtime
        patience = max(SILENT_AFTER_SECONDS, 3 * self._heartbeat_seconds)
        return [
            stall.read_peer(self._folder, rank, written, patience)
            for rank in range(self._dist_ctx.world_size)
        ]

    def _is_reporter(self, peers: list[stall.PeerStatus]) -> bool:
        """Whether this rank reports: the one that has reported this stall before, or the lowest
        that has noticed it.
        """
        able = [peer for peer in peers if peer.state == "running" and peer.heartbeat["noticed"]]
        reporters = [peer.rank for peer in able if peer.heartbeat["reported"]] or [
            peer.rank for peer in able
        ]
        return min(reporters, default=self._rank) == self._rank

    def _report_stall(self, observed: _Stall, age: float) -> None:
        if self._rank and not self._heartbeat.stall_reported:
            # Usually rank 0 reports: thousands of ranks should not each read what all the others
            # wrote.
            self._heartbeat.write()
            first = stall.read_peer(
                self._folder, 0, self._heartbeat.path.stat().st_mtime, SILENT_AFTER_SECONDS
            )
            if first.state == "running" and first.heartbeat["noticed"]:
                return
        peers = self._read_peers()
        if not self._is_reporter(peers):
            return
        patience = COMPILE_PATIENCE_FACTOR * self._stall_seconds
        if compiling := stall.compiling_peers(peers, patience):
            remaining = patience - max(peer.seconds_in_phase for peer in compiling)
            observed.next_report = min(observed.next_report, age + remaining)
            self._log_lines(stall.compiling_line(compiling, len(peers)))
            return
        verdict = stall.classify_ranks(peers)
        observed.stuck_ranks = ", ".join(
            f"rank {peer.rank} was"
            f" {'stuck in ' + peer.heartbeat['phase'] if peer.heartbeat else 'missing'}"
            for peer in peers
            if verdict[peer.rank] == stall.STUCK
        )
        stacks = str(self._stacks_file).replace(f"rank-{self._rank}.", "rank-*.")
        lines = stall.report_lines(peers, age, self._step_seconds, stacks)
        if not self._heartbeat.stall_reported:
            self._heartbeat.stall_reported = True
            self._add_event(
                "stall", self._heartbeat.current.step, reason=lines[0].removeprefix("STALL: ")
            )
        self._log_lines("\n".join(lines))

    def _end_stall(self, observed: _Stall, seconds: float) -> None:
        if self._heartbeat.stall_reported:
            stuck = ""
            if observed.stuck_ranks:
                stuck = f" ({observed.stuck_ranks})"
            line = f"making progress again after {seconds:.0f} s in {observed.phase}{stuck}"
            self._add_event("stall over", self._heartbeat.current.step, reason=line)
            self._log_lines(line)
        self._stall = None
        self._heartbeat.stall_noticed = False
        self._heartbeat.stall_reported = False

    def _check_timeout(self, observed: _Stall, age: float, limit: float) -> None:
        """End this process where no rank has made progress, or read and written much, for `limit`
        seconds.

        The ranks are read twice, half of that apart: a slow rank has made progress in between.
        """
        if age < limit / 2 or (
            observed.progress is not None and age < observed.progress_at + limit / 2
        ):
            return
        peers = self._read_peers()
        before = observed.progress
        progress = {
            peer.rank: (*peer.progress, peer.heartbeat["bytes"])
            for peer in peers
            if peer.state == "running"
        }
        if before is None or any(
            _made_progress(before.get(rank), now) for rank, now in progress.items()
        ):
            observed.progress = progress
            observed.progress_at = age
            return
        if self._is_reporter(peers):
            self._add_event(
                "end", None, state="failed", error=f"no rank has made progress for {age:.0f} s"
            )
            self._log_lines(
                f"no rank has made progress for {age:.0f} s (watch.timeout_seconds = {limit:g}):"
                f" this run ends itself, with status {EXIT_PEER_LOST}; the same command continues"
                " it from its last checkpoint"
            )
        else:
            # The launcher ends all ranks when one has ended: let the report come first.
            time.sleep(3 * self._heartbeat_seconds)
        with suppress(OSError):
            self._heartbeat.write("failed")
        os._exit(EXIT_PEER_LOST)

    def _log_lines(self, lines: str) -> None:
        """Write to the launcher's standard error, which a rank has even where its output goes to a
        file, and to the log.
        """
        printed = [
            line if line.startswith(" ") else f"lmforge: {line}" for line in lines.split("\n")
        ]
        with suppress(OSError, ValueError):
            write_to_terminal("".join(f"{line}\n" for line in printed))
        if self._owns_folder():
            with suppress(OSError), open(self._log_path, "a", encoding="utf-8") as log:
                log.write(stamp_lines(lines))


def _made_progress(before: tuple[int, int, int] | None, now: tuple[int, int, int]) -> bool:
    return before is None or before[:2] != now[:2] or now[2] - before[2] > MIN_PROGRESS_BYTES
