"""The options of the stages after pretraining: what is read as examples, adapters, and how a model is aligned."""

from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from lmforge.config.options import Options, argument, option, section
from lmforge.config.run import (
    Config,
    ConversationFormat,
    ModelOptions,
    OptimizerOptions,
    RowOptions,
    ScheduleOptions,
    Stage,
    StageConfig,
    TrainOptions,
    renamed_fields,
)
from lmforge.errors import UserError

Method = Literal["dpo", "kto", "orpo", "simpo", "reward", "grpo"]
PreferenceLossType = Literal["sigmoid", "ipo", "hinge", "robust", "exo", "nca", "apo-zero", "apo-down"]


class ExampleOptions(RowOptions):
    """Files of examples, one in a line (jsonl, .gz or .zst) or row (parquet), and how they become rows."""

    files: tuple[Path, ...] = option((), "files to train on, or folders of them")
    validation_files: tuple[Path, ...] = option((), "files to validate on, or folders of them (default: a share of the others)")
    validation_ratio: float = option(
        0.02, "share of the examples held out where data.validation_files is not given", ge=0, lt=1
    )
    packing: Literal["best-fit", "none"] = option("best-fit", "several examples in a row, which do not see each other, or one")
    fields: tuple[str, ...] = option((), "names of fields that are others in the files, OURS=THEIRS, such as messages=chat")
    overlong: Literal["drop", "truncate"] = option("drop", "what becomes of an example longer than a row; counted and told")
    folder: Path = option(
        Path("data/examples"), "where examples are kept as tokens, one folder for each set of files and options"
    )

    @model_validator(mode="after")
    def _fields_are_pairs(self) -> Self:
        try:
            renamed_fields(self.fields, "data.fields")
        except UserError as mistake:
            raise ValueError(str(mistake)) from None
        return self

    @property
    def renamed(self) -> dict[str, str]:
        """What the files call a field of ours, by its name."""
        return renamed_fields(self.fields, "data.fields")


class ConversationOptions(ExampleOptions):
    """Conversations, or prompts with completions."""

    format: ConversationFormat = option("auto", "what a record is; auto goes by the fields of the first")
    mask: Literal["assistant", "last", "all"] = option(
        "assistant", "what is learnt: every turn of the assistant, the last one, or all tokens"
    )


class TunedModelOptions(ModelOptions):
    """The model to begin from."""

    neftune_noise_alpha: float = option(
        0.0, "NEFTune: uniform noise on the embeddings, of alpha over the root of (document length x width)", ge=0
    )


class LoraOptions(Options):
    """Low-rank adapters (Hu et al., arXiv 2106.09685): a few weights are trained beside frozen ones."""

    rank: int | None = option(None, "rank of the adapters; none trains all weights", gt=0)
    alpha: float = option(32.0, "what they add is scaled by alpha / rank", gt=0)
    target_modules: tuple[str, ...] = option(("all-linear",), "which layers: names such as q_proj, or all-linear")
    dropout: float = option(0.0, "share of their inputs zeroed in training", ge=0, lt=1)
    use_rslora: bool = option(False, "scale by alpha / sqrt(rank) instead (arXiv 2312.03732)")


