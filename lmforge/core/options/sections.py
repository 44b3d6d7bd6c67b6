"""The sections of a recipe that all training stages share, each option with its default and its
meaning.

`stage.py` puts them together; `tuning.py` gives sft and align other defaults of some; it and
`align.py` add what only one stage has.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import field_validator

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import compile_pattern, name_problem
from lmforge.core.options.activation_checkpointing import CHECKPOINTING_MODES
from lmforge.core.options.options import Options, choice, option
from lmforge.core.options.ranges import (
    COUNT,
    COUNT_OR_0,
    DURATION,
    FRACTION,
    LENGTH,
    MODEL_RANGES,
    PROBABILITY,
    RANKS,
    SCALE,
    SCALE_OR_0,
    SEED,
    SEQUENCES,
    THREADS,
    TOKENS,
)

Resume = Literal["auto", "never", "required"]
Stage = Literal["pretrain", "sft", "distill", "align"]
Device = Literal["auto", "cpu", "cuda"]
Sharding = Literal["full-shard", "grad-shard", "no-shard", "hybrid-full-shard", "hybrid-grad-shard"]
DType = Literal["auto", "fp32", "bf16"]
ConversationFormat = Literal["auto", "messages", "sharegpt", "alpaca", "prompt-completion", "text"]
ExampleFormat = Literal[ConversationFormat, "prompts"]

# A forward pass with this many tokens is large enough for efficient matrix multiplications on every
# known device; more tokens cost memory.
COMFORTABLE_MICRO_BATCH_TOKENS = 16_384
DEFAULT_GLOBAL_BATCH_SIZE = 32
# torch's name of each sharding (ShardingStrategy), which `parallel.sharding` takes too.
TORCH_SHARDING_NAMES = {
    "full-shard": "FULL_SHARD",
    "grad-shard": "SHARD_GRAD_OP",
    "no-shard": "NO_SHARD",
    "hybrid-full-shard": "HYBRID_SHARD",
    "hybrid-grad-shard": "_HYBRID_SHARD_ZERO2",
}
INTERLEAVED_STAGES = 2
# Earlier steps from whose mean and deviation a spike of the loss is told.
SPIKE_WINDOW_STEPS = 128
# The most numbers that an optimizer whose states are not in fp32 updates at once: copies of them
# are.
UPDATE_CHUNK_NUMEL = 2**25
RUNS_FOLDER = option(Path("runs"), "folder that holds the runs")
DEVICE = option("auto", "auto: cuda if available, otherwise cpu")


def _model_option(meaning: str, field: str = "") -> Any:
    return option(None, f"{meaning} (default: unchanged)", **MODEL_RANGES.get(field, {}))


class RunOptions(Options):
    """Where the run is kept, and what happens when it exists already."""

    name: str = option(
        "", "name of the run; its directory is FOLDER/NAME (default: the recipe's file name)"
    )
    folder: Path = RUNS_FOLDER
    resume: Resume = option(
        "auto", "continue a run that exists: auto (if it exists), required, or never"
    )
    overwrite: bool = option(False, "delete a run of this name first")
    stage: Stage | None = option(
        None, "the verb that trains this recipe; recorded with the run, and refused by other verbs"
    )

    def problems(self) -> Iterator[str]:
        if self.name and (problem := name_problem(self.name)):
            yield f"run.name: {problem}"


class SequenceOptions(Options):
    """What every stage's data has in common."""

    sequence_length: int = option(1024, "tokens in a sequence", **LENGTH)
    stage_to: Path | None = option(
        None,
        "folder on each host's own disk; token folders and the model of model.source are copied"
        " there before training, and what is read of shards at an address is cached there (default:"
        " nothing is copied, and ~/.cache/lmforge/shards)",
    )


# Those of training that a model config has not.
BALANCE_OPTIONS = ("router_aux_loss_scope", "router_z_loss_coef", "bias_update_speed")


