"""When memory runs out: how much was requested, how much there was, and what would have fitted.

The prediction of `lmforge plan` (lab/plan/prediction) is compared with the memory that was free before this process built
anything. The failure is itself a measurement: where the prediction says that the run should have fitted, all predictions are
scaled up by the same factor, until it does not.
"""

import traceback
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch

from lmforge.core.data.batch import BATCH_BYTES_PER_TOKEN
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.memory import check_fits, peak_resident_bytes
from lmforge.core.errors import UserError
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.state_bytes import DTYPE_BYTES, ParameterCounts, checkpoint_bytes
from lmforge.core.options.batch_plan import BatchPlan
from lmforge.core.options.stage import StageConfig
from lmforge.core.parallel.precision import choose_compile
from lmforge.core.stages.parameter_counts import count_parameters, get_lora_config
from lmforge.lab.plan.planning import RunPrediction, build_step_config, predict_run
from lmforge.lab.plan.prediction.predict import CONTEXT_BYTES, MEMORY_INTERVAL, OVERHEAD, peak_memory
from lmforge.lab.plan.prediction.search import suggest_what_fits
from lmforge.lab.plan.prediction.step_config import StepConfig

# The safety factor of predictions; that of activations on a CPU is the mode's of activation checkpointing.
MARGIN = MEMORY_INTERVAL[1]
# Kinds of memory in a prediction that depend on the micro-batch.
ACTIVATION_KINDS = ("activations", "activations of other micro-batches", "recomputed", "temporary", "loss")


@dataclass(frozen=True)
class MemoryEstimator:
    """What a run needs on each rank. step_config: of the recipe. counts: parameters of the trained model, a wrapped one too.
    resident_bytes: of this process, before it builds anything.
    """

    step_config: StepConfig
    plan: BatchPlan
    counts: ParameterCounts
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
        """The estimator of a recipe on these ranks, for a run that continues from `step`, beside its teacher."""
        on_gpu = dist_ctx.device.type == "cuda"
        compiled, _ = choose_compile(config, dist_ctx.device, config.train.steps - step)
        step_config = build_step_config(
            config,
            model_config,
            plan,
            world_size=dist_ctx.world_size,
            gpus_per_host=dist_ctx.rank_info.local_world_size,
            on_gpu=on_gpu,
            dtype=config.train.dtype,
            compiled=compiled,
            teacher=teacher,
        )
        return cls(step_config, plan, count_parameters(model_config, get_lora_config(config)), peak_resident_bytes())

    def required_bytes(self, step_config: StepConfig) -> float:
        """All memory that a rank needs for a step, including margins."""
        margin = MARGIN if step_config.on_gpu else step_config.checkpointing.host_margin
        kinds = {name: count for name, count in peak_memory(step_config).items() if name != OVERHEAD}
        return sum(count * (margin if name in ACTIVATION_KINDS else MARGIN) for name, count in kinds.items())

    @cached_property
    def overhead_bytes(self) -> float:
        """Bytes that any training process needs, without the CUDA context, which exists before the model."""
        return peak_memory(self.step_config)[OVERHEAD] - (CONTEXT_BYTES if self.step_config.on_gpu else 0)

    def predict_run(self, config: StageConfig, device: torch.device) -> RunPrediction | str:
        """The estimate of what this run will need, or the reason why there is none, which does not end the run."""
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        try:
            most = self.required_bytes(self.step_config) + self.overhead_bytes
            return predict_run(self.step_config, config, name, (self.resident_bytes, self.resident_bytes + most))
        except UserError as problem:
            return str(problem)
        except Exception as problem:
            return f"failed, and the run continues: {traceback.format_exception_only(problem)[-1].strip()}"

    def least_state_bytes(self) -> float:
        """Bytes of a rank that do not depend on the batch: weights, optimizer states, gradients, and weights of a step."""
        step_config, counts = self.step_config, self.counts
        master, options = DTYPE_BYTES[step_config.master_dtype], step_config.options
        state_bytes = checkpoint_bytes(step_config.optimizer, step_config.master_dtype, counts)
        state_bytes += (counts.trained + (counts.total if step_config.reference == "copy" else 0)) * master
        if step_config.teacher is not None:
            state_bytes += step_config.teacher.parameters.weight_bytes(step_config.dtype)
        if options.cpu_offload and step_config.on_gpu:
            state_bytes = 0
        working = 0
        if not step_config.is_fsdp and step_config.dtype_bytes < master:
            working = (counts.total - counts.quantized) * step_config.dtype_bytes
        return (state_bytes / step_config.shards + working) / (
            options.tensor_parallel_degree * options.pipeline_parallel_degree
        )

    def check(self, dist_ctx: DistributedContext) -> None:
        """Raise UserError, before anything is built, where the run certainly does not fit on this rank. The model's state and
        the batch are exact. A compiler keeps fewer activations than are predicted: they count only with their smallest part,
        the input of each block.
        """
        step_config, plan = self.step_config, self.plan
        hidden = (
            step_config.tokens * step_config.model.hidden_size * step_config.model.num_hidden_layers // step_config.pipeline
        )
        batch = plan.accumulation * plan.micro_batch_size * plan.sequence_length * BATCH_BYTES_PER_TOKEN
        what, ranks = "model, gradients, optimizer and activations of a rank", step_config.gpus_per_host
        least = self.least_state_bytes() + hidden * step_config.dtype_bytes
        check_fits(least, dist_ctx.device, what, self.suggest_what_fits, num_ranks=ranks)
        what = f"a batch of {plan.tokens:,} tokens"
        check_fits(batch, torch.device("cpu"), what, "use a smaller global batch", num_ranks=ranks)

    def suggest_what_fits(self, available_bytes: float) -> str:
        """Advice after the run did not fit into `available_bytes` on each rank: only what fits by estimate."""
        step_config = self.step_config
        try:
            # The run did not fit, even if the prediction says so.
            scale = max(1.0, (available_bytes - self.overhead_bytes) / self.required_bytes(step_config))
            return suggest_what_fits(
                step_config, lambda other: self.required_bytes(other) * scale + self.overhead_bytes, available_bytes
            )
        except UserError as problem:
            return f"there is no estimate of what would fit: {problem}"
