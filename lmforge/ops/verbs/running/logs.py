"""`lmforge logs`: the logs of all ranks of a run in one view, with the first error first."""

import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.style import Style

from lmforge.core.errors import UserError, format_count
from lmforge.core.records.runs import Run
from lmforge.ops.monitor.failures import CAUSES, Failure, find_failures
from lmforge.ops.monitor.log_files import LogFile, LogLine, format_clock, merged, tail
from lmforge.ops.monitor.run_status import RUN_ENDED, RUN_GOES_ON, RunStatus, read_run_status
from lmforge.ops.options.running import LogsOptions
from lmforge.ops.verbs.running.jobs import JobWatch

POLL_SECONDS = 0.5
# `--follow` waits this long for a new attempt at a run that failed: restarted ranks import torch
# and join first.
RESTART_SECONDS = 60.0
RANK_COLOURS = (
    "cyan",
    "green",
    "yellow",
    "magenta",
    "blue",
    "bright_cyan",
    "bright_green",
    "bright_magenta",
)
# Lines of a failure that are printed without --errors.
FAILURE_LINES = 40


def run_logs(options: LogsOptions) -> int:
    """Print the logs, or the errors in them, or follow them. Returns 0. Raises UserError."""
    run = Run(options.run)
    status = read_run_status(run)
    attempts = run.attempts()
    if options.attempt is not None and options.attempt not in attempts:
        there = ", ".join(map(str, attempts)) or "none"
        raise UserError(
            f"--attempt: {run.path} has no logs of attempt {options.attempt}; there are {there}"
        )
    job = JobWatch(run)
    if not attempts and not options.follow:
        raise UserError(f"{run.path}: {job.look()[1] or 'no logs yet'}; --follow waits for them")
    printer = _Printer(Console(highlight=False, soft_wrap=True))
    newest = max(attempts, default=0)
    statuses = {newest: status}  # of earlier attempts nothing is known but their logs
    if options.errors:
        chosen = [options.attempt] if options.attempt else attempts
        for attempt in chosen:
            _print_errors(printer, run, attempt, statuses.get(attempt), options.rank)
        return 0
    attempt = options.attempt or newest
    files = _open_logs(run, attempt, options.rank)
    if attempt:
        printer.print_attempt(run, attempt, statuses.get(attempt))
        failures = find_failures(run, attempt, statuses.get(attempt))
        printer.print_first_failure(failures)
        printer.print_lines(merged(files) if options.lines is None else tail(files, options.lines))
        if failures:  # the first lines may have scrolled off the screen
            first = failures[0]
            printer.print(
                f"--- first error: rank {first.rank}, {format_clock(first.time)}: {first.headline}"
                " (--errors) ---"
            )
    if options.follow and attempt == newest:
        with suppress(KeyboardInterrupt):
            _follow(printer, run, job, attempt, {file.path: file for file in files}, options.rank)
    return 0


def _open_logs(run: Run, attempt: int, rank: int | None) -> list[LogFile]:
    """The logs of an attempt, or that of one rank.

    Raises UserError where there is none of that rank.
    """
    logs = run.rank_logs(attempt)
    if rank is not None and attempt and rank not in logs:
        raise UserError(
            f"--rank: attempt {attempt} of {run.path} has no log of rank {rank}; it has {len(logs)}"
            " ranks"
        )
    return [LogFile(path, each) for each, path in logs.items() if rank in (None, each)]


def _print_errors(
    printer: "_Printer", run: Run, attempt: int, status: RunStatus | None, rank: int | None
) -> None:
    """All failures in an attempt, the cause first, each as its rank wrote it."""
    printer.print_attempt(run, attempt, status)
    failures = find_failures(run, attempt, status)
    for number, failure in enumerate(failures):
        if rank in (None, failure.rank):
            printer.print_failure(failure, is_first=number == 0)
    if not any(rank in (None, failure.rank) for failure in failures):
        printer.print("no errors")


def _follow(
    printer: "_Printer",
    run: Run,
    job: JobWatch,
    attempt: int,
    files: dict[Path, LogFile],
    rank: int | None,
) -> None:
    """Print what is written from now on, over new ranks and attempts, until the run ends and no job
    will continue it.
    """
    failed_at: float | None = None
    printed = ""
    while True:
        # Checked before reading, so that everything written before the end is printed.
        status = read_run_status(run)
        if (newest := max(run.attempts(), default=0)) != attempt:
            _print_new(printer, files.values(), to_the_end=True)
            attempt = newest
            files = {}
            failed_at = None
            printer.print_attempt(run, attempt, status)
        for each, path in run.rank_logs(attempt).items():
            if path not in files and rank in (None, each):
                files[path] = LogFile(path, each)
        has_ended = status.state in RUN_ENDED
        _print_new(printer, files.values(), to_the_end=has_ended)
        job_state, line = (None, "") if status.state in RUN_GOES_ON else job.look()
        is_queued = job_state is not None and job_state.is_active
        if line and line != printed:
            printed = line
            printer.print(f"--- {line} ---")
        if status.state == "done" or (status.state == "interrupted" and not is_queued):
            printer.print(f"--- the run has ended: {status.state} ---")
            return
        if line and not is_queued:
            return
        if has_ended and failed_at is None and not is_queued:
            failed_at = time.monotonic()
            printer.print_first_failure(find_failures(run, attempt, status))
            printer.print(
                f"--- attempt {attempt} has ended: {status.state}; waiting {RESTART_SECONDS:.0f} s"
                " for another ---"
            )
        if failed_at is not None and time.monotonic() > failed_at + RESTART_SECONDS:
            printer.print("--- no other attempt has begun ---")
            return
        sys.stdout.flush()
        time.sleep(POLL_SECONDS)


