"""Where a run resumes from: the newest checkpoint that can be used, checked against the recipe, and loaded."""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from lmforge import checkpoint
from lmforge.checkpoint import CorruptCheckpoint, Manifest
from lmforge.config.stage import StageConfig
from lmforge.errors import UserError
from lmforge.parallel.parallel_model import ParallelModel
from lmforge.runs import Run
from lmforge.train.context import RunContext, RunInputs
from lmforge.train.optimizer import named_optimizer_state

NO_USABLE_CHECKPOINT = "{run}: none of its checkpoints can be used ({reason}); restore one, or begin again with --run.overwrite"


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run goes on from, None where it begins, and what to tell people about it."""

    checkpoint_folder: Path | None = None
    manifest: Manifest | None = None
    messages: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Steps done at this point."""
        return self.manifest.step if self.manifest else 0


def find_resume_point(run: Run, steps: int, before_step: int | None = None) -> ResumePoint:
    """The newest checkpoint (of a step below `before_step`) that a run of `steps` steps can go on from. Tensors are not read.

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
        messages = (f"{point.checkpoint_folder}: {reason}; skipped", *older.messages)
        return ResumePoint(older.checkpoint_folder, older.manifest, messages)


def load_resume_point(
    ctx: RunContext, point: ResumePoint, parallel_model: ParallelModel, optimizer: torch.optim.Optimizer
) -> ResumePoint:
    """Load model and optimizer from a checkpoint, or from the newest one before it that is not corrupt.

    Every rank calls it. Returns the point that was loaded. Raises UserError where no checkpoint can be used.
    """
    while True:
        assert point.checkpoint_folder is not None
        assert point.manifest is not None
        state = parallel_model.state_dict(optimizer, named_optimizer_state)
        try:
            with ctx.dist_ctx.raise_on_all():
                checkpoint.load(point.checkpoint_folder, state)
            break
        except CorruptCheckpoint as error:
            reason = f"{point.checkpoint_folder}: {error}"
            ctx.console.info(f"{reason}; skipped")
            point = ctx.dist_ctx.decide_on_rank0(partial(find_resume_point, ctx.run, ctx.config.train.steps, point.step))
            if point.manifest is None:
                raise UserError(NO_USABLE_CHECKPOINT.format(run=ctx.run.path, reason=reason)) from None
            for line in point.messages:
                ctx.console.info(line)
    parallel_model.load_state_dict(optimizer, state)
    # Weights, order, dropout and samples are functions of seeds and numbers; nothing here draws from torch's generator.
    # Its state is restored for other code in this process that may.
    checkpoint.set_rng_state(point.manifest.rng)
    return point


def check_resumable(point: ResumePoint, config: StageConfig, inputs: RunInputs) -> None:
    """Raise UserError where the checkpoint belongs to another run than `config` describes."""
    if (manifest := point.manifest) is None:
        return
    optimizer, batch_size = manifest.recipe["optimizer"]["name"], inputs.batch_plan.global_batch_size
    differs = ""
    if manifest.model_config != inputs.model_config:
        differs = f"another model config ({_model_difference(manifest, inputs)})"
    elif optimizer != config.optimizer.name:
        differs = f"saved with optimizer.name = {optimizer}, here it is {config.optimizer.name}"
    elif manifest.tokenizer_hash != inputs.tokenizer.hash:
        differs = f"trained with another tokenizer than {inputs.data_source} was prepared with"
    elif manifest.global_batch_size != batch_size:
        differs = f"its global batch has {manifest.global_batch_size} sequences, this recipe's {batch_size}"
    elif manifest.plan_hash != inputs.train_dataset.plan_hash:
        differs = "trained on other data, or with another data.sequence_length or train.seed"
    if differs:
        ways = "use the recipe it was begun with, another --run.name, or --run.overwrite"
        raise UserError(f"{point.checkpoint_folder}: {differs}; {ways}")


def _model_difference(manifest: Manifest, inputs: RunInputs) -> str:
    theirs, ours = asdict(manifest.model_config), asdict(inputs.model_config)
    for described in (theirs, ours):  # a wrapped model is described by its config.json alone
        described |= described.pop("config_dict", {})
    names = [name for name in ours | theirs if theirs.get(name) != ours.get(name)]
    differing = [f"{name} {theirs.get(name)} there, {ours.get(name)} here" for name in names[:3]]
    return "; ".join(differing) or f"computed by {manifest.model_config.family} there, by {inputs.model_config.family} here"


def describe_config_changes(point: ResumePoint, config: StageConfig) -> list[str]:
    """A line that names the options that differ from the checkpoint's recipe."""
    if point.manifest is None:
        return []
    then, now = point.manifest.recipe, config.model_dump(mode="json")
    changed = [
        f"{section}.{name} {then.get(section, {}).get(name)} → {value}"
        for section, options in now.items()
        for name, value in options.items()
        if section not in ("run", "launch", "watch") and then.get(section, {}).get(name) != value
    ]
    return [f"changed since that checkpoint: {', '.join(changed)}"] if changed else []


def last_checkpoint_message(run: Run) -> str:
    steps = run.checkpoint_steps()
    return f"last checkpoint: {run.checkpoint_path(steps[-1])}" if steps else "no checkpoint had been saved"
