"""Jobs of Slurm: sbatch, squeue, scontrol, scancel. Accounting (sacct) is not needed."""

import re
from pathlib import Path

from lmforge.core.distributed.processes import NOT_INSTALLED, call, try_call
from lmforge.core.errors import UserError
from lmforge.ops.jobs.job import Job, JobPlan, JobState

ACTIVE_STATES = {
    "PENDING": JobState.PENDING,
    "REQUEUED": JobState.PENDING,
    "REQUEUE_HOLD": JobState.PENDING,
    "REQUEUE_FED": JobState.PENDING,
    "SPECIAL_EXIT": JobState.PENDING,
    "CONFIGURING": JobState.RUNNING,
    "RUNNING": JobState.RUNNING,
    "COMPLETING": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "STAGE_OUT": JobState.RUNNING,
    "SUSPENDED": JobState.RUNNING,
    "STOPPED": JobState.RUNNING,
    "RESIZING": JobState.RUNNING,
}


def check(plan: JobPlan, script: Path) -> None:
    """Let Slurm check a script without submitting it.

    Raises UserError with Slurm's message where it refuses it.
    """
    call(["sbatch", "--test-only", str(script)], "sbatch refuses the job")


def submit(plan: JobPlan, script: Path) -> str:
    """Submit a script. Returns the job's id. Raises UserError with Slurm's message."""
    printed = call(["sbatch", "--parsable", str(script)], "sbatch refuses the job")
    return printed.strip().partition(";")[0]


def state(job: Job) -> tuple[JobState, str]:
    """The state of a job, and what Slurm says about it."""
    job_id = str(job.job_id)
    status, printed, message = try_call(
        ["squeue", "--noheader", "--jobs", job_id, "--format", "%T|%r|%N"]
    )
    if status == NOT_INSTALLED:
        raise UserError(f"{job.name}: job {job_id}: {message}")
    if status != 0 and "Invalid job id" not in message:
        raise UserError(f"{job.name}: job {job_id}: squeue: {message}")
    # Slurm keeps a job that has ended for some minutes.
    line = ""
    if status == 0 and printed.strip():
        line = printed.strip().splitlines()[0]
    word, _, rest = line.partition("|")
    reason, _, nodes = rest.partition("|")
    if word in ACTIVE_STATES:
        return ACTIVE_STATES[word], nodes if word == "RUNNING" else reason.removeprefix("None")
    match = re.search(
        r"JobState=(\w+)", try_call(["scontrol", "show", "job", "--oneliner", job_id])[1]
    )
    ended = ""
    if match:
        ended = match[1]
    by_status = job.state_by_status()
    if by_status == JobState.LOST and ended in (
        "CANCELLED",
        "COMPLETED",
        "FAILED",
        "TIMEOUT",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
    ):
        return (
            JobState.INTERRUPTED if ended == "CANCELLED" else JobState.FAILED
        ), ended.lower().replace("_", " ")
    return by_status, ""


def stop(job: Job, now: JobState, kill: bool) -> None:
    """Make a running job save and end, or end it at once; a waiting one is cancelled."""
    gently = [] if kill or now == JobState.PENDING else ["--signal=TERM"]
    call(["scancel", *gently, str(job.job_id)], f"{job.name}: scancel")
