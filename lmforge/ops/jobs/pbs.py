"""Jobs of PBS (OpenPBS, PBS Professional): qsub, qstat, qsig, qdel."""

import re
from pathlib import Path

from lmforge.core.distributed.processes import NOT_INSTALLED, call, try_call
from lmforge.core.errors import UserError
from lmforge.core.files.atomic_files import atomic_write_text
from lmforge.core.files.untrusted import read_bounded
from lmforge.ops.jobs.job import MAX_STATUS_BYTES, STOP_FILE, Job, JobPlan, JobState

ACTIVE_STATES = {
    # Queued, held, being moved, waiting for its time, moved.
    **dict.fromkeys("QHTWM", JobState.PENDING),
    # Running, exiting, suspended, suspended by a user, begun.
    **dict.fromkeys("RESUB", JobState.RUNNING),
}
# PBS reports this for a job that has ended.
ENDED_PATTERN = re.compile(r"[Uu]nknown Job|has finished")
NEXT_JOB_FILE = "next-job"


def submit(plan: JobPlan, script: Path) -> str:
    """Submit a script. Returns the job's id. Raises UserError with the message of PBS."""
    return call(["qsub", str(script)], "qsub refuses the job").strip().splitlines()[-1]


def state(job: Job) -> tuple[JobState, str]:
    """The state of a job, and what PBS says about it."""
    job_id = _current_id(job)
    status, printed, message = try_call(["qstat", "-f", job_id])
    if status == NOT_INSTALLED or (status != 0 and not ENDED_PATTERN.search(message)):
        raise UserError(f"{job.name}: job {job_id}: {message}")
    match = None
    if status == 0:
        match = re.search(r"job_state = (\w)", printed)
    if match and match[1] in ACTIVE_STATES:
        comment = re.search(r"comment = (.*)", printed)
        return ACTIVE_STATES[match[1]], comment[1].strip() if comment else ""
    return job.state_by_status(), ""


def stop(job: Job, now: JobState, kill: bool) -> None:
    """Make a running job save and end, or end it at once; a waiting one is deleted."""
    atomic_write_text(Path(job.folder) / STOP_FILE, "")
    # PBS signals every process of the job, mpiexec too, which would kill the ranks for a SIGTERM.
    command = ["qdel"] if kill or now == JobState.PENDING else ["qsig", "-s", "SIGUSR1"]
    call([*command, _current_id(job)], f"{job.name}: {command[0]}")


def _current_id(job: Job) -> str:
    """The id of the job, or of the one that it submitted at its time limit."""
    try:
        next_job = read_bounded(Path(job.folder) / NEXT_JOB_FILE, MAX_STATUS_BYTES, ValueError)
        return next_job.decode().strip() or str(job.job_id)
    except (OSError, ValueError):
        return str(job.job_id)
