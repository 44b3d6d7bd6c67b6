"""How a run is entered: its directory is locked, and its inputs are opened and checked. attempt.py begins an attempt at it."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lmforge import checkpoint
from lmforge.cluster.distributed import DistributedContext
from lmforge.config.mixture import is_remote
from lmforge.config.stage import PretrainConfig, StageConfig
from lmforge.data.shards.staged_copy import stage_folder
from lmforge.errors import UserError
from lmforge.evaluate.tasks import QuestionTask
from lmforge.parallel.dims import parallel_dims
from lmforge.parallel.validate import choose_engine
from lmforge.runs import Run, parse_location
from lmforge.stages.pretrained import ConfigT, find_pretrained, pin_checkpoints, with_original_sources
from lmforge.stages.validation import open_validation_tasks
from lmforge.trackers.tracker import check_trackers
from lmforge.train.inputs import ResumePoint, RunInputs
from lmforge.train.resume import again_if_restarted, check_resumable, find_resume_point

# More passes over the data in one optimizer step are a mistake in the recipe, and would take too long.
MAX_EPOCHS_A_STEP = 100


def enter_run(
    config: ConfigT,
    run: Run,
    dist_ctx: DistributedContext,
    prepare_data: Callable[[Any, DistributedContext], None],
    open_inputs: Callable[[Any, int], RunInputs],
) -> tuple[ConfigT, RunInputs, tuple[tuple[QuestionTask, int], ...], ResumePoint]:
    """Lock the run, and open and check everything that it needs. Every rank calls it, and gets the recipe as it was
    resolved, with the inputs, the tasks of its validation and where it resumes.

    Raises UserError; the run is then unchanged except for its lock.
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
    if config.data.stage_to is not None:
        dist_ctx.run_once_per_folder(partial(_stage_inputs, config, config.data.stage_to), config.data.stage_to)
    with dist_ctx.raise_on_all():
        inputs = open_inputs(config, dist_ctx.world_size)
        sequences_per_epoch = inputs.sequences_per_sample * inputs.train_dataset.sequences_per_epoch
        _check_batch(inputs.batch_plan.global_batch_size, sequences_per_epoch)
        config = config.with_steps(sequences_per_epoch, inputs.batch_plan.global_batch_size)
    tasks = dist_ctx.decide_on_rank0(partial(open_validation_tasks, config, inputs))
    point = dist_ctx.decide_on_rank0(partial(find_resume_point, run, config.train.steps)) if resumes else ResumePoint()
    config, notes = with_original_sources(config, point.manifest)
    with dist_ctx.raise_on_all():
        check_resumable(point, config, inputs)
    return config, inputs, tasks, replace(point, messages=(*point.messages, *notes))


def _stage_inputs(config: StageConfig, stage_to: Path) -> None:
    """Copy the token folders and the model of a recipe to this host's own disk. One rank copies per host, or per group of hosts
    that share the folder. Remote data is not copied: what is read of it is cached in data.cache_folder. Raises UserError where
    the disk has too little space.
    """
    folders = []
    if isinstance(config, PretrainConfig):
        folders = [parse_location(source.folder) for source in config.data.all_sources if not is_remote(source.folder)]
    if config.model.source is not None and config.model.load_weights:
        pretrained = find_pretrained(config.model.source, "weights")
        folders += [pretrained.folder, *([pretrained.adapters] if pretrained.adapters else [])]
    for folder in folders:
        if folder.is_dir():
            stage_folder(stage_to, folder, partial(print, file=sys.stderr, flush=True))


def _check_batch(global_batch_size: int, sequences_per_epoch: int) -> None:
    if global_batch_size > MAX_EPOCHS_A_STEP * sequences_per_epoch:
        raise UserError(
            f"a global batch of {global_batch_size:,} sequences: the data has {sequences_per_epoch:,}, so that one step would"
            f" use each of them {global_batch_size // sequences_per_epoch:,} times; use a smaller batch"
        )


def lock_run(run: Run, config: StageConfig) -> bool:
    """Lock a run directory that may be trained in. Returns whether the run is resumed. Changes only the lock. Raises UserError
    where the directory is not a run, cannot be written, or `run.resume` forbids it.
    """
    if run.path.exists() and not run.path.is_dir():
        raise UserError(f"{run.path}: a file, where the run's directory would be; choose another --run.name")
    if run.is_not_a_run():
        raise UserError(f"{run.path}: not empty and not a run of lmforge; choose another --run.name")
    # On this machine a run of another machine may have only checkpoints.
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
