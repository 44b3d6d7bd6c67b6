"""What the config of every training stage has: its sections, and the combinations that are refused; and that of pretraining."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Self

from lmforge.config.operation import LaunchOptions, LogOptions, WatchOptions
from lmforge.config.options import Options, option, section, validate_options
from lmforge.config.ranges import TOKENS
from lmforge.config.sections import (
    DEFAULT_GLOBAL_BATCH_SIZE,
    CheckpointOptions,
    FaultOptions,
    ModelOptions,
    OptimizerOptions,
    ParallelOptions,
    RunOptions,
    SampleOptions,
    ScheduleOptions,
    SequenceOptions,
    Stage,
    TrainOptions,
    ValidationOptions,
)
from lmforge.errors import UserError
from lmforge.untrusted import name_problem

# What `--help` lists of every stage after what is its own.
ESSENTIAL_TO_TRAINING = (
    "train.steps",
    "train.epochs",
    "train.global_batch_size",
    "train.global_batch_tokens",
    "train.micro_batch_size",
    "train.dtype",
    "train.compile",
    "optimizer.lr",
    "schedule.warmup_steps",
    "validation.every_steps",
    "sample.every_steps",
    "checkpoint.every_steps",
    "parallel.engine",
    "launch.processes",
    "run.name",
    "run.folder",
    "run.overwrite",
)


class StageConfig(Options):
    """The options of one run of any stage; `of_stage` is the verb that trains it."""

    of_stage: ClassVar[Stage] = "pretrain"
    ESSENTIAL: ClassVar[tuple[str, ...]] = ("model.preset", "model.source", *ESSENTIAL_TO_TRAINING)
    ALTERNATIVES = (
        (("model", "preset"), ("model", "source")),
        (("train", "steps"), ("train", "epochs")),
        (("train", "global_batch_size"), ("train", "global_batch_tokens")),
        (("schedule", "warmup_steps"), ("schedule", "warmup_ratio")),
    )

    run: RunOptions = section(RunOptions, "where the run is kept")
    data: SequenceOptions = section(SequenceOptions, "training data")
    model: ModelOptions = section(ModelOptions, "the model config: a preset or a Hugging Face folder, and changes to it")
    parallel: ParallelOptions = section(ParallelOptions, "how the model is distributed over ranks")
    train: TrainOptions = section(TrainOptions, "the training loop")
    optimizer: OptimizerOptions = section(OptimizerOptions, "the optimizer")
    schedule: ScheduleOptions = section(ScheduleOptions, "the learning rate over the run")
    validation: ValidationOptions = section(ValidationOptions, "loss on validation data while training, and scores of tasks")
    sample: SampleOptions = section(SampleOptions, "text that the model generates while it trains")
    checkpoint: CheckpointOptions = section(CheckpointOptions, "which checkpoints are saved and kept")
    faults: FaultOptions = section(FaultOptions, "bad steps: what counts as one, and rollback")
    log: LogOptions = section(LogOptions, "what is logged")
    watch: WatchOptions = section(WatchOptions, "the watchdog for ranks that make no progress")
    launch: LaunchOptions = section(LaunchOptions, "how processes are started")

    def problems(self) -> Iterator[str]:
        if self.run.stage not in (None, self.of_stage):
            yield f"run.stage: this recipe is for `lmforge {self.run.stage}`, not for `lmforge {self.of_stage}`"
        tokens, length = self.train.global_batch_tokens, self.data.sequence_length
        if tokens and tokens % length:
            below = tokens // length * length
            near = f"{below} or {below + length}" if below else str(length)
            yield f"train.global_batch_tokens = {tokens} is not a multiple of data.sequence_length = {length}; nearest: {near}"
        size, most = self.train.global_batch_size or DEFAULT_GLOBAL_BATCH_SIZE, TOKENS["le"]
        if not tokens and size * length > most:
            yield f"train.global_batch_size = {size} x data.sequence_length = {length}: more than {most:,} tokens a step"
        warmup = self.schedule.warmup(self.train.steps)
        decay = (self.schedule.decay_steps or 0) if self.schedule.name == "warmup-stable-decay" else 0
        if self.train.epochs is None and warmup + decay > self.train.steps:
            given = f"schedule.warmup_steps = {warmup}" + (f" and schedule.decay_steps = {decay}" if decay else "")
            yield f"{given}: more than train.steps = {self.train.steps}; lower them or train longer"
        if self.parallel.splits_model:
            reason = "with tensor_parallel_degree or pipeline_parallel_degree no rank has the whole model; leave it out, and"
            if self.sample.every_steps:
                yield f"sample.every_steps: {reason} generate from the checkpoints"
            if self.validation.tasks:
                yield f"validation.tasks: {reason} evaluate the checkpoints"
        if self.parallel.tensor_parallel_degree > 1 and self.train.float8:
            yield "train.float8: not with parallel.tensor_parallel_degree; shard with fsdp2 instead, or leave it out"
        if self.parallel.tensor_parallel_degree > 1 and self.optimizer.name == "muon":
            yield "optimizer.name = muon: not with parallel.tensor_parallel_degree, which splits its matrices; use adamw"

    def with_name(self, name: str) -> Self:
        """The same options with their stage recorded, for a run called `name` unless they name it. Raises UserError."""
        if not self.run.name and (problem := name_problem(name)):
            raise UserError(f"the recipe's file name names the run: {problem}; give a --run.name")
        return self._with_run(name=self.run.name or name, stage=self.of_stage)

    def again(self) -> Self:
        """The same options for ranks that are restarted: overwriting was done once, and the run is resumed."""
        return self._with_run(overwrite=False, resume="auto" if self.run.resume == "never" else self.run.resume)

    def _with_run(self, **changes: object) -> Self:
        return self.model_copy(update={"run": self.run.model_copy(update=changes)})

    def with_steps(self, sequences_per_epoch: int, sequences_per_step: int) -> Self:
        """The same options with train.steps in place of train.epochs, if that was given. Raises UserError."""
        if self.train.epochs is None:
            return self
        steps = max(1, math.ceil(self.train.epochs * sequences_per_epoch / sequences_per_step))
        train = self.train.model_copy(update={"steps": steps, "epochs": None})
        return validate_options(type(self), self.model_copy(update={"train": train}).model_dump(mode="json"))

    @property
    def checkpoint_every_steps(self) -> int:
        return self.checkpoint.every_steps or max(1, self.train.steps // 10)


class PretrainDataOptions(SequenceOptions):
    """What the model is trained on."""

    folder: Path = option(Path("data/stdlib"), "folder of token shards, as `lmforge prepare` writes them")


class PretrainConfig(StageConfig):
    """lmforge pretrain [RECIPE.toml]: train a model on token shards, or continue a run."""

    ESSENTIAL: ClassVar[tuple[str, ...]] = ("data.folder", "data.sequence_length", *StageConfig.ESSENTIAL)
    data: PretrainDataOptions = section(PretrainDataOptions, "training data")
