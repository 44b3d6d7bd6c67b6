"""The options of a run, each with its default and its meaning: to read this file is to read the manual. Those of the stages
after pretraining are in config/post_training.py, those of the other verbs in config/verbs.py.

Options are read once, at the edge, by `config/options.py`; below the stages, functions take plain values. Nothing here imports
torch, so that `--help` and `--dry-run` answer at once. `batch_plan` is the one place where batch sizes are derived.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import field_validator, model_validator

from lmforge.config.options import Options, option, section, validate_options
from lmforge.errors import UserError

Resume = Literal["auto", "never", "required"]
Stage = Literal["pretrain", "sft", "align"]
Device = Literal["auto", "cpu", "cuda"]
Sharding = Literal["full-shard", "grad-shard", "no-shard", "hybrid-full-shard", "hybrid-grad-shard"]
# torch's name of each, which `parallel.sharding` takes too. Gradients and optimizer states are always sharded: full-shard
# is ZeRO stage 3, grad-shard stage 2.
TORCH_SHARDING_NAMES = {
    "full-shard": "FULL_SHARD",
    "grad-shard": "SHARD_GRAD_OP",
    "no-shard": "NO_SHARD",
    "hybrid-full-shard": "HYBRID_SHARD",
    "hybrid-grad-shard": "_HYBRID_SHARD_ZERO2",
}
DEFAULT_INTERLEAVED_STAGES = 2
DType = Literal["auto", "fp32", "bf16"]
ConversationFormat = Literal["auto", "messages", "sharegpt", "alpaca", "prompt-completion", "text"]
ExampleFormat = Literal[ConversationFormat, "prompts"]

# One forward pass of this many tokens keeps matrix multiplications busy on every device we know; more costs memory.
COMFORTABLE_MICRO_BATCH_TOKENS = 16_384
DEFAULT_GLOBAL_BATCH_ROWS = 32
# Seeds of rows, samples and steps are added to it, and torch takes 64 bits.
LARGEST_SEED = 2**62


def _of_shape(meaning: str, **bounds: Any) -> Any:
    return option(None, f"{meaning} (default: unchanged)", **bounds)


class RunOptions(Options):
    """Where a run lives, and what to do when it is there already."""

    name: str = option("", "name of the run; its directory is FOLDER/NAME (default: the recipe's file name)")
    folder: Path = option(Path("runs"), "folder that holds the runs")
    resume: Resume = option("auto", "continue a run that exists: auto (if it exists), required, or never")
    overwrite: bool = option(False, "delete a run of this name first")
    stage: Stage | None = option(None, "the verb that trains it; recorded in its recipe, which other verbs refuse")


class RowOptions(Options):
    """What every stage's data has in common."""

    sequence_length: int = option(1024, "tokens in a row", gt=0)


class DataOptions(RowOptions):
    """What the model reads."""

    folder: Path = option(Path("data/stdlib"), "folder of token shards, written by `lmforge prepare`")