# Those of the base model of a parametrization.
BASE_OPTIONS = ("base_width", "base_depth", "base_head_dim")


class ModelOptions(Options):
    """The model config: a preset or a Hugging Face folder, and changes to it.

    Names are those of config.json.
    """

    preset: str | None = option(
        None, "a named model config; `lmforge show presets` lists them (default: nano)"
    )
    source: Path | None = option(
        None,
        "model to start from: a run, a checkpoint, a Hugging Face folder, or a name on the hub"
        " (owner/model[@revision])",
    )
    implementation: Literal["lmforge", "transformers"] = option(
        "lmforge",
        "with model.source: the code that runs it; transformers (an extra) supports every family,"
        " lmforge is faster",
    )
    load_weights: bool = option(
        True, "with model.source: load its weights; false takes its config only"
    )
    resize_vocab: bool = option(
        False,
        "with model.source: grow its vocabulary to the tokenizer's; new rows are the others' mean",
    )
    model_type: str | None = choice(
        None,
        "model family; it decides which of the options below exist (default: unchanged)",
        "model_family",
    )
    hidden_size: int | None = _model_option("width of the residual stream", "hidden_size")
    intermediate_size: int | None = _model_option(
        "width of the feed-forward layer", "intermediate_size"
    )
    num_hidden_layers: int | None = _model_option("number of blocks", "num_hidden_layers")
    num_attention_heads: int | None = _model_option("query heads", "num_attention_heads")
    num_key_value_heads: int | None = _model_option(
        "key and value heads (grouped-query attention)", "num_key_value_heads"
    )
    head_dim: int | None = _model_option("width of a head", "head_dim")
    max_position_embeddings: int | None = _model_option(
        "longest sequence it is made for, in tokens", "max_position_embeddings"
    )
    rope_theta: float | None = _model_option(
        "base of the rotary position embedding's frequencies", "rope_theta"
    )
    tie_word_embeddings: bool | None = _model_option("use the input embedding as output head")
    attention_bias: bool | None = _model_option("biases in the attention projections")
    sliding_window: int | None = _model_option(
        "attend to this many last tokens only", "sliding_window"
    )
    final_logit_softcapping: float | None = _model_option(
        "logits become c * tanh(logits / c), between -c and c", "final_logit_softcapping"
    )
    num_experts: int | None = _model_option("experts of each mixture", "num_experts")
    num_experts_per_tok: int | None = _model_option(
        "experts that each token goes to", "num_experts_per_tok"
    )
    moe_intermediate_size: int | None = _model_option(
        "width of each expert", "moe_intermediate_size"
    )
    router_aux_loss_coef: float | None = _model_option(
        "mixtures of experts: weight of the loss that balances the experts", "router_aux_loss_coef"
    )
    output_router_logits: bool | None = _model_option("mixtures of experts: train with that loss")
    router_aux_loss_scope: Literal["row", "global_batch"] = option(
        "row",
        "mixtures of experts: that loss is of each row, or of the global batch, with the choices of"
        " the one before",
    )
    router_z_loss_coef: float = option(
        0.0, "mixtures of experts: weight of the router z-loss (arXiv 2202.08906)", **SCALE_OR_0
    )
    bias_update_speed: float | None = option(
        None,
        "deepseek_v3: balance without a loss (arXiv 2408.15664): the bias of an expert moves by"
        " this much a step; 0 is off (default: 0.001 in pretrain, as torchtitan's"
        " load_balance_coeff, else 0)",
        **SCALE_OR_0,
    )
    initializer_range: float | None = _model_option(
        "standard deviation of random weights", "initializer_range"
    )
    embedding_initializer_range: float | None = option(
        None, "standard deviation of an untied input embedding", **SCALE
    )
    parametrization: Literal["standard", "mup", "completep"] = option(
        "standard",
        "first values and learning rates: as given; as given for a model of base_width, from which"
        " they transfer (mup, arXiv 2203.03466); or also for one of base_depth (completep, arXiv"
        " 2505.01618)",
    )
    base_width: int | None = option(
        None, "mup, completep: hidden_size of the model that the settings are for", **COUNT
    )
    base_depth: int | None = option(None, "completep: its num_hidden_layers", **COUNT)
    base_head_dim: int | None = option(
        None, "mup, completep: its head_dim, where that differs", **COUNT
    )
    dropout: float = option(
        0.0,
        "dropout probability in training, on the embeddings and on the output of attention and"
        " feed-forward",
        **PROBABILITY,
    )

    def problems(self) -> Iterator[str]:
        if self.preset and self.source:
            yield "model.preset and model.source: give one of them, not both"
        if self.resize_vocab and not self.source:
            yield (
                "model.resize_vocab: a new model has the tokenizer's vocabulary; leave it out, or"
                " name a model.source"
            )
        needed = {
            "standard": (),
            "mup": ("base_width",),
            "completep": ("base_width", "base_depth"),
        }[self.parametrization]
        for name in BASE_OPTIONS:
            if (given := getattr(self, name)) is None and name in needed:
                yield (
                    f"model.parametrization = {self.parametrization}: give model.{name}, of the"
                    " model its settings are for"
                )
            if given is not None and name not in (*needed, *(["base_head_dim"] if needed else [])):
                yield (
                    f"model.{name}: not with model.parametrization = {self.parametrization}; leave"
                    " it out"
                )
        if self.implementation == "lmforge":
            return
        if not self.source:
            yield (
                "model.implementation = transformers: wraps a Hugging Face folder; name it with"
                " model.source"
            )
        if self.model_type:
            yield (
                "model.model_type: with model.implementation = transformers the folder says it;"
                " leave it out"
            )
        for name in ("dropout", "router_aux_loss_coef", "output_router_logits"):
            if getattr(self, name):
                yield (
                    f"model.{name}: not with model.implementation = transformers, which has none"
                    " here; leave it out"
                )

    def overrides(self) -> dict[str, object]:
        """The fields of the model config that were given, by their Hugging Face names."""
        own = {
            "preset",
            "source",
            "implementation",
            "load_weights",
            "embedding_initializer_range",
            "dropout",
        }
        own |= {
            "parametrization",
            *BASE_OPTIONS,
            "resize_vocab",
            *BALANCE_OPTIONS,
        }
        fields = self.model_dump(exclude=own | {"neftune_noise_alpha"}, exclude_none=True)
        return {
            name: value
            for name, value in fields.items()
            if not isinstance(getattr(self, name), Options)
        }


