"""`lmforge jobs` and `lmforge stop`: the jobs of `lmforge launch`, by the name of the run."""

import os
import time
from pathlib import Path

from rich.table import Table

from lmforge.cluster.jobs.job import JOB_FILE, LAUNCH_FOLDER, Job, JobState, read_job
from lmforge.cluster.jobs.launchers import job_state, stop_job
from lmforge.config.verbs.running import JobsOptions, StopOptions
from lmforge.errors import UserError
from lmforge.monitor.run_status import read_run_status
from lmforge.runs import Run
from lmforge.terminal.cells import format_age, page_console

# Words that begin with the same letter in no other state, so that no colour is needed to tell them apart.
STYLES = {JobState.RUNNING: "green", JobState.FAILED: "red", JobState.REFUSED: "red", JobState.LOST: "red"}


def run_jobs(options: JobsOptions) -> int:
    """Print a row for each run that was launched. Raises UserError where a run was named that was not, and, after the rows of
    the others, where the record of a job cannot be read."""
    problems: list[str] = []
    if options.name is None:
        jobs, problems = _launched(options.folder)
    else:
        jobs = dict([_find(options.name, options.folder)])
    if not jobs and not problems:
        print(f"{options.folder}: nothing was launched from here; lmforge launch RECIPE starts a run")
        return 0
    console = page_console(200)
    table = Table(box=None, pad_edge=False)
    for title in ("run", "launcher", "job", "state", "step", "launched", "log"):
        table.add_column(title, overflow="fold")
    for path, job in jobs.items():
        try:
            state, detail = job_state(job)
        except UserError as problem:
            state, detail = JobState.LOST, str(problem)
        number = "" if job.number is None else f"_{job.number}"
        words = f"{state} ({detail})" if detail else str(state)
        launched = f"{format_age(max(0.0, time.time() - job.submitted_at))} ago"
        row = (job.name, job.launcher, f"{job.job_id or ''}{number}", words, _progress(path), launched)
        table.add_row(*row, os.path.relpath(job.log), style=STYLES.get(state))
    if jobs:
        console.print(table)
    if problems:
        more = f" (and {len(problems) - 1:,} more such files)" if len(problems) > 1 else ""
        raise UserError(f"{problems[0]}{more}")
    return 0


def run_stop(options: StopOptions) -> int:
    """Stop a run, or all of a sweep by the sweep's name. Raises UserError where it was not launched or does not answer."""
    _, job = _find(options.name, options.folder)
    state, _ = job_state(job)
    if not state.is_active:
        print(f"{options.name}: {state} already")
        return 0
    stop_job(job, state, options.kill)
    saves = state == JobState.RUNNING and not options.kill
    print(f"{options.name}: asked to {'save a checkpoint and end' if saves else 'end at once'}")
    return 0


def _launched(folder: Path) -> tuple[dict[Path, Job], list[str]]:
    """(the launched runs, by directory; for a sweep, each of its runs; what is wrong with records that cannot be read)."""
    jobs: dict[Path, Job] = {}
    problems: list[str] = []
    paths = sorted(file.parent.parent for file in folder.glob(f"*/{LAUNCH_FOLDER}/{JOB_FILE}"))
    for path in paths:
        try:
            job = read_job(path)
        except UserError as problem:
            problems.append(str(problem))
            continue
        if job is not None and job.num_runs == 1:
            jobs[path] = job
    return jobs, problems


def _find(name: str, folder: Path) -> tuple[Path, Job]:
    """The directory of a run that was launched, and its job. Raises UserError."""
    path = folder / name
    if Path(name).name != name or (job := read_job(path)) is None:
        names = ", ".join(each.name for each in _launched(folder)[0]) or "none"
        raise UserError(f"{path}: no run that was launched; there are: {names} (--folder names another folder of runs)")
    return path, job


def _progress(path: Path) -> str:
    """`STEP of STEPS`; empty before a run has begun."""
    try:
        status = read_run_status(Run(path))
    except UserError:
        return ""
    return "" if status.state == "not started" else f"{status.step} of {status.steps or '?'}"