class ModelOptions(Options):
    """The shape: a preset or a Hugging Face folder, and what to change of it. Names are those of config.json."""

    preset: str | None = option(None, "a named shape; `lmforge show presets` lists them (default: nano)")
    source: Path | None = option(
        None,
        "a model to begin from: a run, a checkpoint, a Hugging Face folder, or a name on the hub (owner/model[@revision])",
    )
    implementation: Literal["lmforge", "transformers"] = option(
        "lmforge", "with --model.source: whose code computes it; transformers (an extra) knows any family, lmforge's is quicker"
    )
    load_weights: bool = option(True, "with --model.source: begin with the folder's weights; false takes its shape only")
    model_type: Literal["llama", "mistral", "qwen2", "qwen3", "gpt2"] | None = _of_shape("family; it decides which options are")
    hidden_size: int | None = _of_shape("width of the residual stream", gt=0)
    intermediate_size: int | None = _of_shape("width of the feed-forward layer", gt=0)
    num_hidden_layers: int | None = _of_shape("number of blocks", gt=0)
    num_attention_heads: int | None = _of_shape("query heads", gt=0)
    num_key_value_heads: int | None = _of_shape("key and value heads (grouped-query attention)", gt=0)
    head_dim: int | None = _of_shape("width of one head", gt=0)
    max_position_embeddings: int | None = _of_shape("longest row the model is made for", gt=0)
    rope_theta: float | None = _of_shape("base of the rotary frequencies", gt=0)
    rms_norm_eps: float | None = _of_shape("epsilon of the norms", gt=0)
    tie_word_embeddings: bool | None = _of_shape("use the input embedding as output head")
    attention_bias: bool | None = _of_shape("biases on the attention's projections")
    mlp_bias: bool | None = _of_shape("biases in the feed-forward layer")
    sliding_window: int | None = _of_shape("attend to this many last tokens only", gt=0)
    initializer_range: float | None = _of_shape("standard deviation of random weights", gt=0)
    embedding_initializer_range: float | None = option(None, "the same for an untied input embedding", gt=0)
    dropout: float = option(
        0.0, "in training, the share zeroed of the embeddings and of what attention and feed-forward add to them", ge=0, lt=1
    )

    @model_validator(mode="after")
    def _one_origin(self) -> "ModelOptions":
        if self.preset and self.source:
            raise ValueError("model.preset and model.source: give one of them, not both")
        if self.implementation != "lmforge" and not self.source:
            raise ValueError("model.implementation = transformers: wraps a Hugging Face folder; name it with model.source")
        if self.implementation != "lmforge" and self.model_type:
            raise ValueError("model.model_type: with model.implementation = transformers the folder says it; leave it out")
        if self.implementation != "lmforge" and self.dropout:
            raise ValueError("model.dropout: not with model.implementation = transformers, which has none here; leave it out")
        return self

    def overrides(self) -> dict[str, object]:
        """The shape options that were given, by their Hugging Face names."""
        about = {
            "preset",
            "source",
            "implementation",
            "load_weights",
            "embedding_initializer_range",
            "dropout",
            "neftune_noise_alpha",
        }
        chosen = self.model_dump(exclude=about)
        return {name: value for name, value in chosen.items() if value is not None}


