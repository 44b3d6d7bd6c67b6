"""`lmforge launch`: freeze a recipe and its code in the run's directory, write the scripts, and submit them."""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from lmforge.atomic_files import atomic_write_text
from lmforge.cluster.jobs.code_snapshot import save_code
from lmforge.cluster.jobs.hosts import read_hosts
from lmforge.cluster.jobs.job import JOB_SCRIPT, LAUNCH_FOLDER, NODE_SCRIPT, Job, JobPlan, write_job
from lmforge.cluster.jobs.launchers import check, check_no_job, find_hosts, plan_scripts, submit
from lmforge.cluster.jobs.sessions import Hosts, sessions_of_run
from lmforge.config.load import STAGES, parse_config
from lmforge.config.operation import LaunchOptions
from lmforge.config.options import to_toml
from lmforge.config.stage import StageConfig
from lmforge.config.verbs.bench import sweep_combinations
from lmforge.config.verbs.running import LaunchRequest
from lmforge.errors import UserError, format_count, typed_command
from lmforge.runs import Run
from lmforge.verbs.show.describe import dry_run

FROZEN_RECIPE = "recipe.toml"
FROZEN_NOTE = "# Frozen by `lmforge launch`: the job reads this file.\n\n"


@dataclass(frozen=True)
class _PlannedRun:
    """One run of a job, and its recipe; a sweep as a whole has none."""

    run: Run
    config: StageConfig | None = None

    @property
    def launch_folder(self) -> Path:
        return Path(os.path.abspath(self.run.path / LAUNCH_FOLDER))


def run_launch(request: LaunchRequest) -> int:
    """Start a recipe as `launch.on` says, and return. Raises UserError, and then nothing has been started and no file is
    left."""
    options = with_nodes(request.config.launch)
    summary, runs = _plan_runs(request, options)
    if (processes := options.processes) > 1 and options.on in ("local", "mpi") and options.hosts is None:
        from lmforge.cluster.launch import check_num_processes

        check_num_processes(processes)
    base, plan = _plan_job(request, options, runs)
    if request.command.dry_run:
        _print_dry_run(plan, summary)
        return 0
    with ExitStack() as locks:
        for each in {run.run.path: run for run in (base, *runs)}.values():
            locks.enter_context(_claim(each))
        hosts = find_hosts(plan)
        scripts = plan_scripts(plan, hosts)
        _check_script(plan, scripts[JOB_SCRIPT])
        for each in runs:
            if each.config is not None and each.config.run.overwrite:
                each.run.delete()
        job = _submit(plan, hosts, scripts, base, runs)
    print(summary)
    _print_job(job, plan)
    return 0


def with_nodes(options: LaunchOptions) -> LaunchOptions:
    """The options with a number of nodes. Raises UserError."""
    unused = [name for name in ("hosts", "account", "partition") if getattr(options, name) is not None]
    if unused and "on" not in options.model_fields_set:
        given = f"launch.{unused[0]} = {getattr(options, unused[0])}"
        readers = "ssh or mpi" if unused[0] == "hosts" else "slurm or pbs"
        raise UserError(f"{given} has no effect with --on local; choose --on {readers}")
    if options.on == "local" and (options.nodes or 1) > 1:
        raise UserError(
            f"launch.nodes = {options.nodes}: --on local starts one, this machine; choose another, such as --on slurm"
        )
    nodes = options.nodes or (len(read_hosts(options.hosts)) if options.on == "ssh" and options.hosts else 1)
    return options.model_copy(update={"nodes": nodes})


# --- what is to be started --------------------------------------------------------------------------------------------


def _plan_runs(request: LaunchRequest, options: LaunchOptions) -> tuple[str, list[_PlannedRun]]:
    """(the batch arithmetic in lines, the runs). Raises UserError where a recipe would be refused for its options."""
    combinations = sweep_combinations(request.command.sweep, type(request.config)) if request.command.sweep else [{}]
    runs = []
    summary = ""
    for number, overrides in enumerate(combinations):
        words = [word for option, value in overrides.items() for word in (f"--{option}", value)]
        config: StageConfig = parse_config(STAGES[request.verb], [*request.arguments, *words])
        config = config.model_copy(update={"launch": options})
        if len(combinations) > 1:
            config = config._with_run(name=f"{config.run.name}-{number}")
        lines = dry_run(config)
        summary = summary or lines.partition("\n\n")[0]
        runs.append(_PlannedRun(Run.from_config(config), config))
    return summary, runs


