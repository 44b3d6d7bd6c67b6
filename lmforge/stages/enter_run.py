"""How a run is entered: its directory is locked, its inputs are opened and checked, and an attempt at it is begun."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from lmforge import checkpoint
from lmforge.atomic_files import DISK_FULL_ERRNOS
from lmforge.cluster import distributed as cluster
from lmforge.cluster.distributed import DistributedContext
from lmforge.config.stage import StageConfig
from lmforge.errors import PeerLost, RunFailed, UserError
from lmforge.monitor.disk import DiskMonitor
from lmforge.monitor.rank_log import PEER_LOST_PATTERN, RankLog
from lmforge.monitor.watchdog import Watchdog
from lmforge.parallel.dims import parallel_dims
from lmforge.parallel.validate import choose_engine
from lmforge.runs import Run, is_local, storage_errors
from lmforge.stages.pretrained import ConfigT, pin_checkpoints, with_original_sources
from lmforge.stages.staging import stage_inputs
from lmforge.trackers.processes import TrackerProcesses
from lmforge.trackers.tracker import check_trackers
from lmforge.train.determinism import explain_nondeterministic_op
from lmforge.train.inputs import RunInputs
from lmforge.train.metrics import ConsoleLogger
from lmforge.train.resume import (
    again_if_restarted,
    check_resumable,
    find_resume_point,
    last_checkpoint_message,
    record_launchers,
)
from lmforge.train.run_events import RunEvents
from lmforge.train.trainer import ResumePoint, RunContext
from lmforge.train.validation import open_validation_tasks

# More passes over the data in one optimizer step than this are a mistake, and may take forever.
MAX_EPOCHS_A_STEP = 100


def enter_run(
    config: ConfigT,
    run: Run,
    dist_ctx: DistributedContext,
    prepare_data: Callable[[Any, DistributedContext], None],
    open_inputs: Callable[[Any, int], RunInputs],
) -> tuple[ConfigT, RunInputs, ResumePoint]:
    """Lock the run, and open and check everything that it needs. Every rank calls it, and gets the recipe as it was resolved.

    Raises UserError; the run is as it was then, its lock apart.
    """
    if run.external_checkpoints is not None:  # before its checkpoints are looked for
        dist_ctx.run_once_per_host(partial(checkpoint.check_writable, run))
    config = again_if_restarted(config, run, dist_ctx)
    resumes = dist_ctx.decide_on_rank0(partial(lock_run, run, config))
    with dist_ctx.raise_on_all():
        check_trackers(config.log.trackers)
        if config.log.memory_snapshot and dist_ctx.device.type != "cuda":
            raise UserError(f"log.memory_snapshot: only for a GPU, and this run is on a {dist_ctx.device.type}; leave it out")
        choose_engine(config.parallel, dist_ctx.world_size, dist_ctx.device.type)
        parallel_dims(config.parallel, dist_ctx.world_size, dist_ctx.rank_info.local_world_size)
    config = dist_ctx.decide_on_rank0(partial(pin_checkpoints, config))
    prepare_data(config, dist_ctx)
    stage_inputs(config, dist_ctx)
    with dist_ctx.raise_on_all():
        inputs = open_inputs(config, dist_ctx.world_size)
        sequences_per_epoch = inputs.sequences_per_sample * inputs.train_dataset.sequences_per_epoch
        _check_batch(inputs.batch_plan.global_batch_size, sequences_per_epoch)
        config = config.with_steps(sequences_per_epoch, inputs.batch_plan.global_batch_size)
    inputs = replace(inputs, tasks=dist_ctx.decide_on_rank0(partial(open_validation_tasks, config, inputs)))
    point = dist_ctx.decide_on_rank0(partial(find_resume_point, run, config.train.steps)) if resumes else ResumePoint()
    config, notes = with_original_sources(config, point.manifest)
    with dist_ctx.raise_on_all():
        check_resumable(point, config, inputs)
    return config, inputs, replace(point, messages=(*point.messages, *notes))


def _check_batch(global_batch_size: int, sequences_per_epoch: int) -> None:
    if global_batch_size > MAX_EPOCHS_A_STEP * sequences_per_epoch:
        raise UserError(
            f"a global batch of {global_batch_size:,} sequences: the data has {sequences_per_epoch:,}, so that one step would"
            f" use each of them {global_batch_size // sequences_per_epoch:,} times; use a smaller batch"
        )


def lock_run(run: Run, config: StageConfig) -> bool:
    """Lock a run directory that may be trained in. Returns whether the run is resumed. Changes nothing but the lock.

    Raises UserError where there is something else, or it cannot be written, or `run.resume` forbids it.
    """
    if run.path.exists() and not run.path.is_dir():
        raise UserError(f"{run.path}: a file, where the run's directory would be; choose another --run.name")
    if run.is_not_a_run():
        raise UserError(f"{run.path}: not empty and not a run of lmforge; choose another --run.name")
    # A run of another machine may have nothing here but its checkpoints.
    exists = run.exists() or bool(run.external_checkpoints and run.checkpoint_steps())
    if not exists and config.run.resume == "required":
        raise UserError(f"{run.path}: there is no such run to resume")
    if exists and config.run.resume == "never" and not config.run.overwrite:
        raise UserError(
            f"{run.path}: this run exists; continue it (leave out --resume never), delete it with --run.overwrite,"
            " or give this one another --run.name"
        )
    if not config.run.overwrite:
        run.check_layout()
    run.lock()
    if run.external_checkpoints is None:
        checkpoint.check_writable(run)
    return exists and not config.run.overwrite


def start_attempt(config: StageConfig, run: Run, dist_ctx: DistributedContext) -> RunContext:
    """Write the recipe, open this rank's log, and start the watchdog. Ranks other than 0 print to their logs from now on."""
    attempt = dist_ctx.decide_on_rank0(partial(run.start_attempt, config))
    record_launchers(run, dist_ctx)
    path = run.log_path(attempt, dist_ctx.rank_info.rank)
    folder = run.checkpoints_folder
    # A rank's own host may see another folder, or none.
    with dist_ctx.raise_on_all(), storage_errors(path, "cannot be opened", "all hosts need the folder of the run"):
        log = RankLog(path, dist_ctx.rank_info, attempt)
    watch = Watchdog(
        dist_ctx,
        run.health_folder,
        path,
        stall_seconds=config.watch.stall_seconds,
        timeout_seconds=config.watch.timeout_seconds,
        disk_monitor=DiskMonitor(folder, partial(next_checkpoint_bytes, run)) if is_local(folder) else None,
        add_event=RunEvents(run.events_path).add,  # any rank may be the one that reports a stall
    )
    events = RunEvents(run.events_path if dist_ctx.is_rank0 else None)
    console = ConsoleLogger(dist_ctx, config.train.steps, path, panel=config.log.panel)
    trackers = TrackerProcesses(console.info, console.warn)
    if dist_ctx.is_rank0:
        trackers.start(run, config.log.trackers, config.log.project)
    return RunContext(config, run, dist_ctx, watch, console, log, events, trackers)


