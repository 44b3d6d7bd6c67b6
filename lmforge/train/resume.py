"""Where a run resumes from: the newest checkpoint that can be used, checked against the recipe, and loaded."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import TypeVar

import torch

from lmforge import checkpoint
from lmforge.atomic_files import atomic_write_json
from lmforge.checkpoint import CorruptCheckpoint, Manifest
from lmforge.cluster.distributed import DistributedContext
from lmforge.cluster.rank_info import launcher_identity
from lmforge.config.stage import StageConfig
from lmforge.data.mixture import describe_plan_change
from lmforge.errors import UserError
from lmforge.interop.resolve import stored_model_config
from lmforge.model.config import ModelConfig
from lmforge.parallel.parallel_model import ParallelModel
from lmforge.plugins import describe_changes, describe_plugins
from lmforge.runs import Run
from lmforge.train.inputs import ResumePoint, RunInputs
from lmforge.train.optimizers.optimizer import named_optimizer_state
from lmforge.untrusted import read_json

StageConfigT = TypeVar("StageConfigT", bound=StageConfig)

# In the run's directory: `launcher_identity` of every rank of the last attempt.
LAUNCHERS = ".launchers.json"
NO_USABLE_CHECKPOINT = "{run}: none of its checkpoints can be used ({reason}); restore one, or begin again with --run.overwrite"
# Options in the plan hash, which identifies the sequences and their order. The hash also covers the files.
DATA_OPTIONS = (
    "data.",
    "align.method",
    "rollout.num_generations",
    "rollout.max_completion_length",
    "rollout.num_iterations",
    "train.seed",
)
# Those options that may change for later batches.
MIXTURE_OPTIONS = ("data.sources ", "data.phases ")


def again_if_restarted(config: StageConfigT, run: Run, dist_ctx: DistributedContext) -> StageConfigT:
    """The recipe; after a restart by torchrun, without the options that apply only at the first start. Restarts are detected by
    the recorded torchrun processes, since torchrun's own restart count is not set on all ranks after a host was lost or has
    joined. Every rank calls it.
    """
    launchers = dist_ctx.all_gather(launcher_identity())

    def choose() -> StageConfigT:
        with suppress(UserError, OSError):
            if not set(read_json(run.path / LAUNCHERS, list[str])).isdisjoint(launchers):
                return config.again()
        return config

    return dist_ctx.decide_on_rank0(choose)


def record_launchers(run: Run, dist_ctx: DistributedContext) -> None:
    """Record which torchrun processes started this attempt, for `again_if_restarted`. Every rank calls it."""
    launchers = [each for each in dist_ctx.all_gather(launcher_identity()) if each]
    if dist_ctx.is_rank0 and launchers:
        atomic_write_json(run.path / LAUNCHERS, launchers)


def find_resume_point(run: Run, steps: int, before_step: int | None = None) -> ResumePoint:
    """The newest checkpoint (of a step below `before_step`) from which a run of `steps` steps can resume. Tensors are not read.

    Raises UserError where there are checkpoints and none of them can be used.
    """
    skipped: list[str] = []
    for folder, manifest in checkpoint.candidates(run, skipped, before_step):
        if "optimizer" in manifest.contents or manifest.step >= steps:
            return ResumePoint(folder, manifest, (*skipped, f"continuing {run.path} from step {manifest.step}"))
        skipped.append(f"{folder}: holds the model alone; skipped")
    if run.checkpoint_steps() and skipped:
        raise UserError(NO_USABLE_CHECKPOINT.format(run=run.path, reason=skipped[0].removesuffix("; skipped")))
    begins = f"{run.path}: has no checkpoint yet; it begins at step 0"
    return ResumePoint(messages=(*skipped, begins) if run.exists() else ())


def verify_finished(run: Run, point: ResumePoint, steps: int) -> ResumePoint:
    """Check every byte of the checkpoint of a run that has no steps left. Returns an older point where it is corrupt."""
    assert point.checkpoint_folder is not None
    try:
        checkpoint.verify(point.checkpoint_folder)
        return point
    except CorruptCheckpoint as reason:
        older = find_resume_point(run, steps, before_step=point.step)
        return replace(older, messages=(f"{point.checkpoint_folder}: {reason}; skipped", *older.messages))


def load_resume_point(
    run: Run,
    steps: int,
    point: ResumePoint,
    parallel_model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    log: Callable[[str], None],
) -> ResumePoint:
    """Load model and optimizer from a checkpoint, or from the newest one before it that is not corrupt.

    Every rank calls it. Returns the point that was loaded. Raises UserError where no checkpoint can be used.
    """
    dist_ctx = parallel_model.dist_ctx
    while True:
        assert point.checkpoint_folder is not None
        assert point.manifest is not None
        state = parallel_model.state_dict(optimizer, named_optimizer_state)
        try:
            with dist_ctx.raise_on_all():
                checkpoint.load(point.checkpoint_folder, state)
                # Weights, order, dropout and samples are functions of seeds and indices; lmforge never uses torch's generator.
                # Its state is restored for other code in this process.
                checkpoint.set_rng_state(point.manifest.rng)
            break
        except CorruptCheckpoint as error:
            reason = f"{point.checkpoint_folder}: {error}"
            log(f"{reason}; skipped")
            point = dist_ctx.decide_on_rank0(partial(find_resume_point, run, steps, point.step))
            if point.manifest is None:
                raise UserError(NO_USABLE_CHECKPOINT.format(run=run.path, reason=reason)) from None
            for line in point.messages:
                log(line)
    parallel_model.load_state_dict(optimizer, state)
    return point


def check_resumable(point: ResumePoint, config: StageConfig, inputs: RunInputs) -> None:
    """Raise UserError where the checkpoint belongs to another run than `config` describes."""
    if (manifest := point.manifest) is None:
        return
    optimizer, batch_size = manifest.recipe.get("optimizer", {}).get("name"), inputs.batch_plan.global_batch_size
    differs = ""
    if stored_model_config(manifest) != inputs.model_config:
        differs = f"another model config ({_model_difference(stored_model_config(manifest), inputs.model_config)})"
    elif optimizer != config.optimizer.name:
        differs = f"saved with optimizer.name = {optimizer}, here it is {config.optimizer.name}"
    elif manifest.tokenizer_hash != inputs.tokenizer.hash:
        differs = f"trained with another tokenizer than {inputs.data_source} was prepared with"
    elif manifest.global_batch_size != batch_size:
        differs = f"its global batch has {manifest.global_batch_size} sequences, this recipe's {batch_size}"
    elif manifest.plan_hash != inputs.train_dataset.plan_hash_at(manifest.consumed_sequences):
        change = describe_plan_change(manifest.data_plan, inputs.train_dataset.plan_at(manifest.consumed_sequences))
        changes = [change for change in _changed_options(manifest, config) if change.startswith(DATA_OPTIONS)]
        if changes and (change is None or not any(each.startswith(MIXTURE_OPTIONS) for each in changes)):
            change = f"trained with other data options ({', '.join(changes)})"
        differs = change or "trained on other data"
    if differs:
        ways = "use the recipe it was begun with, another --run.name, or --run.overwrite"
        raise UserError(f"{point.checkpoint_folder}: {differs}; {ways}")


def _model_difference(theirs: ModelConfig, ours: ModelConfig) -> str:
    their_fields, our_fields = asdict(theirs), asdict(ours)
    # A wrapped model is described only by its config.json.
    for fields in (their_fields, our_fields):
        fields |= fields.pop("config_dict", {})
    names = [name for name in our_fields | their_fields if their_fields.get(name) != our_fields.get(name)]
    differing = [f"{name} {their_fields.get(name)} there, {our_fields.get(name)} here" for name in names[:3]]
    return "; ".join(differing) or f"computed by {theirs.implementation} there, by {ours.implementation} here"


def describe_config_changes(point: ResumePoint, config: StageConfig) -> list[str]:
    """A line that names the options that differ from the checkpoint's recipe."""
    if point.manifest is None:
        return []
    changed = list(_changed_options(point.manifest, config))
    plugins = describe_changes(point.manifest.written_by.get("plugins", {}), describe_plugins(config.plugins))
    lines = [f"changed since that checkpoint: {', '.join(changed)}"] if changed else []
    return lines + ([f"plugins differ from those of that checkpoint: {', '.join(plugins)}"] if plugins else [])


def _changed_options(manifest: Manifest, config: StageConfig) -> Iterator[str]:
    """Each option that differs from the checkpoint's recipe, as `section.name then → now`."""
    for section, options in config.model_dump(mode="json", exclude={"plugins", "run", "launch", "watch"}).items():
        then = manifest.recipe.get(section, {})
        yield from (f"{section}.{name} {then.get(name)} → {now}" for name, now in options.items() if then.get(name) != now)


def last_checkpoint_message(run: Run) -> str:
    """Where the newest checkpoint is, or why that is not known."""
    try:
        steps = run.checkpoint_steps()
    except UserError as problem:
        return str(problem)
    return f"last checkpoint: {run.checkpoint_path(steps[-1])}" if steps else "no checkpoint had been saved"