class TunedTrainOptions(TrainOptions):
    """The loop. The global batch is a contract: micro-batches and accumulation are derived from it."""

    epochs: float | None = option(
        None, "passes over the data, instead of train.steps (default: one, if neither is given)", gt=0
    )

    @model_validator(mode="before")
    @classmethod
    def _one_pass(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("steps") is None and given.get("epochs") is None:
            return {**given, "epochs": 1.0}
        return given


class TuningSchedule(ScheduleOptions):
    """The learning rate over the run: linear, after a tenth of it in warm-up."""

    name: Literal["cosine", "linear", "warmup-stable-decay", "constant"] = option("linear", "its shape after warm-up")
    warmup_ratio: float | None = option(0.1, "steps of warm-up as a share of the run; none goes by warmup_steps", ge=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _steps_if_given(cls, given: Any) -> Any:
        """Whoever names steps does not mean the share that holds by default."""
        if isinstance(given, dict) and given.get("warmup_steps") is not None and "warmup_ratio" not in given:
            return {**given, "warmup_ratio": None}
        return given

    min_lr_ratio: float = option(0.0, "last learning rate, as a share of the peak", ge=0, le=1)


class TuningOptimizer(OptimizerOptions):
    """AdamW, Muon or SGD."""

    lr: float = option(2e-5, "peak learning rate; about ten times as much for adapters", gt=0)
    beta2: float = option(0.999, "adamw: decay of the second moment", ge=0, lt=1)
    weight_decay: float = option(0.0, "decay of matrices, not of vectors (norms, biases)", ge=0)


class TunedConfig(StageConfig):
    """What fine-tuning and alignment have in common."""

    data: ExampleOptions = section(ExampleOptions, "what the model reads")
    model: TunedModelOptions = section(TunedModelOptions, "the model to begin from")
    lora: LoraOptions = section(LoraOptions, "low-rank adapters")
    train: TunedTrainOptions = section(TunedTrainOptions, "the loop")
    optimizer: TuningOptimizer = section(TuningOptimizer, "how gradients become steps")
    schedule: TuningSchedule = section(TuningSchedule, "the learning rate over the run")

    @property
    def kind(self) -> str:
        """What its examples are."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _fits(self) -> "TunedConfig":
        if not self.model.load_weights:
            raise ValueError("model.load_weights = false: this verb begins from weights; leave it out, or pretrain")
        if self.model.neftune_noise_alpha and self.model.implementation != "lmforge":
            raise ValueError("model.neftune_noise_alpha: not with model.implementation = transformers; leave it out")
        if self.lora.rank is not None and self.parallel.splits_model:
            raise ValueError(
                "lora.rank: not with parallel.tensor_parallel_degree or pipeline_parallel_degree; shard with fsdp2 instead"
            )
        return self


class SftConfig(TunedConfig):
    """A run of supervised fine-tuning."""

    of_stage: ClassVar[Stage] = "sft"
    data: ConversationOptions = section(ConversationOptions, "conversations to learn from")

    @property
    def kind(self) -> str:
        return "conversations"


class AlignDataOptions(ExampleOptions):
    """Files of pairs ({prompt, chosen, rejected}, for reward with a margin too), of judged completions
    ({prompt, completion, label}) for kto, or of prompts with columns for grpo."""

    overlong: Literal["drop"] = option("drop", "what becomes of an example longer than a row; counted and told")
    apply_chat_template: bool = option(False, "prompts and answers that are strings become turns, by the model's chat template")


class AlignOptions(Options):
    """How a model is aligned."""

    method: Method = option(
        "dpo", "on pairs: dpo, orpo, simpo, or reward (a reward model); on labelled completions: kto; on rollouts: grpo"
    )
    loss_type: PreferenceLossType = option(
        "sigmoid", "dpo: the loss of a pair; exo, nca, apo-zero and apo-down are TRL's exo_pair, nca_pair, apo_zero, apo_down"
    )
    beta: float | None = option(
        None, "how far from the reference costs how much; of orpo the odds ratio's weight (default: 0.1; simpo 2.0)", gt=0
    )
    label_smoothing: float = option(
        0.0, "dpo: fraction of the labels assumed wrong; for loss_type sigmoid, robust and exo, which needs one", ge=0, lt=0.5
    )
    gamma: float = option(0.5, "simpo: margin that is asked for", ge=0)
    desirable_weight: float = option(1.0, "kto: weight of desirable completions", gt=0)
    undesirable_weight: float = option(1.0, "kto: weight of the others", gt=0)
    center_rewards_coefficient: float = option(
        0.0, "reward: weight of the square of both sides' sum, which keeps rewards near zero", ge=0
    )
    reference: Literal["auto", "copy", "adapters-off", "precomputed"] = option(
        "auto",
        "what the policy is held against: a frozen copy, spread like the policy; the policy with its adapters off; or numbers"
        " computed once before training and kept; auto is adapters-off with lora.rank, else copy",
    )


class RolloutOptions(Options):
    """grpo: how completions are sampled and judged, and what is learnt from them. None leaves a switch to the preset."""

    loss_type: Literal["grpo", "dr_grpo", "dapo", "gspo", "rloo"] = option(
        "grpo", "a set of switches; the options below change it"
    )
    num_generations: int = option(8, "completions of each prompt: a group", gt=1)
    max_completion_length: int = option(128, "longest completion; data.sequence_length less this is left for prompts", gt=0)
    temperature: float = option(1.0, "of the sampling, and of the probabilities that are learnt", gt=0)
    top_p: float = option(
        1.0, "sample from the likeliest tokens that hold this probability; below 1 the ratios are off", gt=0, le=1
    )
    decode_batch_size: int = option(
        64, "answers that a rank writes at once; fewer take less memory for keys and values, and change nothing else", gt=0
    )
    num_iterations: int = option(1, "optimizer steps on each set of completions", gt=0)
    reward_functions: tuple[str, ...] = option(
        (), "reward functions, FILE.py:FUNCTION each, or reward models by their folders; their weighted sum is the reward"
    )
    reward_weights: tuple[float, ...] = option((), "a weight for each (default: 1)")
    reward_timeout_seconds: float = option(60.0, "until a reward function that has not answered counts as none", gt=0)
    importance_sampling_level: Literal["token", "sequence", "product"] | None = option(
        None, "importance ratio of a token or of a sequence"
    )
    epsilon: float | None = option(None, "ratios gain nothing below 1 - this", ge=0, le=1)
    epsilon_high: float | None = option(None, "nor above 1 + this", ge=0)
    loss_aggregation: Literal["sequence", "token", "constant"] | None = option(None, "what a completion of many tokens weighs")
    baseline: Literal["group", "leave-one-out"] | None = option(None, "what a reward is compared with")
    scale_rewards: Literal["none", "group-population", "group"] | None = option(
        None, "which deviation of the group it is divided by"
    )
    kl_estimator: Literal["none", "k1", "k2", "k3"] | None = option(
        None, "divergence from the reference: in the reward (k1) or the loss"
    )
    beta: float | None = option(None, "its weight", ge=0)
    use_bias_correction_kl: bool | None = option(
        None, "k2, k3: the divergence times the importance ratio, so that its gradient is unbiased"
    )
    mask_truncated_completions: bool | None = option(None, "completions cut at max_tokens teach nothing")
    drop_zero_std_groups: bool = option(True, "groups whose rewards are all alike, which teach nothing, take no part")
    pass_threshold: float = option(1.0, "reward from which an answer counts as a pass, for pass@k")
    log_completions_every: int = option(
        1, "sets of completions between those whose text is written to completions/ in the run", gt=0
    )


# Options of alignment that only some methods read.
READ_BY = {
    "beta": ("dpo", "kto", "orpo", "simpo"),
    "loss_type": ("dpo",),
    "label_smoothing": ("dpo",),
    "gamma": ("simpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "center_rewards_coefficient": ("reward",),
    "reference": ("dpo", "kto", "grpo"),
}
# The values of align.loss_type that read align.label_smoothing.
SMOOTHED_LOSS_TYPES = ("sigmoid", "robust", "exo")


class AlignConfig(TunedConfig):
    """A run of alignment."""

    of_stage: ClassVar[Stage] = "align"
    data: AlignDataOptions = section(AlignDataOptions, "what is preferred to what, or prompts")
    align: AlignOptions = section(AlignOptions, "how the model is aligned")
    rollout: RolloutOptions = section(RolloutOptions, "grpo: how completions are sampled, judged and learnt from")

    @property
    def kind(self) -> str:
        return {"kto": "judged", "reward": "ranked", "grpo": "prompts"}.get(self.align.method, "pairs")

    @property
    def beta(self) -> float:
        return self.align.beta if self.align.beta is not None else {"simpo": 2.0}.get(self.align.method, 0.1)

    @property
    def reference(self) -> str | None:
        """Which reference there is; None where the method has none."""
        if self.align.method not in READ_BY["reference"]:
            return None
        if self.align.reference == "auto":
            return "copy" if self.lora.rank is None else "adapters-off"
        return self.align.reference

    @model_validator(mode="after")
    def _reads_all(self) -> "AlignConfig":
        """Nothing that is asked for is passed over."""
        method = self.align.method
        for name, methods in READ_BY.items():
            if method not in methods and getattr(self.align, name) != type(self.align).model_fields[name].default:
                raise ValueError(f"align.{name}: {method} does not read it; it is for {', '.join(methods)}: leave it out")
        if method == "grpo" and self.data.packing != "best-fit":
            raise ValueError(f"data.packing = {self.data.packing}: grpo has a row for each answer; leave it out")
        if method != "grpo":
            for name, field in type(self.rollout).model_fields.items():
                if getattr(self.rollout, name) != field.default:
                    raise ValueError(f"rollout.{name}: {method} does not read it; it is for grpo: leave it out")
        return self

    @model_validator(mode="after")
    def _check_label_smoothing(self) -> "AlignConfig":
        loss_type, label_smoothing = self.align.loss_type, self.align.label_smoothing
        if label_smoothing and loss_type not in SMOOTHED_LOSS_TYPES:
            readers = ", ".join(SMOOTHED_LOSS_TYPES)
            raise ValueError(
                f"align.label_smoothing: align.loss_type = {loss_type} does not read it; it is for {readers}: leave it out"
            )
        if loss_type == "exo" and not label_smoothing:
            raise ValueError("align.loss_type = exo: needs align.label_smoothing above 0, such as 0.001")
        return self

    @model_validator(mode="after")
    def _fits_method(self) -> "AlignConfig":
        chosen = self.parallel
        if chosen.tensor_parallel_degree * chosen.context_parallel_degree * chosen.pipeline_parallel_degree > 1:
            raise ValueError(
                "parallel.tensor_parallel_degree, context_parallel_degree, pipeline_parallel_degree: alignment needs whole completions on one rank; shard"
                " with fsdp2 instead"
            )
        if self.align.method == "grpo" and self.align.reference == "precomputed":
            raise ValueError("align.reference = precomputed: grpo's answers are not there to be computed before; use copy")
        if self.align.method == "grpo" and (self.model.dropout or self.model.neftune_noise_alpha or self.lora.dropout):
            raise ValueError(
                "model.dropout, model.neftune_noise_alpha, lora.dropout: not with grpo, whose answers are drawn without"
            )
        if self.align.reference == "adapters-off" and self.lora.rank is None:
            raise ValueError("align.reference = adapters-off: there are no adapters; give lora.rank, or use copy")
        if self.align.method == "kto" and self.data.packing == "none":
            raise ValueError("data.packing = none: kto compares the answers in a row with each other; use best-fit")
        if self.align.method == "reward" and self.model.implementation != "lmforge":
            raise ValueError("model.implementation = transformers: not with align.method = reward; leave it out")
        if self.align.method == "reward" and self.sample.every_steps is not None:
            raise ValueError("sample.every_steps: a reward model writes nothing; leave it out")
        if self.align.method == "reward" and self.validation.tasks:
            raise ValueError("validation.tasks: a reward model answers nothing; leave it out")
        if self.rollout.reward_weights and len(self.rollout.reward_weights) != len(self.rollout.reward_functions):
            raise ValueError("rollout.reward_weights: give as many as rollout.reward_functions")
        return self


class RunPipelineOptions(Options):
    """lmforge run PIPELINE.toml: stages in order, each from the last one's run."""

    file: Path = argument(..., "a file of [[stages]]: each a verb, with a recipe and words as they are typed")


STAGES: dict[str | None, type[StageConfig]] = {None: Config, "pretrain": Config, "sft": SftConfig, "align": AlignConfig}


def config_class(recipe: dict[str, object], where: str) -> type[StageConfig]:
    """The kind of options that a recipe has, by its run.stage. Raises UserError where there is no such stage."""
    run = recipe.get("run")
    stage = run.get("stage") if isinstance(run, dict) else None
    if stage not in STAGES:
        raise UserError(f"{where}: run.stage: expected one of {', '.join(filter(None, STAGES))}, got {stage!r}")
    return STAGES[stage]