def next_checkpoint_bytes(run: Run) -> int:
    """How large the next checkpoint will be: as large as the newest one; 0 where there is none yet."""
    try:
        if not (steps := run.checkpoint_steps()):
            return 0
        return sum(file["bytes"] for file in checkpoint.read_manifest(run.checkpoint_path(steps[-1])).files.values())
    except (UserError, OSError):
        # It is being written or deleted.
        return 0


@contextmanager
def explain_failures(run: Run) -> Iterator[None]:
    """Turn a lost rank, an operator without a deterministic form and a full disk into errors of one line."""
    try:
        yield
    except Exception as problem:
        # Peers fail too once they lose their groups: the rank that knows the cause claims the report before that.
        cluster.claim_error_reporting()
        failed, reason = RunFailed, explain_nondeterministic_op(problem)
        if isinstance(problem, RuntimeError) and (lost := PEER_LOST_PATTERN.search(str(problem))):
            failed, reason = PeerLost, f"another rank was lost ({lost[0].lower()})"
        elif isinstance(problem, OSError) and problem.errno in DISK_FULL_ERRNOS:
            reason = f"no room to write ({problem.strerror})"
        if reason is None:
            raise
        raise failed(f"{run.path}: {reason}; {last_checkpoint_message(run)}") from problem
