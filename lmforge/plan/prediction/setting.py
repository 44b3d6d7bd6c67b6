"""What decides the memory and the time of a step: model, batch, options and ranks, as plain values."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from lmforge.config.sections import OptimizerOptions, ParallelOptions
from lmforge.model.config import ModelConfig
from lmforge.parallel.dims import ParallelDims, parallel_dims
from lmforge.plan.memory import DTYPE_BYTES


@dataclass(frozen=True)
class Setting:
    """One way to train a model on some ranks.

    options: `[parallel]`; its engine is not auto.
    dtype, master_dtype: "fp32" or "bf16", of computation and of what is kept between steps.
    on_gpu: whether the device is one; on a CPU, attention is given a dense mask, and nothing is compiled or asynchronous.
    chunked_loss: whether head and cross-entropy go through the tokens in chunks. lmforge always does; other programs, whose
        published figures predictions are compared with, keep all logits.
    reduce_dtype_bytes: of a number of a gradient while FSDP reduces it.
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
    chunked_loss: bool = True
    reduce_dtype_bytes: int = 4

    def with_options(self, **changes: Any) -> "Setting":
        return replace(self, options=self.options.model_copy(update=changes))

    @cached_property
    def dims(self) -> ParallelDims:
        return parallel_dims(self.options, self.world_size, min(self.gpus_per_host, self.world_size))

    @property
    def is_fsdp(self) -> bool:
        return self.options.engine in ("fsdp1", "fsdp2")

    @cached_property
    def shards(self) -> int:
        """Ranks that share a copy of what tensor and pipeline parallelism leave of the model."""
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
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def tokens(self) -> int:
        """Of a micro-batch on a rank; with tensor parallelism all ranks of its group have the same."""
        return self.micro_batch_size * self.sequence_length // self.context

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks."""
        data_parallel = self.world_size // self.options.model_parallel_size
        return data_parallel * self.accumulation * self.micro_batch_size * self.sequence_length
