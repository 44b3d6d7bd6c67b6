"""`lmforge launch`: freeze a recipe and its code in the run's directory, write the scripts, and
submit them.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lmforge.core.distributed.hosts import read_hosts
from lmforge.core.errors import UserError, format_count, typed_command
from lmforge.core.files.atomic_files import atomic_write_text
from lmforge.core.options.operation import LaunchOptions
from lmforge.core.options.options import to_toml
from lmforge.core.options.stage import StageConfig
from lmforge.core.records.runs import LAUNCH_FOLDER, Run
from lmforge.ops.jobs.code_snapshot import save_code
from lmforge.ops.jobs.job import JOB_SCRIPT, NODE_SCRIPT, Job, JobPlan, write_job
from lmforge.ops.jobs.launchers import check, find_hosts, plan_scripts, submit
from lmforge.ops.jobs.sessions import Hosts
from lmforge.ops.options.running import LaunchRequest
from lmforge.ops.verbs.show.describe import dry_run

FROZEN_RECIPE = "recipe.toml"
FROZEN_NOTE = "# Frozen by `lmforge launch`: the job reads this file.\n\n"


def run_launch(request: LaunchRequest) -> int:
    """Start a recipe as `launch.on` says, and return.

    Raises UserError, and then nothing has been started and no file is left.
    """
    options = with_nodes(request.config.launch)
    config = request.config.model_copy(update={"launch": options})
    summary = dry_run(config).partition("\n\n")[0]
    if (
        (processes := options.processes) > 1
        and options.on in ("local", "mpi")
        and options.hosts is None
    ):
        from lmforge.core.distributed.launch import check_num_processes

        check_num_processes(processes)
    run = Run.from_config(config)
    folder = Path(os.path.abspath(run.path / LAUNCH_FOLDER))
    plan = JobPlan(
        name=run.path.name,
        verb=request.verb,
        folder=folder,
        recipe=folder / FROZEN_RECIPE,
        options=options,
        on_cpu=config.train.device == "cpu",
    )
    if request.command.dry_run:
        _print_dry_run(plan, summary)
        return 0
    with _claim(run, config):
        hosts = find_hosts(plan)
        scripts = plan_scripts(plan, hosts)
        _check_script(plan, scripts[JOB_SCRIPT])
        if config.run.overwrite:
            run.delete()
        with _new_folder(folder):
            atomic_write_text(plan.recipe, f"{FROZEN_NOTE}{to_toml(config.again())}")
            save_code(folder, plan.directory)
            for name, text in scripts.items():
                atomic_write_text(folder / name, text)
            job = submit(plan, hosts)
        write_job(run.path, job)
    print(summary)
    _print_job(job, plan)
    return 0


def with_nodes(options: LaunchOptions) -> LaunchOptions:
    """The options with a number of nodes. Raises UserError."""
    unused = [
        name for name in ("hosts", "account", "partition") if getattr(options, name) is not None
    ]
    if unused and "on" not in options.model_fields_set:
        given = f"launch.{unused[0]} = {getattr(options, unused[0])}"
        readers = "slurm or pbs"
        if unused[0] == "hosts":
            readers = "ssh or mpi"
        raise UserError(f"{given} has no effect with --on local; choose --on {readers}")
    if options.on == "local" and (options.nodes or 1) > 1:
        raise UserError(
            f"launch.nodes = {options.nodes}: --on local starts one, this machine; choose another,"
            " such as --on slurm"
        )
    nodes = options.nodes or (
        len(read_hosts(options.hosts)) if options.on == "ssh" and options.hosts else 1
    )
    return options.model_copy(update={"nodes": nodes})


@contextmanager
def _claim(run: Run, config: StageConfig) -> Iterator[None]:
    """Lock a run that may be started.

    Raises UserError where a job of this name is waiting or running, or it may not be.
    """
    from lmforge.core.stages.enter_run import lock_run

    try:
        lock_run(run, config)
        yield
    except BaseException:
        run.unlock(discard=True)
        raise
    run.unlock()


def _check_script(plan: JobPlan, script: str) -> None:
    """Ask the scheduler before any file of an earlier run is touched."""
    # Kept by `Run.delete`, like all names with this prefix.
    path = plan.folder.parent / ".lock.job.sh"
    atomic_write_text(path, script)
    try:
        check(plan, path)
    finally:
        path.unlink()


@contextmanager
def _new_folder(folder: Path) -> Iterator[None]:
    """A launch folder to fill.

    The folder of an earlier launch is kept in it as `previous`. If the block fails, the earlier
    folder is restored.
    """
    aside = folder.with_name(f".lock.{folder.name}")  # a name that `Run` takes for its own
    if folder.exists():
        folder.rename(aside)
    try:
        folder.mkdir(parents=True)
        yield
        if aside.exists():
            aside.rename(folder / "previous")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if aside.exists():
            aside.rename(folder)
        raise


def _print_dry_run(plan: JobPlan, summary: str) -> None:
    print(summary)
    for name, text in plan_scripts(plan, _hosts_without_asking(plan)).items():
        print(f"\n# ── {plan.folder / name}")
        print(text.rstrip())
    if plan.options.on == "ssh" and plan.options.hosts:
        names = ", ".join(read_hosts(plan.options.hosts)[: plan.nodes])
        print(f"\n# {JOB_SCRIPT} would be started on: {names}")


def _hosts_without_asking(plan: JobPlan) -> Hosts | None:
    if plan.options.on in ("slurm", "pbs"):
        return None
    return Hosts((None,), plan.options.address or "localhost", plan.options.port or 29500)


def _print_job(job: Job, plan: JobPlan) -> None:
    nodes = f"{format_count(job.nodes, 'node')} × {format_count(job.processes, 'rank')}"
    job_id = ""
    if job.job_id:
        job_id = f" {job.job_id}"
    command = typed_command()
    print(
        f"started    {job.name}: {job.launcher}{job_id}, {nodes}; scripts:"
        f" {plan.folder / JOB_SCRIPT}, {NODE_SCRIPT}"
    )
    parent = plan.folder.parent.parent
    folder = "" if parent == Path.cwd() / "runs" else f" --folder {os.path.relpath(parent)}"
    print(f"to follow  tail -f {os.path.relpath(plan.folder / 'output*.log')}")
    print(f"state      {command} runs {os.path.relpath(plan.folder.parent)}")
    print(f"to stop    {command} stop {job.name}{folder}")
