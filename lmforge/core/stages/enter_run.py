"""How a run is entered: its directory is locked, and its inputs are opened and checked. attempt.py
begins an attempt at it.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from lmforge.core import checkpoint, registry
from lmforge.core.checkpoint import Manifest
from lmforge.core.data.mixture import describe_plan_change
from lmforge.core.data.shards.staged_copy import stage_folder
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.errors import UserError
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.resolve import stored_model_config
from lmforge.core.options.stage import PretrainConfig, StageConfig
from lmforge.core.parallel.dims import parallel_dims
from lmforge.core.parallel.precision import DTYPES, with_dtype
from lmforge.core.parallel.validate import choose_engine
from lmforge.core.plugins import describe_changes, describe_plugins
from lmforge.core.records.runs import Run, is_local, parse_location
from lmforge.core.stages.attempt import again_if_restarted, load_monitors
from lmforge.core.stages.inputs import RunInputs
from lmforge.core.stages.observer import chosen_observers
from lmforge.core.stages.weight_source import (
    ConfigT,
    find_weights,
    pin_checkpoints,
    with_original_sources,
)
from lmforge.core.steps.resume import ResumePoint, find_resume_point

# Options in the plan hash, which identifies the sequences and their order. The hash also covers the
# files.
DATA_OPTIONS = (
    "data.",
    "align.method",
    "rollout.num_generations",
    "rollout.max_completion_length",
    "rollout.environment ",
    "rollout.max_turns ",
    "rollout.num_iterations",
    "train.seed",
)
# Those options that may change for later batches.
MIXTURE_OPTIONS = ("data.sources ", "data.phases ")
# More passes over the data in one optimizer step are a mistake in the recipe, and would take too
# long.
MAX_EPOCHS_A_STEP = 100


def enter_run(
    config: ConfigT,
    run: Run,
    dist_ctx: DistributedContext,
    prepare_data: Callable[[Any, DistributedContext], None],
    open_inputs: Callable[[Any, int], RunInputs],
) -> tuple[ConfigT, RunInputs, ResumePoint]:
    """Lock the run, and open and check everything that it needs.

    Every rank calls it, and gets the recipe as it was resolved, with the inputs and where it
    resumes.

    Raises UserError; the run is then unchanged except for its lock.
    """
    if run.external_checkpoints is not None:  # before its checkpoints are looked for
        dist_ctx.run_once_per_host(partial(checkpoint.check_writable, run))
    config = again_if_restarted(config, run, dist_ctx)
    resumes, token = dist_ctx.decide_on_rank0(partial(lock_run, run, config))
    run.share_lock(token)
    with dist_ctx.raise_on_all():
        load_monitors(config)
        if config.log.memory_snapshot and dist_ctx.device.type != "cuda":
            raise UserError(
                f"log.memory_snapshot: only for a GPU, and this run is on a {dist_ctx.device.type};"
                " leave it out"
            )
        choose_engine(config.parallel, dist_ctx.world_size, dist_ctx.device.type)
        parallel_dims(config.parallel, dist_ctx.world_size, dist_ctx.rank_info.local_world_size)
    config = dist_ctx.decide_on_rank0(partial(pin_checkpoints, config))
    prepare_data(config, dist_ctx)
    if config.data.stage_to is not None:
        dist_ctx.run_once_per_folder(
            partial(_stage_inputs, config, config.data.stage_to), config.data.stage_to
        )
    with dist_ctx.raise_on_all():
        inputs = open_inputs(config, dist_ctx.world_size)
        sequences_per_epoch = inputs.sequences_per_sample * inputs.train_dataset.sequences_per_epoch
        size = inputs.batch_plan.global_batch_size
        if size > MAX_EPOCHS_A_STEP * sequences_per_epoch:
            raise UserError(
                f"a global batch of {size:,} sequences: the data has {sequences_per_epoch:,}, so"
                f" that one step would use each of them {size // sequences_per_epoch:,} times; use"
                " a smaller batch"
            )
        config = config.with_steps(sequences_per_epoch, size)
    with dist_ctx.raise_on_all():
        observers = chosen_observers(config, inputs.model_config)
        for entry in observers:
            entry.load()
    opened = {
        entry.name: dist_ctx.decide_on_rank0(partial(entry.call, "open", config, inputs, resumes))
        for entry in observers
    }
    inputs = replace(inputs, opened=opened)
    point = (
        dist_ctx.decide_on_rank0(partial(find_resume_point, run, config.train.steps))
        if resumes
        else ResumePoint()
    )
    config, notes = with_original_sources(config, point.manifest)
    written_in = point.manifest.written_by.get("dtype") if point.manifest else None
    began_in = next((name for name, dtype in DTYPES.items() if str(dtype) == written_in), None)
    config, dtype_reason = with_dtype(config, dist_ctx, began_in)
    with dist_ctx.raise_on_all():
        check_resumable(point, config, inputs)
    return (
        config,
        replace(inputs, dtype_reason=dtype_reason),
        replace(point, messages=(*point.messages, *notes)),
    )


def _stage_inputs(config: StageConfig, stage_to: Path) -> None:
    """Copy the token folders and the model of a recipe to this host's own disk.

    One rank copies per host, or per group of hosts that share the folder. Remote data is not
    copied: what is read of it is cached there. Raises UserError where the disk has
    too little space.
    """
    folders = []
    if isinstance(config, PretrainConfig):
        folders = list(
            filter(is_local, (parse_location(source.folder) for source in config.data.all_sources))
        )
    if config.model.source is not None and config.model.load_weights:
        weights = find_weights(config.model.source, "weights")
        folders += [weights.folder, *([weights.adapters] if weights.adapters else [])]
    for folder in folders:
        if folder.is_dir():
            stage_folder(stage_to, folder, partial(print, file=sys.stderr, flush=True))


def lock_run(run: Run, config: StageConfig) -> tuple[bool, str]:
    """Lock a run directory that may be trained in.

    Returns whether the run is resumed, and the lock's token. Changes only the lock. Raises
    UserError where the directory is not a run, cannot be written, belongs to a job, or `run.resume`
    forbids it.
    """
    if run.path.exists() and not run.path.is_dir():
        raise UserError(
            f"{run.path}: a file, where the run's directory would be; choose another --run.name"
        )
    if run.is_not_a_run():
        raise UserError(
            f"{run.path}: not empty and not a run of lmforge; choose another --run.name"
        )
    for entry in registry.chosen("run_check", config=config, run=run):
        entry.build(config, run)
    # On this machine a run of another machine may have only checkpoints.
    exists = run.exists() or bool(run.external_checkpoints and run.checkpoint_steps())
    if not exists and config.run.resume == "required":
        raise UserError(f"{run.path}: there is no such run to resume")
    if exists and config.run.resume == "never" and not config.run.overwrite:
        raise UserError(
            f"{run.path}: this run exists; continue it (leave out --resume never), delete it with"
            " --run.overwrite, or give this one another --run.name"
        )
    if not config.run.overwrite:
        run.check_layout()
    token = run.lock()
    if run.external_checkpoints is None:
        checkpoint.check_writable(run)
    return exists and not config.run.overwrite, token


def check_resumable(point: ResumePoint, config: StageConfig, inputs: RunInputs) -> None:
    """Raise UserError where the checkpoint belongs to another run than `config` describes."""
    if (manifest := point.manifest) is None:
        return
    optimizer = manifest.recipe.get("optimizer", {}).get("name")
    batch_size = inputs.batch_plan.global_batch_size
    differs = ""
    if stored_model_config(manifest) != inputs.model_config:
        differs = (
            "another model config"
            f" ({_model_difference(stored_model_config(manifest), inputs.model_config)})"
        )
    elif optimizer != config.optimizer.name:
        differs = f"saved with optimizer.name = {optimizer}, here it is {config.optimizer.name}"
    elif manifest.tokenizer_hash != inputs.tokenizer.hash:
        differs = f"trained with another tokenizer than {inputs.data_source} was prepared with"
    elif manifest.global_batch_size != batch_size:
        differs = (
            f"its global batch has {manifest.global_batch_size} sequences, this recipe's"
            f" {batch_size}"
        )
    elif manifest.plan_hash != inputs.train_dataset.plan_hash_at(manifest.consumed_sequences):
        change = describe_plan_change(
            manifest.data_plan, inputs.train_dataset.plan_at(manifest.consumed_sequences)
        )
        changes = [
            change
            for change in _changed_options(manifest, config)
            if change.startswith(DATA_OPTIONS)
        ]
        if changes and (
            change is None or not any(each.startswith(MIXTURE_OPTIONS) for each in changes)
        ):
            change = f"trained with other data options ({', '.join(changes)})"
        differs = change or "trained on other data"
    if differs:
        ways = "use the recipe it was begun with, another --run.name, or --run.overwrite"
        raise UserError(f"{point.checkpoint_folder}: {differs}; {ways}")


def _model_difference(theirs: ModelConfig, ours: ModelConfig) -> str:
    their_fields = asdict(theirs)
    our_fields = asdict(ours)
    # A wrapped model is described only by its config.json.
    for fields in (their_fields, our_fields):
        fields |= fields.pop("config_dict", {})
    names = [
        name for name in our_fields | their_fields if their_fields.get(name) != our_fields.get(name)
    ]
    differing = [
        f"{name} {their_fields.get(name)} there, {our_fields.get(name)} here" for name in names[:3]
    ]
    return (
        "; ".join(differing)
        or f"computed by {theirs.implementation} there, by {ours.implementation} here"
    )


def describe_config_changes(point: ResumePoint, config: StageConfig) -> list[str]:
    """A line that names the options that differ from the checkpoint's recipe."""
    if point.manifest is None:
        return []
    changed = list(_changed_options(point.manifest, config))
    plugins = describe_changes(
        point.manifest.written_by.get("plugins", {}), describe_plugins(config.plugins)
    )
    lines = [f"changed since that checkpoint: {', '.join(changed)}"] if changed else []
    return lines + (
        [f"plugins differ from those of that checkpoint: {', '.join(plugins)}"] if plugins else []
    )


def _changed_options(manifest: Manifest, config: StageConfig) -> Iterator[str]:
    """Each option that differs from the checkpoint's recipe, as `section.name then → now`."""
    for section, options in config.model_dump(
        mode="json", exclude={"plugins", "run", "launch", "watch"}
    ).items():
        then = manifest.recipe.get(section, {})
        yield from (
            f"{section}.{name} {then.get(name)} → {now}"
            for name, now in options.items()
            if then.get(name) != now
        )
