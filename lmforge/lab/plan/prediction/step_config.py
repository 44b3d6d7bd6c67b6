"""The inputs of the prediction of a step: model, batch, options and ranks, as plain values."""

from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Literal

from lmforge.core.model.blocks import Block
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.lora_config import LoraConfig
from lmforge.core.model.state_bytes import DTYPE_BYTES, ParameterCounts
from lmforge.core.options.activation_checkpointing import CHECKPOINTING_MODES, NoCheckpointing
from lmforge.core.options.sections import OptimizerOptions, ParallelOptions
from lmforge.core.options.stage import StageConfig
from lmforge.core.parallel.dims import ParallelDims, parallel_dims
from lmforge.core.parallel.precision import DTYPES
from lmforge.core.stages.parameter_counts import count_parameters
from lmforge.lab.plan.traces import LossKind, TracedModel
from lmforge.post.options.tuning import DistillConfig


@dataclass(frozen=True)
class Distillation:
    """The parts of a distillation beside its student.

    beta: of the divergence. teacher: the model that scores each batch; None where its `stored_ids`
    likeliest tokens of each place were stored before.
    """

    beta: float
    stored_ids: int
    teacher: ModelConfig | None

    @classmethod
    def of_recipe(cls, config: StageConfig, teacher: ModelConfig | None) -> "Distillation | None":
        if not isinstance(config, DistillConfig):
            return None
        if config.distill.logprobs:
            teacher = None
        return cls(config.distill.beta, config.distill.top_k, teacher)


