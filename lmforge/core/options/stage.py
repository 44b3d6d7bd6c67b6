"""The config that all training stages share (its sections, and the combinations that are refused),
and the config of pretraining.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Literal, Self

from lmforge.core import registry
from lmforge.core.errors import UserError, nearest_multiples
from lmforge.core.files.untrusted import expand_home, name_problem
from lmforge.core.options.lora import LoraOptions
from lmforge.core.options.mixture import (
    FOLDER_MEANING,
    QUARANTINE,
    PhaseOptions,
    TokenSourceOptions,
    folder_problems,
    labels_of_mixture,
    mixture_problems,
)
from lmforge.core.options.operation import (
    CheckpointOptions,
    LaunchOptions,
    LogOptions,
    WatchOptions,
)
from lmforge.core.options.options import (
    PLUGINS,
    Alternatives,
    Options,
    option,
    section,
    validate_options,
)
from lmforge.core.options.ranges import COUNT, TOKENS
from lmforge.core.options.sections import (
    DEFAULT_GLOBAL_BATCH_SIZE,
    FaultOptions,
    ModelOptions,
    ObjectiveOptions,
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

# The options that `--help` lists for every stage, after the stage's own.
ESSENTIAL_TO_TRAINING = (
    "train.steps train.epochs train.global_batch_size train.global_batch_tokens"
    " train.micro_batch_size train.dtype train.compile optimizer.lr schedule.warmup_steps"
    " validation.every_steps sample.every_steps checkpoint.every_steps parallel.engine"
    " launch.processes run.name run.folder run.overwrite"
)


class StageConfig(Options):
    """The options of one run of any stage; `of_stage` is the verb that trains it, `of_verb` another
    verb that takes them.
    """

    of_stage: ClassVar[Stage] = "pretrain"
    of_verb: ClassVar[str | None] = None
    # Whether it begins from a model that was trained before.
    is_fine_tuning: ClassVar[bool] = False
    # Options that may be typed without their section.
    SHORT: ClassVar[Mapping[str, str]] = {
        "deterministic": "train.deterministic",
        "environment": "launch.environment",
        "resume": "run.resume",
        "stage_to": "data.stage_to",
    }
    # The class that a verb uses instead for a recipe of another stage.
    FOR_STAGE: ClassVar[Mapping[str, "type[StageConfig]"]] = {}
    ESSENTIAL: ClassVar[str] = f"model.preset model.source {ESSENTIAL_TO_TRAINING}"
    ALTERNATIVES: ClassVar[Alternatives] = (
        (("model", "preset"), ("model", "source")),
        (("train", "steps"), ("train", "epochs")),
        (("train", "global_batch_size"), ("train", "global_batch_tokens")),
        (("schedule", "warmup_steps"), ("schedule", "warmup_ratio")),
    )

    plugins: tuple[str, ...] = PLUGINS
    run: RunOptions = section(RunOptions, "where the run is kept")
    data: SequenceOptions = section(SequenceOptions, "training data")
    model: ModelOptions = section(
        ModelOptions, "the model config: a preset or a Hugging Face folder, and changes to it"
    )
    parallel: ParallelOptions = section(ParallelOptions, "how the model is distributed over ranks")
    train: TrainOptions = section(TrainOptions, "the training loop")
    objective: ObjectiveOptions = section(ObjectiveOptions, "what the model is trained for")
    optimizer: OptimizerOptions = section(OptimizerOptions, "the optimizer")
    schedule: ScheduleOptions = section(ScheduleOptions, "the learning rate over the run")
    validation: ValidationOptions = section(
        ValidationOptions, "loss on validation data while training, and scores of tasks"
    )
    sample: SampleOptions = section(SampleOptions, "text that the model generates while it trains")
    checkpoint: CheckpointOptions = section(
        CheckpointOptions, "which checkpoints are saved and kept"
    )
    faults: FaultOptions = section(FaultOptions, "bad steps: what counts as one, and rollback")
    log: LogOptions = section(LogOptions, "what is logged")
    watch: WatchOptions = section(WatchOptions, "the watchdog for ranks that make no progress")
    launch: LaunchOptions = section(LaunchOptions, "how processes are started")

    def problems(self) -> Iterator[str]:
        if self.run.stage not in (None, self.of_stage):
            yield (
                f"run.stage: this recipe is for `lmforge {self.run.stage}`, not for `lmforge"
                f" {self.of_stage}`"
            )
        tokens = self.train.global_batch_tokens
        length = self.data.sequence_length
        if tokens and tokens % length:
            near = nearest_multiples(tokens, length)
            yield (
                f"train.global_batch_tokens = {tokens} is not a multiple of data.sequence_length ="
                f" {length}; nearest: {near}"
            )
        size = self.train.global_batch_size or DEFAULT_GLOBAL_BATCH_SIZE
        most = TOKENS["le"]
        if not tokens and size * length > most:
            yield (
                f"train.global_batch_size = {size} x data.sequence_length = {length}: more than"
                f" {most:,} tokens per step"
            )
        warmup = self.schedule.warmup(self.train.steps)
        decay = (
            (self.schedule.decay_steps or 0) if self.schedule.name == "warmup-stable-decay" else 0
        )
        if self.train.epochs is None and warmup + decay > self.train.steps:
            given = f"schedule.warmup_steps = {warmup}" + (
                f" and schedule.decay_steps = {decay}" if decay else ""
            )
            yield f"{given}: more than train.steps = {self.train.steps}; lower them or train longer"
        if self.parallel.splits_model:
            reason = (
                "with tensor_parallel_degree or pipeline_parallel_degree no rank has the full"
                " model; leave it out, and"
            )
            if self.sample.every_steps:
                yield f"sample.every_steps: {reason} generate from the checkpoints"
            if self.validation.tasks:
                yield f"validation.tasks: {reason} evaluate the checkpoints"
        if self.model.parametrization != "standard" and self.optimizer.name not in (
            "adamw",
            "muon",
        ):
            name = self.optimizer.name
            yield (
                f"optimizer.name = {name}: model.parametrization is for adamw and muon; use one, or"
                " standard"
            )
        if self.parallel.tensor_parallel_degree > 1 and self.train.float8:
            yield (
                "train.float8: not with parallel.tensor_parallel_degree; shard with fsdp2 instead,"
                " or leave it out"
            )
        if self.parallel.cuts_rows and self.optimizer.state_dtype == "8bit":
            flat = self.parallel.engine == "fsdp1"
            cause, way = ("engine = fsdp1", "fsdp2") if flat else ("tensor_parallel_degree", "bf16")
            yield (
                f"optimizer.state_dtype = 8bit: not with parallel.{cause}, which cuts rows; use"
                f" {way}"
            )
        if self.optimizer.stochastic_rounding and self.train.master_dtype != "bf16":
            yield "optimizer.stochastic_rounding: only with train.master_dtype = bf16; leave it out"
        optimizer = registry.find("optimizer", self.optimizer.name)
        if (
            self.parallel.tensor_parallel_degree > 1
            and optimizer
            and optimizer.facts.get("needs_matrices")
        ):
            reason = (
                "not with parallel.tensor_parallel_degree, which splits its matrices; use adamw"
            )
            yield f"optimizer.name = {optimizer.name}: {reason}"

    def with_name(self, name: str) -> Self:
        """The options as a run records them: with their stage, absolute paths of plugins, and the
        run name `name` unless they have one. Raises UserError.
        """
        if not self.run.name and (problem := name_problem(name)):
            raise UserError(f"the recipe's file name names the run: {problem}; give a --run.name")
        plugins = tuple(str(expand_home(path).absolute()) for path in self.plugins)
        named = self._with_run(name=self.run.name or name, stage=self.of_stage)
        return named.model_copy(update={"plugins": plugins})

    def again(self) -> Self:
        """The same options for ranks that are restarted: overwriting was done once, and the run is
        resumed.
        """
        return self._with_run(
            overwrite=False, resume="auto" if self.run.resume == "never" else self.run.resume
        )

    def _with_run(self, **changes: object) -> Self:
        return self.model_copy(update={"run": self.run.model_copy(update=changes)})

    def with_steps(self, sequences_per_epoch: int, sequences_per_step: int) -> Self:
        """The same options with train.steps in place of train.epochs, if that was given.

        Raises UserError.
        """
        if self.train.epochs is None:
            return self
        steps = max(1, math.ceil(self.train.epochs * sequences_per_epoch / sequences_per_step))
        train = self.train.model_copy(update={"steps": steps, "epochs": None})
        return validate_options(
            type(self), self.model_copy(update={"train": train}).model_dump(mode="json")
        )

    @property
    def checkpoint_every_steps(self) -> int:
        return self.checkpoint.every_steps or max(1, self.train.steps // 10)

    # What the stages after pretraining answer otherwise.

    @property
    def adapter_options(self) -> LoraOptions | None:
        """The options of adapters; None for a stage that has none."""
        return None

    @property
    def neftune_noise_alpha(self) -> float:
        """NEFTune's noise on the embeddings; 0 for none."""
        return 0.0

    @property
    def trains_reward_model(self) -> bool:
        return False

    @property
    def copies_reference(self) -> bool:
        """Whether a frozen copy of the model scores each batch."""
        return False

    @property
    def group_size(self) -> int:
        """Sequences of a batch that belong together and stay on one rank, such as completions of
        one prompt.
        """
        return 1

    @property
    def default_objective(self) -> str:
        """The objective of a recipe that names none."""
        return "next-token"

    @property
    def source_names(self) -> list[str]:
        """The names of the sources of a mixture whose losses are told apart; empty where there is
        one source.
        """
        return []

    def with_models(self, source: Path | None, replace_model: Callable[[Path], Path]) -> Self:
        """The same options with another `model.source`, and each other model that they name
        replaced. Raises UserError.
        """
        return self.model_copy(update={"model": self.model.model_copy(update={"source": source})})