def _print_new(printer: "_Printer", files: Iterable[LogFile], *, to_the_end: bool) -> None:
    """Print what was written since the last call, in the order of time."""
    while True:  # a rank may write faster than one piece each time
        pieces = [piece for file in files if (piece := file.read(to_the_end=to_the_end))]
        if not pieces:
            return
        printer.print_lines(sorted(line for piece in pieces for line in piece))


@dataclass
class _Printer:
    """Prints lines with time and rank, in a colour for each rank on a terminal."""

    console: Console
    _labels: dict[int, str] = field(default_factory=dict)
    _date: str = ""
    _rank_width: int = 1

    def print(self, line: str, style: str = "bold") -> None:
        """A line of lmforge's among those of the logs."""
        self._write(self._coloured(line, style))

    def print_attempt(self, run: Run, attempt: int, status: RunStatus | None) -> None:
        """The attempt: its ranks, its hosts, and its state."""
        headers = [LogFile(path, rank).header() for rank, path in run.rank_logs(attempt).items()]
        hosts = list(dict.fromkeys(host for _, host in headers if host))
        num_ranks = max([number for number, _ in headers], default=0)
        self._rank_width = max(self._rank_width, len(str(max(0, num_ranks - 1))))
        if len(hosts) == 1:
            where = f" on {hosts[0]}"
        elif hosts:
            where = f" on {format_count(len(hosts), 'host')}"
        else:
            where = ""
        what = "no logs yet"
        if num_ranks:
            what = f"{format_count(num_ranks, 'rank')}{where}"
        if status:
            what += f", {status.state}"
        self.print(f"--- {run.path}, attempt {attempt}: {what} ---")

    def print_first_failure(self, failures: list[Failure]) -> None:
        """The failure that was the cause, and one line about those that it caused."""
        if not failures:
            return
        self.print_failure(failures[0], is_first=True, max_lines=FAILURE_LINES)
        others = [failure for failure in failures[1:] if failure.kind != "stalled"]
        if others:
            ranks = ", ".join(str(failure.rank) for failure in others[:16])
            if len(others) > 16:
                ranks += ", …"
            who = f"rank {ranks}" if len(others) == 1 else f"ranks {ranks}"
            seconds = others[0].time - failures[0].time
            after = ""
            if seconds >= 0:
                after = f", {seconds:.1f} s later"
            kinds = " or ".join(dict.fromkeys(failure.kind for failure in others))
            self.print(f"--- then {who} ({kinds}){after}; --errors prints these too ---")

    def print_failure(
        self, failure: Failure, *, is_first: bool, max_lines: int | None = None
    ) -> None:
        """One failure, with the lines that its rank wrote."""
        if is_first and failure.kind in CAUSES:
            title = "FIRST ERROR"
        elif failure.kind == "stalled":
            title = "STALL"
        else:
            title = "ERROR"
        where = ""
        if failure.host:
            where = f" on {failure.host}"
        is_bad = failure.kind in CAUSES or failure.kind == "stalled"
        self._print_date(failure.time)
        style = "yellow"
        if is_bad:
            style = "bold red"
        self.print(
            f"{title}: rank {failure.rank}{where} {failure.kind}, {format_clock(failure.time)}",
            style,
        )
        lines = [failure.headline, *failure.lines[1:]]
        if max_lines is not None and len(lines) > max_lines:
            half = max_lines // 2  # what and where the error is, and the innermost calls
            lines = [*lines[:half], f"… {len(lines) - max_lines} lines", *lines[-half:]]
        for line in lines:
            self._write(f"  {line}")

    def print_lines(self, lines: Iterable[LogLine]) -> None:
        """Lines of logs."""
        for line in lines:
            self._print_date(line.time)
            self._write(f"{format_clock(line.time)} {self._label(line.rank)} {line.text}")

    def _print_date(self, seconds: float) -> None:
        date = time.strftime("%Y-%m-%d", time.localtime(seconds))
        if date != self._date:
            self._date = date
            self.print(f"--- {date} ---", "dim")

    def _label(self, rank: int) -> str:
        if rank not in self._labels:
            self._labels[rank] = self._coloured(
                f"rank {rank:>{self._rank_width}} │", RANK_COLOURS[rank % len(RANK_COLOURS)]
            )
        return self._labels[rank]

    def _coloured(self, text: str, style: str) -> str:
        system = self.console._color_system
        if system is not None:
            return Style.parse(style).render(text, color_system=system)
        return text

    @staticmethod
    def _write(line: str) -> None:
        sys.stdout.write(f"{line}\n")