@dataclass(frozen=True)
class StepConfig:
    """One way to train a model on some ranks.

    options: `[parallel]`; its engine is not auto.
    dtype, master_dtype: "fp32" or "bf16", of computation and of what is kept between steps.
    on_gpu: whether the device is one; on a CPU, attention is given a dense mask, and nothing is
    asynchronous.
    logit_bytes: None where head and loss go through the tokens in chunks, as in lmforge. Other
        programs, whose published figures predictions are compared with, keep so many bytes of each
        logit, and their backward pass holds so many more.
    reduce_dtype_bytes: of a number of a gradient while FSDP reduces it.
    lora: the adapters of each block, beside which all other weights are frozen, but for the head of
    a reward model.
    loss: what the loss reads of the head. reference: what scores each batch before the policy:
        nothing, a frozen copy of the model's first weights, or the policy without its adapters.
    has_dropout: whether the model drops activations.
    distillation: what a student learns from, instead of the text alone.
    """

    model: ModelConfig
    options: ParallelOptions
    world_size: int
    gpus_per_host: int
    micro_batch_size: int
    accumulation: int
    sequence_length: int
    dtype: str = "bf16"
    master_dtype: str = "fp32"
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    compiled: bool = True
    float8: bool = False
    on_gpu: bool = True
    logit_bytes: tuple[int, int] | None = None
    reduce_dtype_bytes: int = 4
    lora: LoraConfig | None = None
    loss: LossKind = "tokens"
    reference: Literal["none", "copy", "policy"] = "none"
    has_dropout: bool = False
    distillation: Distillation | None = None

    def describe(self) -> str:
        """A phrase with the options that a search chooses."""
        options = self.options
        words = [str(options.engine)]
        if self.is_fsdp and options.sharding:
            words.append(options.sharding)
        degrees = {
            "tensor": self.tensor,
            "context": self.context,
            "pipeline": self.pipeline,
            "experts": self.expert,
        }
        words += [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
        words += [
            f"checkpointing {options.activation_checkpointing}",
            f"micro-batch {self.micro_batch_size}",
        ]
        if options.cpu_offload:
            words.append("offload")
        if options.activation_offload:
            words.append("activations offloaded")
        if self.float8:
            words.append("float8")
        words += [f"{name} {value}" for name, value in self.bits.items()]
        return ", ".join(words)

    @property
    def bits(self) -> dict[str, str]:
        """The options that store optimizer states or frozen matrices in few bits."""
        chosen: dict[str, str] = {}
        if self.optimizer.state_dtype == "8bit":
            chosen["optimizer.state_dtype"] = "8bit"
        if self.lora is not None and self.lora.base_dtype:
            chosen["lora.base_dtype"] = self.lora.base_dtype
        return chosen

    def with_options(self, **changes: Any) -> "StepConfig":
        return replace(self, options=self.options.model_copy(update=changes))

    def with_micro_batch_size(self, size: int) -> "StepConfig":
        """The same batch per rank, in micro-batches of this size, which divides it."""
        return replace(
            self,
            micro_batch_size=size,
            accumulation=self.micro_batch_size * self.accumulation // size,
        )

    def fully_sharded(self) -> "StepConfig":
        """The same, with one copy of the model sharded over all ranks."""
        sharding = "full-shard" if self.options.sharding else None
        return self.with_options(
            engine=self.options.engine if self.is_fsdp else "fsdp2",
            sharding=sharding,
            shard_degree=None,
        )

    @cached_property
    def dims(self) -> ParallelDims:
        return parallel_dims(
            self.options, self.world_size, min(self.gpus_per_host, self.world_size)
        )

    @cached_property
    def teacher(self) -> "StepConfig | None":
        """The teacher of a distillation, which only scores.

        It is in the compute dtype, and distributed like the student.
        """
        if self.distillation is None or self.distillation.teacher is None:
            return None
        plain = self.with_options(activation_checkpointing="none", activation_offload=False)
        return replace(
            plain,
            model=self.distillation.teacher,
            master_dtype=self.dtype,
            distillation=None,
            lora=None,
            has_dropout=False,
        )

    @property
    def distilled_bytes(self) -> float:
        """Bytes of what a rank gets from the teacher for all tokens of a step.

        That is the teacher's hidden states, or its likeliest tokens in fp32.
        """
        if self.distillation is None:
            return 0.0
        teacher = self.distillation.teacher
        if teacher is None:
            per_token = (2 * self.distillation.stored_ids + 1) * 4
        else:
            per_token = teacher.hidden_size * self.dtype_bytes
        return float(self.accumulation * self.micro_batch_size * self.sequence_length * per_token)

    @property
    def checkpointing(self) -> NoCheckpointing:
        return CHECKPOINTING_MODES[self.options.activation_checkpointing]

    @property
    def offloads_activations(self) -> bool:
        """True where activations leave the device: on a CPU its memory is the host's."""
        return self.options.activation_offload and self.on_gpu

    def traced_model(self, block: Block) -> TracedModel:
        """The part of the model on a rank, with one `block` of its kinds.

        Its trace serves every depth.
        """
        return _rank_part(self.model, self.dtype, self.lora, self.tensor, block)

    @property
    def trains_all(self) -> bool:
        return self.lora is None

    @property
    def trains_head(self) -> bool:
        return self.trains_all or self.model.reward

    @property
    def parameters(self) -> ParameterCounts:
        """The parameters of the whole model, adapters included."""
        return count_parameters(self.model, self.lora)

    @property
    def is_fsdp(self) -> bool:
        return self.options.engine in ("fsdp1", "fsdp2")

    @cached_property
    def shards(self) -> int:
        """The number of ranks over which FSDP shards a copy of the part of the model on a rank."""
        return self.dims.fsdp_degree if self.is_fsdp else 1

    @property
    def replicas(self) -> int:
        """Ranks that hold the same part of the model, and sum their gradients."""
        if self.is_fsdp:
            return self.dims.replicate_degree
        return self.world_size

    @property
    def tensor(self) -> int:
        return self.options.tensor_parallel_degree

    @property
    def context(self) -> int:
        return self.options.context_parallel_degree

    @property
    def pipeline(self) -> int:
        return self.options.pipeline_parallel_degree

    @property
    def expert(self) -> int:
        """The number of ranks that expert parallelism splits experts over."""
        return self.options.expert_parallel_degree

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def tokens(self) -> int:
        """The tokens of a micro-batch on a rank.

        With tensor parallelism all ranks of its group have the same.
        """
        return self.micro_batch_size * self.sequence_length // self.context

    @property
    def tokens_per_step(self) -> int:
        """The tokens of a step of all ranks."""
        data_parallel = self.world_size // self.options.model_parallel_size
        return data_parallel * self.accumulation * self.micro_batch_size * self.sequence_length


@cache  # a search asks often
def _rank_part(
    model: ModelConfig, dtype: str, lora: LoraConfig | None, tensor: int, block: Block
) -> TracedModel:
    vocabulary = tensor if model.vocab_size % tensor == 0 else 1
    one = model.with_layers(1, like=model.blocks.index(block))
    return TracedModel(one, DTYPES[dtype], lora, tensor, vocabulary)
