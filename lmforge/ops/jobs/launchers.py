"""Selects the module that submits, finds and stops a job, by `launch.on`."""

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from lmforge.core.distributed.environment import JOB_VARIABLE
from lmforge.core.distributed.waiting import print_line
from lmforge.core.errors import UserError
from lmforge.core.options.stage import StageConfig
from lmforge.core.records.runs import Run
from lmforge.ops.jobs import pbs, scripts, sessions, slurm
from lmforge.ops.jobs.job import JOB_SCRIPT, NODE_SCRIPT, Job, JobPlan, JobState, read_job

_MODULES: dict[str, ModuleType] = {
    "slurm": slurm,
    "pbs": pbs,
    "local": sessions,
    "ssh": sessions,
    "mpi": sessions,
}
_SCRIPTS: dict[str, Callable[[JobPlan], str]] = {
    "slurm": scripts.slurm_script,
    "pbs": scripts.pbs_script,
    "local": scripts.session_script,
    "ssh": scripts.session_script,
}


def plan_scripts(plan: JobPlan, hosts: sessions.Hosts | None) -> dict[str, str]:
    """The files of the job's folder by name: its scripts. `hosts` of jobs without a scheduler.

    Raises UserError where mpiexec is not there.
    """
    if plan.options.on == "mpi":
        assert hosts is not None
        job_script = scripts.mpi_script(plan, sessions.mpi_command(plan, hosts))
    else:
        job_script = _SCRIPTS[plan.options.on](plan)
    node_script = scripts.rank_script if plan.options.on == "mpi" else scripts.node_script
    if plan.verb == "doctor":
        node_script = scripts.examination_script
    return {JOB_SCRIPT: job_script, NODE_SCRIPT: node_script(plan)}


def find_hosts(plan: JobPlan) -> sessions.Hosts | None:
    """The hosts of a job without a scheduler, after checking that each can run it.

    Raises UserError.
    """
    if _MODULES[plan.options.on] is sessions:
        return sessions.find_hosts(plan)
    return None


def check(plan: JobPlan, script: Path) -> None:
    """Let the scheduler check a script without submitting it, if it can.

    Raises UserError with its message.
    """
    if plan.options.on == "slurm":
        slurm.check(plan, script)


def submit(plan: JobPlan, hosts: sessions.Hosts | None) -> Job:
    """Submit the script of the job's folder, or start it.

    Raises UserError, and then nothing runs.
    """
    job_id = None
    started = []
    if hosts is not None:
        started = sessions.submit(plan, hosts)
    else:
        job_id = _MODULES[plan.options.on].submit(plan, plan.folder / JOB_SCRIPT)
    return Job(
        name=plan.name,
        launcher=plan.options.on,
        folder=str(plan.folder),
        nodes=plan.nodes,
        processes=plan.options.processes,
        job_id=job_id,
        sessions=started,
        ssh_options=list(hosts.ssh_options) if hosts else [],
    )


def job_state(job: Job) -> tuple[JobState, str]:
    """The state of a job now, and a few words about it.

    Raises UserError where its scheduler does not answer.
    """
    state: tuple[JobState, str] = _MODULES[job.launcher].state(job)
    return state


def check_no_job_of(config: StageConfig, run: Run) -> None:
    """Raise UserError where the folder of a run belongs to a job that this process is not of."""
    check_no_job(run.path)


def check_no_job(run_folder: Path) -> None:
    """Raise UserError where a job that has not started this process trains in a run's directory, or
    will. Where its scheduler or hosts do not answer, that is said.
    """
    job = read_job(run_folder)
    if job is None or os.environ.get(JOB_VARIABLE) == job.folder or job.has_ended:
        return
    try:
        state, detail = job_state(job)
    except UserError as problem:  # such as on a machine without that scheduler
        state = JobState.LOST
        detail = str(problem)
    what = "its job"
    if job.job_id:
        what = f"job {job.job_id}"
    name = run_folder.name
    if state == JobState.LOST and detail:
        print_line(
            f"{run_folder}: not known whether {what} ({job.launcher}) has ended, and taken for"
            f" ended: {detail}"
        )
    if state.is_active:
        raise UserError(
            f"{run_folder}: {what} ({job.launcher}) is {state}; stop it with lmforge stop {name},"
            " or choose another --run.name"
        )


def stop_job(job: Job, now: JobState, kill: bool) -> None:
    """Make a job in the state `now` save and end, or end it at once. Raises UserError."""
    _MODULES[job.launcher].stop(job, now, kill)