class ParallelOptions(Options):
    """How the model is distributed over ranks."""

    engine: Literal["auto", "single", "ddp", "fsdp1", "fsdp2"] = option(
        "auto",
        "single process, DDP, FSDP (fsdp1), or fully_shard (fsdp2); auto is fsdp2 on several ranks"
        " and single on one",
    )
    sharding: Sharding | None = option(
        None,
        "fsdp1 and fsdp2: full-shard (ZeRO-3; the default) frees gathered weights after each"
        " forward (reshard_after_forward), grad-shard (ZeRO-2) keeps them until backward; hybrid-…"
        " shards within groups of ranks and replicates over groups; no-shard replicates (fsdp2)."
        " torch's names, such as SHARD_GRAD_OP, are taken too",
    )
    shard_degree: int | None = option(
        None,
        "ranks that share one copy of the model in hybrid sharding, HSDP (default: those of one"
        " host)",
        **RANKS,
    )
    activation_checkpointing: str = choice(
        "none",
        "recompute activations in backward: "
        + ", ".join(
            f"{mode.summary} ({name})"
            for name, mode in CHECKPOINTING_MODES.items()
            if name != "none"
        ),
        "checkpointing_mode",
    )
    activation_checkpointing_every: int = option(
        2, "the k of activation_checkpointing = selective-blocks", **COUNT
    )
    activation_offload: bool = option(
        False,
        "keep what blocks need for their backward pass in host memory, and copy it back one block"
        " ahead",
    )
    cpu_offload: bool = option(
        False, "keep parameters, gradients and optimizer states in host memory (fsdp1, fsdp2)"
    )
    wrap_embedding: bool = option(
        True, "shard an untied input embedding as its own FSDP unit (fsdp1, fsdp2)"
    )
    prefetch_blocks: int = option(
        0,
        "fsdp2: blocks gathered ahead in forward and backward; 0 leaves it to torch",
        **COUNT_OR_0,
    )
    reduce_every_micro_batch: bool = option(
        True,
        "fsdp1, fsdp2 without pipelines: reduce-scatter gradients after every micro-batch, which"
        " keeps them sharded; false waits for the last, as ddp and pipelines always do (no_sync:"
        " faster, more memory; `lmforge plan` says where it fits)",
    )
    limit_all_gathers: bool = option(
        True, "fsdp1: torch's limit_all_gathers, which bounds the memory of gathered weights"
    )
    tensor_parallel_degree: int = option(
        1,
        "fsdp2: ranks that split every matrix of a block (tensor parallelism, with sequence"
        " parallelism)",
        **RANKS,
    )
    context_parallel_degree: int = option(
        1, "fsdp2: ranks that split the tokens of a sequence (context parallelism)", **RANKS
    )
    pipeline_parallel_degree: int = option(
        1,
        "fsdp2: ranks that split the blocks, with micro-batches flowing through them (pipeline"
        " parallelism)",
        **RANKS,
    )
    expert_parallel_degree: int = option(
        1,
        "fsdp2: ranks that split the experts of a mixture, and send each other their tokens (expert"
        " parallelism); they are of those that shard a copy of the model or split its sequences",
        **RANKS,
    )
    pipeline_schedule: Literal["1f1b", "interleaved"] = option(
        "1f1b",
        "order of a pipeline's forward and backward passes; interleaved has"
        f" {INTERLEAVED_STAGES} stages on each rank",
    )
    forward_prefetch: bool = option(
        False, "fsdp1: torch's forward_prefetch, which gathers the next unit early in forward"
    )

    @field_validator("sharding", mode="before")
    @classmethod
    def _translate_torch_name(cls, given: Any) -> Any:
        return next(
            (ours for ours, theirs in TORCH_SHARDING_NAMES.items() if theirs == given), given
        )

    @property
    def splits_model(self) -> bool:
        """Whether no rank can hold the whole model, not even for a moment."""
        return self.tensor_parallel_degree * self.pipeline_parallel_degree > 1

    @property
    def cuts_rows(self) -> bool:
        """Whether the rows of matrices are cut over ranks."""
        return self.engine == "fsdp1" or self.tensor_parallel_degree > 1

    @property
    def model_parallel_size(self) -> int:
        """Number of ranks that work on the same sequences."""
        return (
            self.tensor_parallel_degree
            * self.context_parallel_degree
            * self.pipeline_parallel_degree
        )

    @property
    def stages_per_rank(self) -> int:
        """Number of pipeline stages on each rank."""
        return 1 if self.pipeline_schedule == "1f1b" else INTERLEAVED_STAGES


