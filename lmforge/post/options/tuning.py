"""The options of `lmforge sft`, most of which alignment shares: examples instead of token shards,
adapters, shorter runs; and those that `lmforge distill` has beside them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from lmforge.core.errors import UserError, prefix_errors
from lmforge.core.options.lora import LoraOptions
from lmforge.core.options.mixture import (
    FileSourceOptions,
    labels_of_mixture,
    mixture_problems,
)
from lmforge.core.options.options import Alternatives, Options, option, section, with_default
from lmforge.core.options.ranges import (
    COUNT_OR_0,
    DURATION,
    FRACTION,
    LENGTH,
    PROBABILITY,
    SCALE,
    SCALE_OR_0,
)
from lmforge.core.options.sections import (
    ConversationFormat,
    ModelOptions,
    OptimizerOptions,
    ScheduleOptions,
    SequenceOptions,
    Stage,
    TrainOptions,
)
from lmforge.core.options.stage import ESSENTIAL_TO_TRAINING, StageConfig


def renamed_fields(pairs: Sequence[str], option_name: str) -> dict[str, str]:
    """{our name of a field: its name in the files, empty where it is left out}, from OURS=THEIRS or
    OURS=. Raises UserError naming the option for anything else.
    """
    for pair in pairs:
        if not all(pair.partition("=")[:2]):
            raise UserError(
                f"{option_name}: expected OURS=THEIRS, such as messages=chat, or OURS= to leave one"
                f" out, got {pair}"
            )
    return dict(pair.split("=", 1) for pair in pairs)


class ExampleOptions(SequenceOptions):
    """Files of examples, one a line (jsonl, .gz or .zst) or row (parquet), and how they become
    sequences.
    """

    files: tuple[Path, ...] = option((), "files to train on, or folders of them")
    validation_files: tuple[Path, ...] = option(
        (), "files to validate on, or folders of them (default: a fraction of data.files)"
    )
    validation_ratio: float = option(
        0.02,
        "fraction of the examples kept for validation where data.validation_files is not given",
        **PROBABILITY,
    )
    packing: Literal["best-fit", "none"] = option(
        "best-fit",
        "best-fit packs several examples into a sequence, where they do not attend to each other"
        " (TRL: packing, bfd); none puts each in its own",
    )
    fields: tuple[str, ...] = option(
        (),
        "fields that have other names in the files, OURS=THEIRS, such as messages=chat; or OURS= to"
        " leave one out",
    )
    overlong: Literal["drop", "truncate"] = option(
        "drop",
        "what happens to an example longer than data.sequence_length; their number is logged",
    )
    skip_invalid: bool = option(
        False,
        "leave out records that cannot be used, with a count and a list, instead of ending at the"
        " first",
    )
    ignore_media: bool = option(
        False,
        "train on the text of records that hold images, audio or videos; otherwise these are"
        " refused",
    )
    parse_special_tokens: bool = option(
        False,
        "plain text that spells a special token is this token, such as text made with a chat"
        " template",
    )
    folder: Path = option(
        Path("data/examples"),
        "where tokenized examples are cached, one folder for each set of files and options",
    )

    def problems(self) -> Iterator[str]:
        try:
            renamed_fields(self.fields, "data.fields")
        except UserError as problem:
            yield str(problem)

    @property
    def file_sources(self) -> tuple[FileSourceOptions, ...]:
        """The sources; the one of data.files where no others are given."""
        return (
            (FileSourceOptions(files=self.files, validation_files=self.validation_files),)
            if self.files
            else ()
        )

    @property
    def renamed(self) -> dict[str, str]:
        """{our name of a field: its name in the files}."""
        return renamed_fields(self.fields, "data.fields")


class TunedModelOptions(ModelOptions):
    """The model to start from."""

    neftune_noise_alpha: float = option(
        0.0,
        "NEFTune (arXiv 2310.05914): uniform noise on the embeddings, alpha / sqrt(document length"
        " x width)",
        **SCALE_OR_0,
    )


class TunedTrainOptions(TrainOptions):
    """The training loop.

    You set the global batch size; micro-batches and accumulation steps follow from it.
    """

    epochs: float | None = option(
        None,
        "passes over the data, instead of train.steps (default: 1, if neither is given;"
        " num_train_epochs)",
        **DURATION,
    )

    @model_validator(mode="before")
    @classmethod
    def _default_to_one_epoch(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("steps") is None and given.get("epochs") is None:
            return {**given, "epochs": 1.0}
        return given


class TuningSchedule(ScheduleOptions):
    """The learning rate over the run: linear, after a warm-up of a tenth of the run."""

    name: str = with_default(ScheduleOptions, "name", "linear")
    warmup_steps: int = option(
        100, "steps of linear warm-up (default: schedule.warmup_ratio of the run)", **COUNT_OR_0
    )
    warmup_ratio: float | None = option(
        0.1, "warm-up as a fraction of the run; none uses schedule.warmup_steps", **FRACTION
    )
    min_lr_ratio: float = with_default(ScheduleOptions, "min_lr_ratio", 0.0)

    @model_validator(mode="before")
    @classmethod
    def _prefer_given_steps(cls, given: Any) -> Any:
        """warmup_steps, if given, replaces the warmup_ratio that holds by default."""
        if (
            isinstance(given, dict)
            and given.get("warmup_steps") is not None
            and "warmup_ratio" not in given
        ):
            return {**given, "warmup_ratio": None}
        return given


class TuningOptimizer(OptimizerOptions):
    """AdamW or Muon."""

    lr: float = option(2e-5, "peak learning rate; about ten times as much for adapters", **SCALE)
    beta2: float = with_default(OptimizerOptions, "beta2", 0.999)
    weight_decay: float = with_default(OptimizerOptions, "weight_decay", 0.0)


class TunedConfig(StageConfig):
    """What the configs of fine-tuning and alignment have in common."""

    is_fine_tuning: ClassVar[bool] = True
    ESSENTIAL: ClassVar[str] = (
        "model.source data.files data.validation_files data.sequence_length lora.rank"
        f" lora.target_modules lora.target_parameters {ESSENTIAL_TO_TRAINING}"
    )
    data: ExampleOptions = section(ExampleOptions, "examples to train on")
    model: TunedModelOptions = section(TunedModelOptions, "the model to start from")
    lora: LoraOptions = section(LoraOptions, "low-rank adapters")
    train: TunedTrainOptions = section(TunedTrainOptions, "the training loop")
    optimizer: TuningOptimizer = section(TuningOptimizer, "the optimizer")
    schedule: TuningSchedule = section(TuningSchedule, "the learning rate over the run")

    @property
    def kind(self) -> str:
        """What its examples are."""
        return "conversations"

    @property
    def adapter_options(self) -> LoraOptions:
        return self.lora

    @property
    def neftune_noise_alpha(self) -> float:
        return self.model.neftune_noise_alpha

    def require_inputs(self) -> None:
        """Raise UserError where the recipe and the command line do not say what to begin from, and
        what to learn from.
        """
        if self.model.source is None:
            raise UserError(
                "model.source: name what to begin from: a run, a checkpoint, a Hugging Face folder"
                " or a name on the hub"
            )
        if not self.data.file_sources:
            raise UserError(
                "data.files: name the files to learn from, such as --data.files chats.jsonl"
            )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.lora.rank is not None and self.model.bias_update_speed:
            yield (
                "model.bias_update_speed: not with LoRA adapters, which are saved without biases;"
                " leave it out"
            )
        if not self.model.load_weights:
            yield (
                "model.load_weights = false: this verb starts from weights; leave it out, or"
                " pretrain"
            )
        if self.model.neftune_noise_alpha and self.model.implementation != "lmforge":
            yield (
                "model.neftune_noise_alpha: not with model.implementation = transformers; leave"
                " it out"
            )
        if self.lora.rank is not None and self.parallel.tensor_parallel_degree > 1:
            yield "lora.rank: not with parallel.tensor_parallel_degree; shard with fsdp2 instead"


SOURCES_INSTEAD: Alternatives = (
    (("data", "files"), ("data", "sources")),
    (("data", "validation_files"), ("data", "sources")),
)


class ConversationOptions(ExampleOptions):
    """Conversations, or prompts with completions: one set of files, or a mixture of several."""

    sources: tuple[FileSourceOptions, ...] = option(
        (), "several sets of files with weights, fractions of the tokens, instead of data.files"
    )
    format: ConversationFormat = option(
        "auto", "format of the records; auto detects it from the fields of the first record"
    )
    mask: Literal["assistant", "last", "all"] = option(
        "assistant",
        "tokens that the loss counts: every assistant turn, the last one only, or all tokens",
    )

    split_turns: bool = option(
        False,
        "make each answer an example of its own, with what comes before it, in conversations whose"
        " earlier turns the chat template rewrites, as those do that remove reasoning",
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.sources and (self.files or self.validation_files):
            yield (
                "data.files and data.sources: give one of them; a source has its own"
                " validation_files"
            )
        yield from mixture_problems(self.sources, (), self.sequence_length)

    @property
    def file_sources(self) -> tuple[FileSourceOptions, ...]:
        return self.sources or super().file_sources


class SftConfig(TunedConfig):
    """lmforge sft [RECIPE.toml]: fine-tune a model on conversations, all of its weights or
    adapters.
    """

    of_stage: ClassVar[Stage] = "sft"
    ALTERNATIVES: ClassVar[Alternatives] = (*StageConfig.ALTERNATIVES, *SOURCES_INSTEAD)
    ESSENTIAL: ClassVar[str] = (
        f"data.sources data.format data.mask data.packing {TunedConfig.ESSENTIAL}"
    )
    data: ConversationOptions = section(ConversationOptions, "conversations to train on")

    @property
    def source_names(self) -> list[str]:
        return labels_of_mixture(self.data.file_sources)


class DistillOptions(Options):
    """The teacher, and the loss. Names are TRL's (GKD) and torchtune's (kd_ratio)."""

    teacher: Path | None = option(
        None,
        "the teacher: a run, a checkpoint, a Hugging Face folder or a name on the hub, with the"
        " student's tokenizer; with distill.logprobs also the address of a server,"
        " http://HOST:PORT, of lmforge serve or vLLM",
    )
    beta: float = option(
        0.5,
        "of the generalised Jensen-Shannon divergence (arXiv 2306.13649): 0 is the forward KL"
        " divergence, KL(teacher || student), 1 the reverse one",
        **FRACTION,
    )
    temperature: float = option(
        1.0, "both models' logits are divided by it in the divergence", **SCALE
    )
    kd_ratio: float = option(
        1.0,
        "share of the divergence in the loss; the rest is the cross-entropy of the data, as in"
        " `lmforge sft`",
        **FRACTION,
    )
    logprobs: Path | None = option(
        None,
        "offline: folder of what is stored of the teacher, which the first run that names it writes"
        " and others read; none: the teacher runs beside the student",
    )
    top_k: int = option(64, "logprobs: tokens that are stored of each place", gt=0, le=2**16)
    stored: Literal["top-k", "sampled"] = option(
        "top-k",
        "logprobs: which tokens: the likeliest, with what all others weigh together, or tokens"
        " drawn from the teacher, from which loss and gradient are unbiased (arXiv 2503.16870);"
        " they give the forward KL divergence only, distill.beta = 0",
    )
    lmbda: float = option(
        0.0,
        "fraction of on-policy batches, in which the student samples the last answers itself, at"
        " temperature",
        **FRACTION,
    )
    max_completion_length: int = option(
        128, "on-policy: longest sampled answer, in tokens", **LENGTH
    )

    @property
    def server(self) -> str | None:
        """The address of a teacher that is a server. A path has lost one of its slashes."""
        scheme, _, place = str(self.teacher).partition(":/")
        return f"{scheme}://{place.strip('/')}" if scheme in ("http", "https") and place else None

    def problems(self) -> Iterator[str]:
        if self.logprobs and self.lmbda:
            yield (
                "distill.lmbda: not with distill.logprobs, which has nothing of what the student"
                " samples; leave one out"
            )
        if self.server and not self.logprobs:
            yield (
                f"distill.teacher: {self.server} says its likeliest tokens once; name a folder for"
                " them, distill.logprobs"
            )
        if self.server and self.temperature != 1:
            yield (
                "distill.temperature: a server reports at temperature 1; leave it out, or name a"
                " teacher that runs here"
            )
        if self.lmbda == 1 and self.kd_ratio < 1:
            yield (
                "distill.kd_ratio: with distill.lmbda = 1 no text of the data is learned; leave"
                " it out"
            )
        if not self.lmbda and "max_completion_length" in self.changed():
            yield (
                "distill.max_completion_length: nothing is sampled; give distill.lmbda too, or"
                " leave it out"
            )
        if not self.logprobs and "top_k" in self.changed():
            yield "distill.top_k: nothing is stored; give distill.logprobs too, or leave it out"
        if not self.logprobs and self.stored == "sampled":
            yield "distill.stored: nothing is stored; give distill.logprobs too, or leave it out"
        if self.logprobs and self.stored == "sampled" and self.beta:
            yield (
                "distill.stored = sampled: drawn tokens give the forward KL divergence only; give"
                " distill.beta = 0 too"
            )
        if self.server and self.stored == "sampled":
            yield (
                f"distill.stored = sampled: {self.server} says its likeliest tokens only; name a"
                " teacher that runs here"
            )


class DistillConfig(SftConfig):
    """lmforge distill [RECIPE.toml] --teacher MODEL: train a small model on what a larger one says
    of each token.
    """

    of_stage: ClassVar[Stage] = "distill"
    SHORT: ClassVar[Mapping[str, str]] = {**SftConfig.SHORT, "teacher": "distill.teacher"}
    ESSENTIAL: ClassVar[str] = (
        "distill.teacher distill.logprobs distill.lmbda distill.beta distill.temperature"
        " distill.kd_ratio model.source data.files data.sequence_length lora.rank"
        f" {ESSENTIAL_TO_TRAINING}"
    )
    distill: DistillOptions = section(DistillOptions, "the teacher, and the loss")

    @property
    def default_objective(self) -> str:
        return "distillation"

    def with_models(self, source: Path | None, replace_model: Callable[[Path], Path]) -> Self:
        changed = super().with_models(source, replace_model)
        if self.distill.teacher is None or self.distill.server:
            return changed
        with prefix_errors("distill.teacher"):
            teacher = replace_model(self.distill.teacher)
        return changed.model_copy(
            update={"distill": self.distill.model_copy(update={"teacher": teacher})}
        )

    def require_inputs(self) -> None:
        super().require_inputs()
        self.require_teacher()

    def require_teacher(self) -> None:
        """Raise UserError where there is nothing to learn from."""
        if self.distill.teacher is None and self.distill.logprobs is None:
            raise UserError(
                "distill.teacher: name the model to learn from, such as --teacher runs/large"
            )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.train.z_loss:
            yield (
                "train.z_loss: distillation does not read it; it is for pretrain and sft: leave"
                " it out"
            )
        if self.parallel.pipeline_parallel_degree > 1:
            yield (
                "parallel.pipeline_parallel_degree: distillation computes losses of whole models;"
                " shard with fsdp2 instead"
            )
        if self.distill.lmbda and self.parallel.model_parallel_size > 1:
            yield (
                "distill.lmbda: not with parallel.tensor_parallel_degree or"
                " context_parallel_degree, with which no rank has whole answers; shard with fsdp2"
                " instead"
            )
        if self.distill.lmbda and self.data.packing != "none":
            yield (
                "distill.lmbda: a sampled answer needs a sequence of its own; give data.packing ="
                " none too"
            )
