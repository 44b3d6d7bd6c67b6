"""Advice after memory ran out: how much was requested, how much there was, and what would fit.

The prediction of `lmforge plan` (lab/plan/prediction) is compared with the memory that was free
before this process built anything. The failure is itself a measurement: where the prediction says
that the run should have fitted, all predictions are scaled up by the same factor, until it does
not.
"""

import traceback
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch

from lmforge.core.errors import UserError
from lmforge.core.options.stage import StageConfig
from lmforge.core.parallel.precision import choose_compile
from lmforge.core.stages.run_memory import RunMemory
from lmforge.lab.plan.planning import RunPrediction, build_step_config, predict_run
from lmforge.lab.plan.prediction.predict import (
    CONTEXT_BYTES,
    MEMORY_INTERVAL,
    OVERHEAD,
    peak_memory,
)
from lmforge.lab.plan.prediction.search import suggest_what_fits
from lmforge.lab.plan.prediction.step_config import StepConfig

# The safety factor of predictions; that of activations on a CPU is the mode's of activation
# checkpointing.
MARGIN = MEMORY_INTERVAL[1]
# Kinds of memory in a prediction that depend on the micro-batch.
ACTIVATION_KINDS = (
    "activations",
    "activations of other micro-batches",
    "recomputed",
    "temporary",
    "loss",
)


@dataclass(frozen=True)
class MemoryEstimator:
    """Estimates the memory that a run needs on each rank.

    step_config: of the recipe. resident_bytes: of this process, before it builds anything.
    """

    step_config: StepConfig
    resident_bytes: int = 0

    @classmethod
    def of_run(cls, run: RunMemory) -> Self:
        """The estimator of a run."""
        config = run.config
        compiled, _ = choose_compile(config, run.device, config.train.steps - run.step)
        step_config = build_step_config(
            config,
            run.model_config,
            run.plan,
            world_size=run.rank_info.world_size,
            gpus_per_host=run.rank_info.local_world_size,
            on_gpu=run.device.type == "cuda",
            dtype=config.train.dtype,
            compiled=compiled,
            teacher=run.teacher,
        )
        return cls(step_config, run.resident_bytes)

    def required_bytes(self, step_config: StepConfig) -> float:
        """All memory that a rank needs for a step, including margins."""
        margin = MARGIN if step_config.on_gpu else step_config.checkpointing.host_margin
        return sum(
            count * (margin if name in ACTIVATION_KINDS else MARGIN)
            for name, count in peak_memory(step_config).items()
            if name != OVERHEAD
        )

    @cached_property
    def overhead_bytes(self) -> float:
        """Bytes that any training process needs.

        The CUDA context does not count, since it exists before the model.
        """
        overhead = peak_memory(self.step_config)[OVERHEAD]
        if self.step_config.on_gpu:
            overhead -= CONTEXT_BYTES
        return overhead

    def predict_run(self, config: StageConfig, device: torch.device) -> RunPrediction | str:
        """The prediction for this run, or the reason why there is none.

        The lack of one does not end the run.
        """
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        try:
            most = self.required_bytes(self.step_config) + self.overhead_bytes
            return predict_run(
                self.step_config, config, name, (self.resident_bytes, self.resident_bytes + most)
            )
        except UserError as problem:
            return str(problem)
        except Exception as problem:
            return (
                "failed, and the run continues:"
                f" {traceback.format_exception_only(problem)[-1].strip()}"
            )

    def suggest_what_fits(self, available_bytes: float) -> str:
        """Advice after the run did not fit into `available_bytes` on each rank.

        It names only what fits by estimate.
        """
        step_config = self.step_config
        try:
            # The run did not fit, even if the prediction says so.
            scale = max(
                1.0, (available_bytes - self.overhead_bytes) / self.required_bytes(step_config)
            )
            return suggest_what_fits(
                step_config,
                lambda other: self.required_bytes(other) * scale + self.overhead_bytes,
                available_bytes,
            )
        except UserError as problem:
            return f"there is no estimate of what would fit: {problem}"


def suggest_for_run(run: RunMemory, available_bytes: float) -> str:
    """Advice after a run did not fit into `available_bytes` on each rank."""
    return MemoryEstimator.of_run(run).suggest_what_fits(available_bytes)