class ParallelOptions(Options):
    """How the model is distributed over ranks."""

    engine: Literal["auto", "single", "ddp", "fsdp1", "fsdp2"] = option("auto", "auto is fsdp2 on several ranks, single on one")
    sharding: Sharding | None = option(
        None,
        "fsdp1 and fsdp2: full-shard (ZeRO-3, the default) frees gathered weights between forward and backward, grad-shard"
        " (ZeRO-2) keeps them; hybrid-… shards within groups of ranks and replicates over groups; no-shard (fsdp2)"
        " replicates; torch's names (FULL_SHARD, …) are taken too",
    )
    shard_degree: int | None = option(None, "ranks in a group of hybrid sharding (default: those of one host)", gt=0)
    activation_checkpointing: Literal["none", "full", "selective-blocks", "selective-ops"] = option(
        "none",
        "recompute in the backward pass: every block (full), every k-th block (selective-blocks), or all but expensive"
        " operators (selective-ops)",
    )
    activation_checkpointing_every: int = option(2, "the k of activation_checkpointing = selective-blocks", gt=0)
    cpu_offload: bool = option(False, "keep parameters, gradients and optimizer states in host memory (fsdp1, fsdp2)")
    wrap_embedding: bool = option(True, "shard an untied input embedding as a unit of its own (fsdp1, fsdp2)")
    prefetch_blocks: int = option(0, "fsdp2: blocks gathered ahead, forward and backward; 0 leaves it to torch", ge=0)
    reduce_every_micro_batch: bool = option(
        True, "reduce-scatter gradients with each micro-batch, which keeps them sharded, or with the last only (faster)"
    )
    limit_all_gathers: bool = option(True, "fsdp1: wait before gathering more units than memory was counted on")
    tensor_parallel_degree: int = option(
        1, "fsdp2: ranks that split every matrix of a block, and the sequence between them", gt=0
    )
    context_parallel_degree: int = option(1, "fsdp2: ranks that split the tokens of each sequence", gt=0)
    pipeline_parallel_degree: int = option(1, "fsdp2: ranks that split the blocks; micro-batches flow through them", gt=0)
    pipeline_schedule: Literal["1f1b", "interleaved"] = option("1f1b", "order of a pipeline's forward and backward passes")
    pipeline_stages_per_rank: int | None = option(
        None, f"stages on each rank with pipeline_schedule = interleaved (default: {DEFAULT_INTERLEAVED_STAGES})", gt=1
    )
    forward_prefetch: bool = option(False, "fsdp1: gather the next unit before the forward pass asks for it")

    @field_validator("sharding", mode="before")
    @classmethod
    def _own_sharding_name(cls, value: Any) -> Any:
        own = {theirs: ours for ours, theirs in TORCH_SHARDING_NAMES.items()}
        return own.get(value, value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _stages_of_interleaved(self) -> "ParallelOptions":
        if self.pipeline_stages_per_rank and self.pipeline_schedule != "interleaved":
            raise ValueError(
                "parallel.pipeline_stages_per_rank: only with parallel.pipeline_schedule = interleaved; leave it out"
            )
        return self

    @property
    def splits_model(self) -> bool:
        """Whether no rank can hold the whole model, not even for a moment."""
        return self.tensor_parallel_degree * self.pipeline_parallel_degree > 1

    @property
    def model_parallel_size(self) -> int:
        """Number of ranks that work on the same sequences."""
        return self.tensor_parallel_degree * self.context_parallel_degree * self.pipeline_parallel_degree

    @property
    def stages_per_rank(self) -> int:
        """Number of pipeline stages on each rank."""
        if self.pipeline_schedule == "1f1b":
            return 1
        return self.pipeline_stages_per_rank or DEFAULT_INTERLEAVED_STAGES


class TrainOptions(Options):
    """The loop. The global batch is a contract: micro-batches and accumulation are derived from it."""

    steps: int = option(1000, "optimizer steps in the whole run", gt=0)
    epochs: float | None = option(None, "passes over the data, instead of train.steps, which follows from it", gt=0)
    global_batch_size: int | None = option(
        None, f"rows in one optimizer step, over all ranks (default: {DEFAULT_GLOBAL_BATCH_ROWS})", gt=0
    )
    global_batch_tokens: int | None = option(None, "the same in tokens; a multiple of data.sequence_length", gt=0)
    micro_batch_size: int | None = option(
        None, f"rows in one forward pass of a rank (default: what fits {COMFORTABLE_MICRO_BATCH_TOKENS:,} tokens)", gt=0
    )
    seed: int = option(0, "seed of the initial weights, the order of the data and dropout", ge=0, le=LARGEST_SEED)
    dtype: DType = option("auto", "compute dtype; auto is bf16 where the hardware multiplies it")
    master_dtype: Literal["fp32", "bf16"] = option(
        "fp32", "dtype of parameters and optimizer states at rest; bf16 halves them, and small updates are lost"
    )
    float8: bool = option(
        False,
        "multiply in float8 in the blocks' linear layers (GPUs from compute capability 8.9; extra: fp8); the rest in bf16",
    )
    device: Device = option("auto", "auto is cuda where there is one")
    compile: Literal["auto", "on", "off"] = option("auto", "compile each block; auto is on where a compiler is found")
    deterministic: bool = option(
        False,
        "the same bits from run to run on the same ranks, on a GPU too; slower, and what has no such form is refused",
    )
    threads: int | None = option(None, "CPU threads of a rank (default: the cores there are, divided by the local ranks)", gt=0)

    @model_validator(mode="before")
    @classmethod
    def _one_length(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("steps") is not None and given.get("epochs") is not None:
            raise ValueError("train.steps and train.epochs: give one of them, not both")
        return given

    @model_validator(mode="after")
    def _one_batch_size(self) -> "TrainOptions":
        if self.global_batch_size and self.global_batch_tokens:
            raise ValueError("train.global_batch_size and train.global_batch_tokens: give one of them, not both")
        return self


class GroupOptions(Options):
    """Parameters that are told apart by their names, and what holds for them."""

    pattern: str = option(..., "a regular expression to find in tensor names, such as norm|bias or layers\\.0\\.")
    lr_ratio: float | None = option(None, "learning rate relative to optimizer.lr (default: as without the group)", ge=0)
    weight_decay: float | None = option(None, "decay (default: as without the group)", ge=0)

    @model_validator(mode="after")
    def _is_expression(self) -> "GroupOptions":
        try:
            re.compile(self.pattern)
        except re.error as problem:
            raise ValueError(f"optimizer.groups.pattern: not a regular expression: {self.pattern} ({problem})") from None
        return self


class OptimizerOptions(Options):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101), Muon (Jordan; Liu et al., arXiv 2502.16982), or SGD."""

    name: Literal["adamw", "muon", "sgd"] = option(
        "adamw", "muon is for the matrices of the blocks, and leaves embeddings, head, norms and biases to adamw"
    )
    lr: float = option(3e-4, "peak learning rate", gt=0)
    beta1: float = option(0.9, "adamw: decay of the first moment", ge=0, lt=1)
    beta2: float = option(0.95, "adamw: decay of the second moment", ge=0, lt=1)
    eps: float = option(1e-8, "adamw: added to the root of the second moment", gt=0)
    momentum: float | None = option(
        None, "muon and sgd: decay of the momentum (default: 0.95 for muon, 0.9 for sgd)", ge=0, lt=1
    )
    embedding_lr_ratio: float = option(1.0, "learning rate of input embedding and head, relative to that of the rest", gt=0)
    weight_decay: float = option(
        0.1, "decay of matrices, not of vectors (norms, biases); decoupled, but sgd adds it to the gradient", ge=0
    )
    max_grad_norm: float = option(1.0, "longest gradient norm; 0 leaves gradients as they are", ge=0)
    groups: tuple[GroupOptions, ...] = option(
        (), "other numbers for some parameters, [[optimizer.groups]] in a recipe; the first whose pattern matches counts"
    )
    state_dtype: Literal["fp32", "bf16"] = option("fp32", "adamw and muon: dtype in which moments and momentum are kept")
    implementation: Literal["fused", "foreach"] = option(
        "fused", "adamw with fp32 state: which of torch's, one kernel or several"
    )

    @model_validator(mode="after")
    def _state_of_sgd(self) -> "OptimizerOptions":
        if self.name == "sgd" and self.state_dtype != "fp32":
            raise ValueError("optimizer.state_dtype = bf16: not with optimizer.name = sgd; use adamw or muon, or leave it out")
        return self


class ScheduleOptions(Options):
    """The learning rate over the run."""

    name: Literal["cosine", "linear", "warmup-stable-decay", "constant"] = option("cosine", "its shape after warm-up")
    warmup_steps: int = option(100, "steps of linear warm-up", ge=0)
    warmup_ratio: float | None = option(None, "the same as a share of the run, instead of schedule.warmup_steps", ge=0, le=1)
    decay_steps: int | None = option(None, "last steps, in which warmup-stable-decay falls (default: a fifth of the run)", gt=0)
    min_lr_ratio: float = option(0.1, "last learning rate, as a share of the peak", ge=0, le=1)

    def warmup(self, steps: int) -> int:
        """Steps of warm-up in a run of `steps`."""
        return self.warmup_steps if self.warmup_ratio is None else math.ceil(self.warmup_ratio * steps)


class ValidationOptions(Options):
    """Loss on held-out documents while training, and scores of tasks."""

    every_steps: int | None = option(None, "steps between validations; none for never (the last step always validates)", gt=0)
    sequences: int = option(64, "held-out rows of one validation, evenly spaced and always the same", gt=0)
    at_start: bool = option(False, "validate before the first step too: what there is to gain")
    tasks: tuple[Path, ...] = option(
        (), "files of questions, one JSON object a line, asked at each validation too, as by `lmforge evaluate --tasks`"
    )
    task_limit: int | None = option(None, "the first so many questions of each task (default: all)", gt=0)
    num_fewshot: int = option(0, "examples before each question: the first others of its file", ge=0)

    @model_validator(mode="after")
    def _of_tasks(self) -> "ValidationOptions":
        for name in ("task_limit", "num_fewshot"):
            if not self.tasks and getattr(self, name):
                raise ValueError(f"validation.{name}: only with validation.tasks; leave it out")
        return self


class SampleOptions(Options):
    """Text written by the model while it trains."""

    every_steps: int | None = option(None, "steps between samples; none for never", gt=0)
    prompts: tuple[str, ...] = option(("import ",), "what the samples begin with")
    max_tokens: int = option(48, "tokens of one sample", gt=0)
    temperature: float = option(0.8, "0 is greedy", ge=0)


class CheckpointOptions(Options):
    """What is kept of a run. Passing checkpoints make room for newer ones; permanent ones stay."""

    every_steps: int | None = option(
        None, "steps between checkpoints; the last step always saves (default: a tenth of the run)", gt=0
    )
    every_minutes: float | None = option(None, "minutes between checkpoints, beside those by steps", gt=0)
    keep_last: int = option(3, "newest passing checkpoints to keep", gt=0)
    keep_every_steps: int | None = option(None, "steps between checkpoints that are never deleted", gt=0)
    keep_every_minutes: float | None = option(None, "minutes between checkpoints that are never deleted", gt=0)
    keep_best: int = option(0, "best checkpoints to keep beside the newest", ge=0)
    best_metric: str = option("val/loss", "what is best, by its name in metrics.jsonl; for val/… each checkpoint validates")
    best_mode: Literal["min", "max"] = option("min", "which end of it")
    last_save_model_only: bool = option(
        False, "save the last step without the optimizer: a third of the size, and no run can continue from it"
    )
    folder: str | None = option(
        None, "keep them in FOLDER/NAME: a folder, or an address such as s3://bucket/runs (extra: cloud) (default: in the run)"
    )
    async_save: bool = option(True, "write beside the training; takes as much host memory as what a rank writes")
    max_failures: int = option(3, "saves in a row that may fail before the run ends; 0 for any number", ge=0)
    retry_seconds: float = option(60.0, "until a save that failed is tried again", gt=0)


class FaultOptions(Options):
    """Steps that go wrong. A bad one, its loss or gradient not finite, changes nothing and is counted."""

    max_bad_steps: int = option(
        5, "bad steps in a row after which the run goes back to a checkpoint, and on with later batches", gt=0
    )
    max_rollbacks: int = option(3, "times that it may go back before it ends", ge=0)
    spike_sigmas: float | None = option(
        None, "a loss is bad too that lies so many standard deviations above the mean of those before it (try 6)", gt=0
    )
    spike_window_steps: int = option(128, "how many of those before it", gt=1)


class LogOptions(Options):
    """What is told of a run."""

    every_steps: int = option(10, "steps between lines of metrics", gt=0)
    tensorboard: bool = option(False, "write TensorBoard events too (extra: tensorboard)")


class WatchOptions(Options):
    """What is told when ranks do not go on, and when a rank that cannot go on ends itself."""

    stall_seconds: float = option(
        30.0, "without progress for so long (or 3 times what the phase is known to take): tell which rank is where", ge=0.5
    )
    timeout_seconds: float | None = option(
        1800.0, "with no rank going on for so long, end with status 75, so that a launcher can restart; none for never", gt=0
    )

    @model_validator(mode="after")
    def _told_before_the_end(self) -> "WatchOptions":
        if self.timeout_seconds is not None and self.timeout_seconds < 2 * self.stall_seconds:
            raise ValueError(
                f"watch.timeout_seconds = {self.timeout_seconds:g}: at least twice watch.stall_seconds"
                f" = {self.stall_seconds:g}, so that stacks are told before the end; raise it or lower the other"
            )
        return self


class LaunchOptions(Options):
    """How processes are started."""

    processes: int = option(1, "ranks to start on this machine; under torchrun leave it alone", gt=0)
    max_restarts: int = option(
        3, "times that ranks are started again, from the last checkpoint, after one of them was lost", ge=0
    )


class StageConfig(Options):
    """One run of any stage; `of_stage` says which verb trains it."""

    of_stage: ClassVar[Stage] = "pretrain"
    ALTERNATIVES = (
        (("model", "preset"), ("model", "source")),
        (("train", "steps"), ("train", "epochs")),
        (("train", "global_batch_size"), ("train", "global_batch_tokens")),
        (("schedule", "warmup_steps"), ("schedule", "warmup_ratio")),
    )

    run: RunOptions = section(RunOptions, "where the run lives")
    data: RowOptions = section(RowOptions, "what the model reads")
    model: ModelOptions = section(ModelOptions, "the shape: a preset or a Hugging Face folder, and what to change of it")
    parallel: ParallelOptions = section(ParallelOptions, "how the model is spread over ranks")
    train: TrainOptions = section(TrainOptions, "the loop")
    optimizer: OptimizerOptions = section(OptimizerOptions, "how gradients become steps")
    schedule: ScheduleOptions = section(ScheduleOptions, "the learning rate over the run")
    validation: ValidationOptions = section(ValidationOptions, "loss on held-out documents while training, and scores of tasks")
    sample: SampleOptions = section(SampleOptions, "text written by the model while it trains")
    checkpoint: CheckpointOptions = section(CheckpointOptions, "what is kept")
    faults: FaultOptions = section(FaultOptions, "steps that go wrong")
    log: LogOptions = section(LogOptions, "what is told")
    watch: WatchOptions = section(WatchOptions, "what is told of ranks that do not go on")
    launch: LaunchOptions = section(LaunchOptions, "how processes are started")

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        if self.run.stage not in (None, self.of_stage):
            raise ValueError(f"run.stage: this recipe is for `lmforge {self.run.stage}`, not for `lmforge {self.of_stage}`")
        tokens = self.train.global_batch_tokens
        if tokens and tokens % self.data.sequence_length:
            below = tokens // self.data.sequence_length * self.data.sequence_length
            near = f"{below} or {below + self.data.sequence_length}" if below else str(self.data.sequence_length)
            raise ValueError(
                f"train.global_batch_tokens = {tokens} is not a multiple of data.sequence_length = {self.data.sequence_length}; nearest: {near}"
            )
        warmup, decay = self.schedule.warmup(self.train.steps), self.schedule.decay_steps or 0
        if self.schedule.name != "warmup-stable-decay":
            decay = 0
        if self.train.epochs is None and warmup + decay > self.train.steps:
            asked = f"schedule.warmup_steps = {warmup}" + (f" and schedule.decay_steps = {decay}" if decay else "")
            raise ValueError(f"{asked}: more than train.steps = {self.train.steps}; lower them or train longer")
        if self.parallel.splits_model and self.sample.every_steps:
            raise ValueError(
                "sample.every_steps: with tensor_parallel_degree or pipeline_parallel_degree no rank has the whole model; leave it out, and"
                " generate from the checkpoints"
            )
        if self.parallel.splits_model and self.validation.tasks:
            raise ValueError(
                "validation.tasks: with tensor_parallel_degree or pipeline_parallel_degree no rank has the whole model; leave it out, and"
                " evaluate the checkpoints"
            )
        if self.parallel.tensor_parallel_degree > 1 and self.train.float8:
            raise ValueError(
                "train.float8: not with parallel.tensor_parallel_degree; shard with fsdp2 instead, or leave it out"
            )
        if self.parallel.tensor_parallel_degree > 1 and self.optimizer.name == "muon":
            raise ValueError(
                "optimizer.name = muon: not with parallel.tensor_parallel_degree, which split its matrices; use adamw"
            )
        return self

    def with_name(self, name: str) -> Self:
        """The same options for a run called `name`, unless they name it themselves, with their stage recorded."""
        recorded = {"name": self.run.name or name, "stage": self.of_stage}
        return self.model_copy(update={"run": self.run.model_copy(update=recorded)})

    def again(self) -> Self:
        """The same options for ranks that are started again: what was to be deleted has been, and is continued."""
        resume = "auto" if self.run.resume == "never" else self.run.resume
        return self.model_copy(update={"run": self.run.model_copy(update={"overwrite": False, "resume": resume})})

    def of_rows(self, rows_per_epoch: int, rows_per_step: int) -> Self:
        """The same options with train.steps in place of train.epochs, if that was given. Raises UserError as reading does."""
        if self.train.epochs is None:
            return self
        steps = max(1, math.ceil(self.train.epochs * rows_per_epoch / rows_per_step))
        resolved = self.train.model_copy(update={"steps": steps, "epochs": None})  # one of the two stands in a recipe
        return validate_options(type(self), self.model_copy(update={"train": resolved}).model_dump(mode="json"))

    @property
    def checkpoint_every_steps(self) -> int:
        return self.checkpoint.every_steps or max(1, self.train.steps // 10)


class Config(StageConfig):
    """A run of pretraining. `lmforge pretrain RECIPE.toml --section.option value` overrides any of it."""

    data: DataOptions = section(DataOptions, "what the model reads")


class BenchOptions(Options):
    """What is timed, and how long."""

    steps: int = option(10, "steps that are timed", gt=0)
    warmup_steps: int = option(3, "steps before them, compilation included", gt=0)
    sweep: tuple[str, ...] = option((), "section.option=value,value… : every combination, in one table")
    trace: Path | None = option(None, "file for a profiler trace of one step, which Perfetto opens (.json or .json.gz)")
    output: Literal["text", "json"] = option("text", "how to print the result")


class BenchConfig(Config):
    """A recipe to be timed: `lmforge bench RECIPE.toml [--section.option value] [--sweep …]`."""

    bench: BenchOptions = section(BenchOptions, "what is timed")


@dataclass(frozen=True)
class BatchPlan:
    """How one global batch is cut: `rows = ranks × accumulation × micro_batch_size`."""

    rows: int
    length: int
    ranks: int
    micro_batch_size: int
    accumulation: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    def __str__(self) -> str:
        ranks = f"{self.ranks} data-parallel {'rank' if self.ranks == 1 else 'ranks'}"
        return (
            f"{self.rows} rows × {self.length} tokens = {self.tokens:,} tokens a step"
            f" = {ranks} × {self.accumulation} micro-batches × {self.micro_batch_size} rows"
        )


def batch_plan(train: TrainOptions, length: int, ranks: int) -> BatchPlan:
    """Cut the global batch for `ranks` data-parallel ranks. Raises UserError naming the nearest sizes when it does not divide."""
    rows = train.global_batch_size or (train.global_batch_tokens or DEFAULT_GLOBAL_BATCH_ROWS * length) // length
    if rows < ranks:
        raise UserError(f"{ranks} ranks for a global batch of {rows} rows: a rank would have none; use at most {rows} ranks")
    micro = train.micro_batch_size
    unit = ranks * (micro or 1)
    if rows % unit:
        below = rows // unit * unit
        near = f"{below} or {below + unit}" if below else str(unit)
        cut = f"{ranks} ranks" + (f" × {micro} micro-batch rows" if micro else "")
        raise UserError(f"a global batch of {rows} rows does not divide by {cut}; nearest global_batch_size: {near}")
    rows_per_rank = rows // ranks
    if micro is None:
        fits = max(1, COMFORTABLE_MICRO_BATCH_TOKENS // length)
        micro = max(size for size in range(1, min(fits, rows_per_rank) + 1) if rows_per_rank % size == 0)
    return BatchPlan(rows, length, ranks, micro, rows_per_rank // micro)


def renamed_fields(pairs: Sequence[str], option: str) -> dict[str, str]:
    """What files call a field of ours, by its name, from OURS=THEIRS. Raises UserError, naming `option`, where one is no pair."""
    for each in pairs:
        if not all(each.partition("=")[::2]):
            raise UserError(f"{option}: expected OURS=THEIRS, such as messages=chat, got {each}")
    return dict(each.split("=", 1) for each in pairs)