def _plan_job(request: LaunchRequest, options: LaunchOptions, runs: list[_PlannedRun]) -> tuple[_PlannedRun, JobPlan]:
    """(the run whose launch folder holds the scripts, the job)."""
    base = runs[0]
    if len(runs) > 1:
        first = runs[0].run.path
        base = _PlannedRun(Run(first.with_name(first.name.removesuffix("-0"))))
    plan = JobPlan(
        name=base.run.path.name,
        verb=request.verb,
        folder=base.launch_folder,
        recipes=tuple(each.launch_folder / FROZEN_RECIPE for each in runs),
        options=options,
        on_cpu=request.config.train.device == "cpu",
    )
    return base, plan


@contextmanager
def _claim(planned: _PlannedRun) -> Iterator[None]:
    """Lock a run that may be started. Raises UserError where a job of this name is waiting or running, or it may not be."""
    from lmforge.stages.enter_run import lock_run

    run, existed = planned.run, planned.run.path.exists()
    try:
        if planned.config is not None:
            lock_run(run, planned.config)
        else:
            check_no_job(run.path)
            run.lock()
        yield
    except BaseException:
        run.unlock()
        if not existed:
            shutil.rmtree(run.path, ignore_errors=True)
        raise
    run.unlock()


# --- starting it ------------------------------------------------------------------------------------------------------


def _check_script(plan: JobPlan, script: str) -> None:
    """Ask the scheduler before any file of an earlier run is touched."""
    path = plan.folder.parent / ".lock.job.sh"  # kept by `Run.delete`, like all names with this prefix
    atomic_write_text(path, script)
    try:
        check(plan, path)
    finally:
        path.unlink()


@contextmanager
def _new_folder(folder: Path) -> Iterator[None]:
    """A launch folder to fill. The folder of an earlier launch is kept in it as `previous`. If the block fails, the earlier
    folder is restored."""
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


def _submit(plan: JobPlan, hosts: Hosts | None, scripts: dict[str, str], base: _PlannedRun, runs: list[_PlannedRun]) -> Job:
    """Write the files and submit the job. Where that is refused, they are removed again."""
    with ExitStack() as folders:
        for folder in sorted({each.launch_folder for each in (base, *runs)}):
            folders.enter_context(_new_folder(folder))
        for each in runs:
            assert each.config is not None
            atomic_write_text(each.launch_folder / FROZEN_RECIPE, f"{FROZEN_NOTE}{to_toml(each.config.again())}")
            save_code(each.launch_folder, plan.directory)
        for name, text in scripts.items():
            atomic_write_text(plan.folder / name, text)
        job = submit(plan, hosts)
    write_job(base.run.path, job)
    if plan.is_sweep:
        for number, each in enumerate(runs):
            own = sessions_of_run(plan, job.sessions, number)
            write_job(each.run.path, replace(job, name=each.run.path.name, number=number, num_runs=1, sessions=own))
    return job


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
    return Hosts((None,), ((plan.options.address or "localhost", plan.options.port or 29500),))


def _print_job(job: Job, plan: JobPlan) -> None:
    nodes = f"{format_count(job.nodes, 'node')} × {format_count(job.processes, 'rank')}"
    job_id = f" {job.job_id}" if job.job_id else ""
    runs = f"{job.num_runs} runs, " if job.num_runs > 1 else ""
    command = typed_command()
    print(f"started    {job.name}: {job.launcher}{job_id}, {runs}{nodes}; scripts: {plan.folder / JOB_SCRIPT}, {NODE_SCRIPT}")
    logs = plan.folder / ("output-*.log" if plan.is_sweep else "output*.log")
    parent = plan.folder.parent.parent
    folder = "" if parent == Path.cwd() / "runs" else f" --folder {os.path.relpath(parent)}"
    print(f"to follow  tail -f {os.path.relpath(logs)}")
    print(f"state      {command} jobs{folder}")
    print(f"to stop    {command} stop {job.name}{folder}")
