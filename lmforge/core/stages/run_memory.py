"""The memory that a run needs for certain on each rank, known before anything is built."""

from dataclasses import dataclass
from typing import Self

import torch

from lmforge.core import registry
from lmforge.core.data.batch import BATCH_BYTES_PER_TOKEN
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.memory import check_fits, peak_resident_bytes
from lmforge.core.distributed.rank_info import RankInfo
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.state_bytes import DTYPE_BYTES, checkpoint_bytes
from lmforge.core.options.batch_plan import BatchPlan
from lmforge.core.options.stage import StageConfig
from lmforge.core.parallel.dims import parallel_dims
from lmforge.core.parallel.validate import choose_engine
from lmforge.core.stages.parameter_counts import count_parameters, get_lora_config


@dataclass(frozen=True)
class RunMemory:
    """What a run is made of, as far as its memory depends on it.

    step: where it continues. teacher: of a distillation, the model that runs beside it.
    resident_bytes: of this process, before it builds anything.
    """

    config: StageConfig
    model_config: ModelConfig
    plan: BatchPlan
    rank_info: RankInfo
    device: torch.device
    step: int = 0
    teacher: ModelConfig | None = None
    resident_bytes: int = 0

    @classmethod
    def of_run(
        cls,
        config: StageConfig,
        model_config: ModelConfig,
        plan: BatchPlan,
        dist_ctx: DistributedContext,
        *,
        step: int = 0,
        teacher: ModelConfig | None = None,
    ) -> Self:
        """The memory of a recipe's run on these ranks, for a run that continues from `step`."""
        return cls(
            config,
            model_config,
            plan,
            dist_ctx.rank_info,
            dist_ctx.device,
            step,
            teacher,
            peak_resident_bytes(),
        )

    def least_state_bytes(self) -> float:
        """Bytes of a rank that do not depend on the batch: weights, optimizer states, gradients,
        and weights of a step.
        """
        config = self.config
        options = self.config.parallel
        info = self.rank_info
        counts = count_parameters(self.model_config, get_lora_config(config))
        master = DTYPE_BYTES[config.train.master_dtype]
        dtype = DTYPE_BYTES[config.train.dtype]
        state_bytes = checkpoint_bytes(config.optimizer, config.train.master_dtype, counts)
        state_bytes += (counts.trained + (counts.total if config.copies_reference else 0)) * master
        if self.teacher is not None:
            state_bytes += count_parameters(self.teacher, None).weight_bytes(config.train.dtype)
        if options.cpu_offload and self.device.type == "cuda":
            state_bytes = 0
        engine = choose_engine(options, info.world_size, self.device.type)
        shards = 1
        working = 0
        if engine in ("fsdp1", "fsdp2"):
            chosen = options.model_copy(update={"engine": engine})
            shards = parallel_dims(
                chosen, info.world_size, min(info.local_world_size, info.world_size)
            ).fsdp_degree
        elif dtype < master:
            working = (counts.total - counts.quantized) * dtype
        return (state_bytes / shards + working) / (
            options.tensor_parallel_degree * options.pipeline_parallel_degree
        )

    def check(self) -> None:
        """Raise UserError where the run certainly does not fit on this rank.

        The model's state and the batch are exact. A compiler keeps fewer activations than are
        predicted: they count only with their smallest part, the input of each block.
        """
        options = self.config.parallel
        plan = self.plan
        model = self.model_config
        tokens = plan.micro_batch_size * plan.sequence_length // options.context_parallel_degree
        hidden = (
            tokens * model.hidden_size * model.num_hidden_layers // options.pipeline_parallel_degree
        )
        batch = (
            plan.accumulation * plan.micro_batch_size * plan.sequence_length * BATCH_BYTES_PER_TOKEN
        )
        least = self.least_state_bytes() + hidden * DTYPE_BYTES[self.config.train.dtype]
        what = "model, gradients, optimizer and activations of a rank"
        ranks = self.rank_info.local_world_size
        check_fits(least, self.device, what, self.suggest_what_fits, num_ranks=ranks)
        what = f"a batch of {plan.tokens:,} tokens"
        check_fits(batch, torch.device("cpu"), what, "use a smaller global batch", num_ranks=ranks)

    def suggest_what_fits(self, available_bytes: float) -> str:
        """Advice after the run did not fit into so many bytes on each rank: only what fits by
        estimate.
        """
        return str(registry.get("memory_advice", "search").build(self, available_bytes))
