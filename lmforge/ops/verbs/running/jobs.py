"""The jobs of `lmforge launch`: what `lmforge runs` prints of them, and `lmforge stop`."""

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Semaphore

from rich.table import Table

from lmforge.core.distributed.waiting import start_in_thread
from lmforge.core.errors import UserError, name_some
from lmforge.core.records.runs import Run
from lmforge.ops.jobs.job import Job, JobState, read_job
from lmforge.ops.jobs.launchers import job_state, stop_job
from lmforge.ops.monitor.run_status import read_run_status
from lmforge.ops.options.running import StopOptions
from lmforge.ops.terminal.cells import format_age

# Words that begin with the same letter in no other state, so that no colour is needed to tell them
# apart.
COLUMNS = (
    "run",
    "launcher",
    "job",
    "state",
    "reason",
    "step",
    "restarts",
    "requeues",
    "launched",
    "log",
)
# A host that is down is not waited for any longer.
ANSWER_SECONDS = 8.0
ASKED_AT_ONCE = 32
JOB_SECONDS = 5.0
STYLES = {
    JobState.RUNNING: "green",
    JobState.FAILED: "red",
    JobState.REFUSED: "red",
    JobState.LOST: "red",
}


def launched_jobs(folders: Iterable[Path]) -> tuple[dict[Path, Job], list[str]]:
    """(the jobs of runs that were launched, by directory; what is wrong with records that cannot be
    read).
    """
    jobs: dict[Path, Job] = {}
    problems: list[str] = []
    for folder in folders:
        try:
            job = read_job(folder)
        except UserError as problem:
            problems.append(str(problem))
            continue
        if job is not None:
            jobs[folder] = job
    return jobs, problems


def jobs_table(jobs: Mapping[Path, Job]) -> Table:
    """A row for each job, whose launcher is asked for its state."""
    table = Table(box=None, pad_edge=False)
    for title in COLUMNS:
        table.add_column(title, overflow="fold")
    for (path, job), (state, reason) in zip(
        jobs.items(), _states(list(jobs.values())), strict=True
    ):
        launched = f"{format_age(max(0.0, time.time() - job.submitted_at))} ago"
        table.add_row(
            job.name,
            job.launcher,
            job.job_id or "",
            str(state),
            reason,
            _progress(path),
            str(_restarts(path, job) or ""),
            str(job.requeues or ""),
            launched,
            os.path.relpath(job.log),
            style=STYLES.get(state),
        )
    return table


def _states(jobs: Sequence[Job]) -> list[tuple[JobState, str]]:
    """The state of each job and its reason.

    Only unfinished ones are asked for, all at once, and for a bounded time.
    """
    at_once = Semaphore(ASKED_AT_ONCE)

    def ask(job: Job) -> tuple[JobState, str]:
        with at_once:
            return state_and_reason(job)

    asked = {
        at: start_in_thread(partial(ask, job), job.name)
        for at, job in enumerate(jobs)
        if not job.has_ended
    }
    deadline = time.monotonic() + ANSWER_SECONDS
    states = []
    for at, job in enumerate(jobs):
        if at not in asked:
            states.append(_with_reason(job, job.state_by_status(), ""))
            continue
        try:
            states.append(asked[at].result(max(0.0, deadline - time.monotonic())))
        except TimeoutError:
            hosts = (
                name_some([session.host or "this machine" for session in job.sessions])
                or job.launcher
            )
            states.append((JobState.LOST, f"no answer within {ANSWER_SECONDS:.0f} s from {hosts}"))
    return states


def state_and_reason(job: Job) -> tuple[JobState, str]:
    """The state of a job now, and why: what its scheduler says, or its output."""
    try:
        state, detail = job_state(job)
    except UserError as problem:
        state = job.state_by_status()
        detail = ""
        if state == JobState.LOST:
            detail = str(problem)
    return _with_reason(job, state, detail)


def _with_reason(job: Job, state: JobState, detail: str) -> tuple[JobState, str]:
    return state, detail or ("" if state.is_active or state == JobState.DONE else job.last_words())


class JobWatch:
    """The job of a run that may have been launched, asked for every JOB_SECONDS at most."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._asked_at = -math.inf
        self._state: JobState | None = None
        self._line = ""

    def look(self) -> tuple[JobState | None, str]:
        """(state, `slurm job 12 is pending (Resources)`); None where there is no job.

        The line is empty while the run itself tells more: it has begun since, and the job does not
        wait.
        """
        if time.monotonic() - self._asked_at < JOB_SECONDS:
            return self._state, self._line
        if (job := read_job(self._run.path)) is not None:
            state, reason = state_and_reason(job)
            has_begun = (self._run.started_at_ns or 0) >= 1e9 * job.submitted_at
            words = [job.launcher, "job", job.job_id or "", "is", str(state)]
            if reason:
                words.append(f"({reason})")
            line = " ".join(filter(None, words))
            self._state = state
            self._line = "" if has_begun and state != JobState.PENDING else line
        self._asked_at = time.monotonic()
        return self._state, self._line


def run_stop(options: StopOptions) -> int:
    """Stop a run. Raises UserError where it was not launched or does not answer."""
    _, job = _find(options.name, options.folder)
    state, _ = job_state(job)
    if not state.is_active:
        print(f"{options.name}: {state} already")
        return 0
    stop_job(job, state, options.kill)
    saves = state == JobState.RUNNING and not options.kill
    print(f"{options.name}: asked to {'save a checkpoint and end' if saves else 'end at once'}")
    return 0


def _find(name: str, folder: Path) -> tuple[Path, Job]:
    """The directory of a run that was launched, and its job. Raises UserError."""
    path = folder / name
    if Path(name).name != name or (job := read_job(path)) is None:
        jobs, _ = launched_jobs(sorted(folder.iterdir()) if folder.exists() else ())
        names = ", ".join(each.name for each in jobs) or "none"
        raise UserError(
            f"{path}: no run that was launched; there are: {names} (--folder names another folder"
            " of runs)"
        )
    return path, job


def _restarts(path: Path, job: Job) -> int:
    """How often its ranks were started again since it was launched."""
    run = Run(path)
    attempts = [
        number
        for number in run.attempts()
        if run.log_path(number, 0).parent.stat().st_mtime >= job.submitted_at
    ]
    return max(0, len(attempts) - 1 - job.requeues)


def _progress(path: Path) -> str:
    """`STEP of STEPS`; empty before a run has begun."""
    try:
        status = read_run_status(Run(path))
    except UserError:
        return ""
    if status.state == "not started":
        return ""
    return f"{status.step} of {status.steps or '?'}"
