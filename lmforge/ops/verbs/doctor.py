"""`lmforge doctor`: on this machine, or with `--on` over the hosts of a job, which is started for
it and waited for.

The checks are in ops/doctor, the comparison of strategies in lab/bench/parity_table.py. This module
prints their answers, starts the job with the launchers of `lmforge launch`, and removes its folder
at the end.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import NoReturn

from lmforge.core import registry
from lmforge.core.distributed.rank_info import read_rank_info
from lmforge.core.errors import EXIT_PEER_LOST, RunFailed, UserError, name_some
from lmforge.core.files.atomic_files import atomic_write_text
from lmforge.core.files.untrusted import describe_os_error
from lmforge.core.options.load import read_config
from lmforge.core.options.operation import JobOptions, LaunchOptions
from lmforge.ops.doctor import Finding
from lmforge.ops.doctor.machine_checks import examine_machine
from lmforge.ops.jobs.job import JOB_SCRIPT, Job, JobPlan, JobState
from lmforge.ops.jobs.launchers import check, find_hosts, job_state, plan_scripts, stop_job, submit
from lmforge.ops.jobs.scripts import PRINTED_PREFIX, STATUS_PREFIX
from lmforge.ops.options.examine import DoctorOptions
from lmforge.ops.verbs.running.launch import with_nodes
from lmforge.ops.verbs.show.describe import resolve_model
from lmforge.ops.verbs.show.describe_data import find_vocab_size

POLL_SECONDS = 0.1
STATE_SECONDS = 3.0
# How long a scheduler may take to report the end of a job after its script has written its exit
# status.
ENDING_SECONDS = 30.0


def run_doctor(options: DoctorOptions) -> int:
    """Examine this machine, or the hosts of a job.

    Returns the exit status; raises UserError and RunFailed.
    """
    if options.is_elsewhere:
        return _examine_job(options)
    return _examine_here(options)


def _examine_here(options: DoctorOptions) -> int:
    """Examine the ranks of this process group, and print the findings on rank 0; or compare the
    strategies. Returns 1 on all ranks where a required check fails. Raises UserError for a recipe
    that cannot be read, and RunFailed on a rank that cannot reach rank 0.
    """
    if options.parity:
        return int(registry.get("doctor_check", "parity").build(options))
    info = read_rank_info()
    config = None
    if options.recipe is not None:
        config = read_config(options.recipe)
    if options.coordinates and config is not None:
        model = resolve_model(config, find_vocab_size(config))
        return int(
            registry.get("doctor_check", "coordinates").build(
                config, model, options.steps, options.output
            )
        )
    findings = []
    if info.local_rank == 0:
        findings = list(examine_machine(options.device))
    if any(finding.name == "torch" and finding.status == "fail" for finding in findings):
        _print_findings(findings, options.output)
        return 1
    from lmforge.ops.doctor.examine_ranks import Examination  # with torch

    try:
        examination = Examination(info, config, options.device, options.timeout_seconds, findings)
        return examination.examine(lambda judged: _print_findings(judged, options.output))
    except RunFailed as problem:
        if info.is_rank0:
            raise
        print(f"lmforge: {problem}", file=sys.stderr, flush=True)  # rank 0 does not know it
        return 1


def _print_findings(findings: Sequence[Finding], output: str) -> None:
    failed = [finding for finding in findings if finding.status == "fail"]
    if output == "json":
        print(json.dumps([asdict(finding) for finding in findings], indent=1), flush=True)
        return
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        where = ""
        if finding.where:
            where = f"{name_some(finding.where)}: "
        todo = ""
        if finding.todo:
            todo = f"; {finding.todo}"
        print(f"{finding.status}  {finding.name:<{width}}  {where}{finding.description}{todo}")
    warned = sum(finding.status == "warn" for finding in findings)
    verdict = "lmforge can train here"
    if failed:
        verdict = f"{len(failed)} of {len(findings)} fail: lmforge cannot train here"
    if warned:
        verdict += f"; {warned} to look at"
    print(verdict, flush=True)


def _examine_job(options: DoctorOptions) -> int:
    config = None
    if options.recipe is not None:
        config = read_config(options.recipe)
    given = {
        name: getattr(options, name)
        for name in JobOptions.model_fields
        if name in options.model_fields_set
    }
    launch = (config.launch if config else LaunchOptions()).model_copy(
        update={**given, "signal_seconds": 1}
    )
    launch = with_nodes(launch)
    try:
        folder = Path(tempfile.mkdtemp(prefix=".lmforge-doctor-", dir=Path.cwd()))
    except OSError as problem:
        raise UserError(
            f"{describe_os_error(problem, Path.cwd())}; the job needs a folder here for its scripts"
        ) from None
    try:
        plan = JobPlan(
            name="doctor",
            verb="doctor",
            folder=folder,
            recipe=Path(os.devnull),
            options=launch,
            on_cpu=options.device == "cpu" or (config is not None and config.train.device == "cpu"),
            arguments=_arguments(options, launch.processes),
        )
        return _carry_out(plan)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _arguments(options: DoctorOptions, processes: int) -> tuple[str, ...]:
    """What is typed after `doctor` on each node."""
    words = [] if options.recipe is None else [os.path.abspath(options.recipe)]
    for name in options.changed():
        if name not in JobOptions.model_fields and name != "recipe":
            words += [f"--{name}", str(getattr(options, name))]
    return (*words, "--processes", str(processes))


def _carry_out(plan: JobPlan) -> int:
    hosts = find_hosts(plan)
    for name, text in plan_scripts(plan, hosts).items():
        atomic_write_text(plan.folder / name, text)
    check(plan, plan.folder / JOB_SCRIPT)
    job = submit(plan, hosts)
    with _ended_with_this_process(job):
        _await_end(job)
    return _report(plan, job)


@contextmanager
def _ended_with_this_process(job: Job) -> Iterator[None]:
    """A block in which a signal that ends this process ends the job too."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    handlers = {
        number: signal.signal(number, leave)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    except BaseException:
        stop_job(job, JobState.RUNNING, kill=True)
        raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _await_end(job: Job) -> None:
    """Wait for the end of a job, with the lines of its logs on standard error, and what its
    scheduler says while it waits.
    """
    shown: dict[Path, int] = {}
    last_detail = ""
    last_query = 0.0
    deadline = float("inf")
    while True:
        _show_logs(Path(job.folder), shown)
        now = time.monotonic()
        if deadline == float("inf") and job.status_path.exists():
            deadline = now + ENDING_SECONDS
            last_query = 0.0
        if now > last_query + STATE_SECONDS:
            state, detail = job_state(job)
            last_query = time.monotonic()
            if not state.is_active:
                _show_logs(Path(job.folder), shown)
                return
            if state == JobState.PENDING and detail != last_detail:
                last_detail = detail
                name = "the job"
                if job.job_id:
                    name = f"job {job.job_id}"
                print(
                    f"lmforge: {name} is pending ({detail or 'no reason given'})",
                    file=sys.stderr,
                    flush=True,
                )
        if now > deadline:
            return
        time.sleep(POLL_SECONDS)


def _show_logs(folder: Path, shown: dict[Path, int]) -> None:
    """Print what is new in the logs; `shown` is how many bytes of each were printed before."""
    for path in sorted(folder.glob("output*.log")):
        with path.open("rb") as file:
            file.seek(shown.get(path, 0))
            new = file.read()
        shown[path] = shown.get(path, 0) + len(new)
        sys.stderr.write(new.decode(errors="replace"))
    sys.stderr.flush()


def _report(plan: JobPlan, job: Job) -> int:
    """Print what doctor printed on the nodes.

    Returns one exit status for all nodes: 2 takes precedence.
    """
    for path in sorted(plan.folder.glob(f"{PRINTED_PREFIX}.*")):
        sys.stdout.write(path.read_text(errors="replace"))
    statuses = [
        int(path.read_text().strip() or 1) for path in plan.folder.glob(f"{STATUS_PREFIX}.*")
    ]
    if not statuses:
        state = job.state_by_status()
        raise (UserError if state == JobState.REFUSED else RunFailed)(
            f"doctor has not run on any node; the job is {state}"
        )
    # A node that did not reach the first.
    if 2 in statuses:
        return 2
    if EXIT_PEER_LOST in statuses:
        return 1
    return max(statuses)