class TrainOptions(Options):
    """The training loop.

    You set the global batch size; micro-batches and accumulation steps follow from it.
    """

    steps: int = option(1000, "optimizer steps in the whole run (transformers: max_steps)", **COUNT)
    epochs: float | None = option(
        None, "passes over the data, instead of train.steps (num_train_epochs)", **DURATION
    )
    global_batch_size: int | None = option(
        None,
        f"sequences in an optimizer step, over all ranks (default: {DEFAULT_GLOBAL_BATCH_SIZE})",
        **SEQUENCES,
    )
    global_batch_tokens: int | None = option(
        None, "global batch size in tokens; a multiple of data.sequence_length", **TOKENS
    )
    micro_batch_size: int | None = option(
        None,
        f"sequences in a rank's forward pass (default: up to {COMFORTABLE_MICRO_BATCH_TOKENS:,}"
        " tokens)",
        **SEQUENCES,
    )
    seed: int = option(0, "seed of the initial weights, the data order and dropout", **SEED)
    dtype: DType = option(
        "auto", "compute dtype; auto is bf16 where it is faster, on a CPU by what is measured"
    )
    master_dtype: Literal["fp32", "bf16"] = option(
        "fp32",
        "dtype of parameters and optimizer states between steps; bf16 halves them, but rounds small"
        " updates away",
    )
    float8: bool = option(
        False,
        "float8 matrix multiplications in the blocks' linear layers (GPUs of compute capability 8.9"
        " and up; extra: fp8)",
    )
    z_loss: float = option(
        0.0,
        "weight of the z-loss, log(sum(exp(logits)))^2 of each token, in the loss of pretrain and"
        " sft (try 1e-4)",
        **SCALE_OR_0,
    )
    device: Device = DEVICE
    compile: Literal["auto", "on", "off"] = option(
        "auto",
        "torch.compile each block; auto turns it on if a compiler is found, on a CPU only in runs"
        " of 200 steps or more",
    )
    deterministic: bool = option(
        False,
        "bit-identical results on the same ranks, on GPUs too; slower, and operators without a"
        " deterministic form are refused",
    )
    threads: int | None = option(
        None, "CPU threads of a rank (default: the cores divided by the local ranks)", **THREADS
    )
    callbacks: tuple[str, ...] = choice(
        (), "callbacks of plugins, called at named points of the run, in this order", "callback"
    )

    @field_validator("callbacks", mode="before")
    @classmethod
    def _take_list(cls, given: Any) -> Any:
        """Accepts a list too, where a validator of the whole section has parsed JSON, since a tuple
        is expected.
        """
        return tuple(given) if isinstance(given, list) else given

    def problems(self) -> Iterator[str]:
        if "steps" in self.model_fields_set and self.epochs is not None:
            yield "train.steps and train.epochs: give one of them, not both"
        if self.global_batch_size and self.global_batch_tokens:
            yield (
                "train.global_batch_size and train.global_batch_tokens: give one of them, not both"
            )


