"""How a run directory is entered: begun, continued from the newest checkpoint that can be used, or refused."""

from collections.abc import Callable
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
from lmforge.stages.inputs import RunInputs
from lmforge.train.optimizer import named_optimizer_state

NO_USABLE_CHECKPOINT = "{run}: none of its checkpoints can be used ({reason}); restore one, or begin again with --run.overwrite"


@dataclass(frozen=True)
class ResumePoint:
    """How a run is entered: the checkpoint it goes on from, if any, and what to tell of that."""

    checkpoint_folder: Path | None
    manifest: Manifest | None
    messages: list[str]


def lock_run(run: Run, config: StageConfig) -> bool:
    """Decide what becomes of a run directory: begun (False), continued (True) or refused (UserError). Changes nothing but the
    lock."""
    if run.path.exists() and not run.path.is_dir():
        raise UserError(f"{run.path}: a file, where the run's directory would be; choose another --run.name")
    if run.is_not_a_run():
        raise UserError(f"{run.path}: not empty and not a run of lmforge; choose another --run.name")
    # Of a run on another machine the checkpoints alone may be at hand.
    there = run.exists() or bool(run.external_checkpoints and run.checkpoint_steps())
    if not there and config.run.resume == "required":
        raise UserError(f"{run.path}: there is no such run to resume")
    if there and config.run.resume == "never" and not config.run.overwrite:
        raise UserError(
            f"{run.path}: this run exists; continue it (leave out --resume never), delete it with --run.overwrite,"
            " or give this one another --run.name"
        )
    run.lock()
    return there and not config.run.overwrite


def find_resume_point(run: Run, steps: int, before_step: int | None = None) -> ResumePoint:
    """The newest checkpoint (of a step below `before`) that looks whole and that a run of `steps` can go on from.

    Raises UserError where there are some and none of them can be used.
    """
    passed_over: list[str] = []
    for folder, manifest in checkpoint.candidates(run, passed_over, before_step):
        if "optimizer" in manifest.contents or manifest.step >= steps:
            return ResumePoint(folder, manifest, [*passed_over, f"continuing {run.path} from step {manifest.step}"])
        passed_over.append(f"{folder}: holds the model alone; skipped")
    if run.checkpoint_steps() and passed_over:
        reason = passed_over[0].removesuffix("; skipped")
        raise UserError(NO_USABLE_CHECKPOINT.format(run=run.path, reason=reason))
    return ResumePoint(
        None, None, [*passed_over, f"{run.path}: has no checkpoint yet; it begins at step 0"] if run.exists() else []
    )


def verify_finished(run: Run, resume_point: ResumePoint, steps: int) -> ResumePoint:
    """The entry of a run that has nothing left to train, read whole; or one to train on from, where it is spoiled."""
    assert resume_point.checkpoint_folder is not None
    assert resume_point.manifest is not None
    try:
        checkpoint.verify(resume_point.checkpoint_folder)
        return resume_point
    except CorruptCheckpoint as reason:
        older = find_resume_point(run, steps, before_step=resume_point.manifest.step)
        return ResumePoint(
            older.checkpoint_folder, older.manifest, [f"{resume_point.checkpoint_folder}: {reason}; skipped", *older.messages]
        )


def load_resume_point(
    run: Run,
    resume_point: ResumePoint,
    steps: int,
    parallel_model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    log: Callable[[str], None],
) -> ResumePoint:
    """Load the checkpoint of `entry`, or where it turns out to be spoiled the newest one before it that is not.

    Every rank calls it. Returns the entry that was loaded. Raises UserError where there is none.
    """
    ranks = parallel_model.dist_ctx
    while True:
        assert resume_point.checkpoint_folder is not None
        assert resume_point.manifest is not None
        state = parallel_model.state_dict(optimizer, named_optimizer_state)
        try:
            with ranks.raise_on_all():
                checkpoint.load(resume_point.checkpoint_folder, state)
            break
        except CorruptCheckpoint as reason:
            spoiled = f"{resume_point.checkpoint_folder}: {reason}"
            log(f"{spoiled}; skipped")
            resume_point = ranks.decide_on_rank0(partial(find_resume_point, run, steps, resume_point.manifest.step))
            if resume_point.manifest is None:
                raise UserError(NO_USABLE_CHECKPOINT.format(run=run.path, reason=spoiled)) from None
            for line in resume_point.messages:
                log(line)
    parallel_model.load_state_dict(optimizer, state)
    # Nothing here draws from torch's generators: weights, rows, dropout and samples are functions of seeds and numbers, and
    # no rank has a random state of its own. What is kept is for what else may run in the process.
    checkpoint.set_rng_state(resume_point.manifest.rng)
    return resume_point


def check_resumable(resume_point: ResumePoint, config: StageConfig, inputs: RunInputs) -> None:
    """Raise UserError where the checkpoint of `entry` is of another run than `config` describes."""
    manifest = resume_point.manifest
    if manifest is None:
        return
    ways = "use the recipe it was begun with, another --run.name, or --run.overwrite"
    if manifest.model_config != inputs.model_config:
        theirs, ours = asdict(manifest.model_config), asdict(inputs.model_config)
        for described in (theirs, ours):  # a wrapped model is all that its config.json says
            described |= described.pop("content", {})
        differing = [
            f"{name} {theirs.get(name)} there, {ours.get(name)} here"
            for name in ours | theirs
            if theirs.get(name) != ours.get(name)
        ] or [f"computed by {manifest.model_config.family} there, by {inputs.model_config.family} here"]
        raise UserError(f"{resume_point.checkpoint_folder}: a model of another shape ({'; '.join(differing[:3])}); {ways}")
    optimizer = manifest.recipe["optimizer"].get("name", "adamw")  # the only one there was, before it had a name
    if optimizer != config.optimizer.name:
        raise UserError(
            f"{resume_point.checkpoint_folder}: saved with optimizer.name = {optimizer}, here it is {config.optimizer.name}; {ways}"
        )
    if manifest.tokenizer_hash != inputs.tokenizer.hash:
        raise UserError(
            f"{resume_point.checkpoint_folder}: trained with another tokenizer than {inputs.data_source} was prepared with; {ways}"
        )
    if manifest.global_batch_size != inputs.batch_plan.rows:
        raise UserError(
            f"{resume_point.checkpoint_folder}: its global batch has {manifest.global_batch_size} rows, this recipe's {inputs.batch_plan.rows}; {ways}"
        )
    if manifest.plan_hash != inputs.train_dataset.plan_hash:
        raise UserError(
            f"{resume_point.checkpoint_folder}: trained on other data, or with another data.sequence_length or train.seed; {ways}"
        )


def describe_config_changes(resume_point: ResumePoint, config: StageConfig) -> list[str]:
    """A line that names the options that differ from the checkpoint's recipe."""
    if resume_point.manifest is None:
        return []
    then, now = resume_point.manifest.recipe, config.model_dump(mode="json")
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