class PretrainDataOptions(SequenceOptions):
    """What the model is trained on: one token folder, or a mixture of several."""

    folder: str = option("data/stdlib", FOLDER_MEANING)
    quarantine: tuple[str, ...] = QUARANTINE
    packing: Literal["concat", "best-fit"] = option(
        "concat",
        "concat joins the documents and cuts them every data.sequence_length tokens; best-fit cuts"
        " only longer documents, and needs a folder that `lmforge prepare --best_fit_length` packed"
        " for that length",
    )
    sources: tuple[TokenSourceOptions, ...] = option(
        (), "several folders with weights, instead of data.folder"
    )
    phases: tuple[PhaseOptions, ...] = option(
        (), "parts of the run with other weights or another sequence length, in order"
    )
    shuffle_window: int | None = option(
        None,
        "shuffle within windows of N random chunks of 2M tokens, so that a step reads few places of"
        " a slow storage (default: a global shuffle)",
        **COUNT,
    )

    @property
    def all_sources(self) -> tuple[TokenSourceOptions, ...]:
        """The sources; the one of data.folder where no others are given."""
        return self.sources or (TokenSourceOptions(folder=self.folder, quarantine=self.quarantine),)

    @property
    def sequence_lengths(self) -> tuple[int, ...]:
        """The sequence lengths of the phases, or the one of the run."""
        return tuple(phase.sequence_length or self.sequence_length for phase in self.phases) or (
            self.sequence_length,
        )

    def problems(self) -> Iterator[str]:
        if self.sources and self.folder != type(self).model_fields["folder"].default:
            yield "data.folder and data.sources: give one of them"
        if self.sources and self.quarantine:
            yield "data.quarantine: with data.sources each source has its own quarantine"
        yield from folder_problems(self.folder, "data.folder")
        for number, length in enumerate(self.sequence_lengths, start=1):
            if self.packing == "best-fit" and length != self.sequence_length:
                yield (
                    f"data.phases: phase {number}: its sequence_length = {length} is not"
                    f" data.sequence_length = {self.sequence_length}, the only one under"
                    " data.packing = best-fit; leave it out, or use concat"
                )
        yield from mixture_problems(
            self.all_sources if self.sources or self.phases else (),
            self.phases,
            self.sequence_length,
        )


class PretrainConfig(StageConfig):
    """lmforge pretrain [RECIPE.toml]: train a model on token shards, or continue a run."""

    ESSENTIAL: ClassVar[str] = (
        f"data.folder data.sources data.sequence_length {StageConfig.ESSENTIAL}"
    )
    ALTERNATIVES: ClassVar[Alternatives] = (
        *StageConfig.ALTERNATIVES,
        (("data", "folder"), ("data", "sources")),
        (("data", "quarantine"), ("data", "sources")),
    )
    data: PretrainDataOptions = section(PretrainDataOptions, "training data")

    @property
    def source_names(self) -> list[str]:
        return labels_of_mixture(self.data.all_sources)