class ObjectiveOptions(Options):
    """What the model is trained for."""

    name: str | None = choice(
        None, "the loss (default: next-token; of align that of align.method)", "objective"
    )


class GroupOptions(Options):
    """A parameter group: parameters chosen by name, and the values that hold for them."""

    pattern: str = option(
        ..., "a regular expression searched in parameter names, such as norm|bias or layers\\.0\\."
    )
    lr_ratio: float | None = option(
        None, "factor on optimizer.lr (default: as without the group)", **SCALE_OR_0
    )
    weight_decay: float | None = option(
        None, "weight decay (default: as without the group)", **SCALE_OR_0
    )

    def problems(self) -> Iterator[str]:
        try:
            compile_pattern(self.pattern, "optimizer.groups.pattern")
        except UserError as problem:
            yield str(problem)


class OptimizerOptions(Options):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) or Muon (Jordan; Liu et al., arXiv
    2502.16982).
    """

    name: str = choice(
        "adamw",
        "muon updates the matrices of the blocks, and leaves embeddings, head, norms and biases to"
        " adamw",
        "optimizer",
    )
    lr: float = option(3e-4, "peak learning rate", **SCALE)
    beta1: float = option(0.9, "adamw: decay rate of the first moment", **PROBABILITY)
    beta2: float = option(0.95, "adamw: decay rate of the second moment", **PROBABILITY)
    eps: float = option(1e-8, "adamw: epsilon, added to the root of the second moment", **SCALE)
    embedding_lr_ratio: float = option(
        1.0, "learning rate of input embedding and head, relative to optimizer.lr", **SCALE
    )
    weight_decay: float = option(
        0.1, "decoupled weight decay of matrices, not of norms and biases", **SCALE_OR_0
    )
    max_grad_norm: float = option(
        1.0, "gradients are clipped to this norm; 0 does not clip", **SCALE_OR_0
    )
    groups: tuple[GroupOptions, ...] = option(
        (),
        "parameter groups, [[optimizer.groups]] in a recipe; the first whose pattern matches"
        " applies",
    )
    state_dtype: Literal["fp32", "bf16", "8bit"] = option(
        "fp32",
        "adamw and muon: dtype of moments and momentum; 8bit: of the matrices of the blocks, others"
        " stay fp32",
    )
    stochastic_rounding: bool = option(
        False,
        "adamw and muon: master weights in bf16 are rounded up or down at random, so that small"
        " steps are not lost",
    )

    @property
    def uses_state_dtype(self) -> bool:
        """Whether states are in `state_dtype`; else in the dtype of the master weights, as torch's
        fused AdamW keeps them.
        """
        return self.name == "muon" or self.state_dtype != "fp32" or self.stochastic_rounding


class ScheduleOptions(Options):
    """The learning rate over the run."""

    name: str = choice(
        "cosine", "schedule after warm-up (transformers: lr_scheduler_type)", "schedule"
    )
    warmup_steps: int = option(100, "steps of linear warm-up", **COUNT_OR_0)
    warmup_ratio: float | None = option(
        None, "warm-up as a fraction of the run, instead of schedule.warmup_steps", **FRACTION
    )
    decay_steps: int | None = option(
        None, "warmup-stable-decay: steps of decay (default: a fifth of the run)", **COUNT
    )
    min_lr_ratio: float = option(
        0.1, "learning rate that the decay leads to, as a fraction of the peak", **FRACTION
    )

    def warmup(self, steps: int) -> int:
        """Steps of warm-up in a run of `steps`."""
        return (
            self.warmup_steps if self.warmup_ratio is None else math.ceil(self.warmup_ratio * steps)
        )


class ValidationOptions(Options):
    """Loss on validation data while training, and scores of tasks."""

    every_steps: int | None = option(
        None, "steps between validations; none: only the last step validates", **COUNT
    )
    sequences: int = option(
        64, "validation sequences, evenly spaced over the split and always the same", **COUNT
    )
    at_start: bool = option(False, "validate before the first step too")
    tasks: tuple[Path, ...] = option(
        (),
        "files of questions, one JSON object per line, scored at each validation, as by `lmforge"
        " evaluate --tasks`",
    )
    num_fewshot: int = option(
        0, "examples before each question: the first others of its file", **COUNT_OR_0
    )

    def problems(self) -> Iterator[str]:
        if self.num_fewshot and not self.tasks:
            yield "validation.num_fewshot: only with validation.tasks; leave it out"


class SampleOptions(Options):
    """Text that the model generates while it trains."""

    every_steps: int | None = option(None, "steps between samples; none for never", **COUNT)
    prompts: tuple[str, ...] = option(("import ",), "prompts of the samples")
    max_tokens: int = option(48, "tokens of a sample", **LENGTH)


class FaultOptions(Options):
    """Bad steps.

    A step with a non-finite loss or gradient (NaN or inf) is skipped: it changes nothing and is
    counted.
    """

    max_bad_steps: int = option(
        5,
        "bad steps in a row after which the run rolls back to a checkpoint and continues with later"
        " batches",
        **COUNT,
    )
    spike_sigmas: float | None = option(
        None,
        "a step is also bad if its loss is this many standard deviations above the mean of the last"
        f" {SPIKE_WINDOW_STEPS} steps (try 6)",
        **SCALE,
    )
