"""Everything that the loop drives, as one object. stages/setup.py builds it; loop.py drives it."""

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lmforge import checkpoint
from lmforge.checkpoint import AsyncCheckpointer
from lmforge.checkpoint.async_save import StateDict
from lmforge.data.batch import Batch
from lmforge.errors import RunFailed
from lmforge.objectives.objective import Objective
from lmforge.parallel.parallel_model import ParallelModel
from lmforge.train.bad_steps import BadStepDetector
from lmforge.train.checkpoint_schedule import CheckpointSchedule
from lmforge.train.context import RunContext, RunInputs
from lmforge.train.metrics import MetricsFile, without_non_finite
from lmforge.train.optimizer import learning_rate, named_optimizer_state
from lmforge.train.resume import ResumePoint

# After the last step there is no later one to save again at.
FINAL_SAVE_ATTEMPTS = 3
FINAL_RETRY_SECONDS = 5.0


class BatchSource(Protocol):
    """Where batches come from. Every rank has one, and calls each method for the same steps."""

    @property
    def data_wait_seconds(self) -> float:
        """Seconds that callers of `batches` have waited, in total."""

    def batches(self, batch_index: int) -> list[Batch]:
        """This rank's micro-batches of a global batch, on the device."""

    def validate(self, step: int) -> dict[str, float]:
        """Metrics on validation data, by the names they have in metrics.jsonl; empty where there is none."""

    def describe(self, batch_index: int) -> tuple[dict[str, Any], str | None]:
        """What a batch was made of: fields for the file of a bad step, and a clause for people where the file is not enough."""

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors that a checkpoint has to keep, the same on all ranks; empty where batches follow from their numbers."""

    def close(self) -> None:
        """Called when training ends."""


@dataclass
class Trainer:
    """What the loop drives, in the order in which it is built.

    `resume_point` says where training starts. `flops_per_token` and `peak_flops` (of a rank; None: unknown) give the MFU.
    `metrics_file` is None on all ranks but 0. `batch_source` is set last: references and rollouts need the model.
    """

    ctx: RunContext
    inputs: RunInputs
    resume_point: ResumePoint
    objective: Objective
    dtype: torch.dtype
    parallel_model: ParallelModel
    optimizer: torch.optim.Optimizer
    bad_step_detector: BadStepDetector
    checkpointer: AsyncCheckpointer
    checkpoint_schedule: CheckpointSchedule
    metrics_file: MetricsFile | None
    flops_per_token: float
    peak_flops: float | None
    batch_source: BatchSource = field(init=False)

    @property
    def start_step(self) -> int:
        """Steps that were done before this attempt."""
        return self.resume_point.step

    def learning_rate(self, step: int) -> float:
        config = self.ctx.config
        return learning_rate(step, config.train.steps, config.schedule, config.optimizer.lr)

    def log(self, record: dict[str, Any]) -> None:
        """Write a record to metrics.jsonl and to the console."""
        if self.metrics_file is not None:
            self.metrics_file.write(record)
        self.ctx.console.log_metrics(record)

    def save(self, step: int, metrics: dict[str, Any], kept: bool, stopping: bool) -> None:
        """Save a checkpoint of `step`; where the run is `stopping`, wait until it is written.

        Raises RunFailed where the last checkpoint of a run cannot be written.
        """
        self._save(step, metrics, kept)
        if not stopping:
            return
        self.checkpointer.wait()
        attempts = 1
        while self.checkpointer.consecutive_failures:
            if attempts == FINAL_SAVE_ATTEMPTS:
                raise RunFailed(f"step {step}: could not be saved in {attempts} tries: {self.checkpointer.last_error}")
            time.sleep(min(FINAL_RETRY_SECONDS, self.ctx.config.checkpoint.retry_seconds))
            attempts += 1
            self._save(step, metrics, kept)
            self.checkpointer.wait()

    def _save(self, step: int, metrics: dict[str, Any], kept: bool) -> None:
        self.checkpoint_schedule.record_save(kept)
        config = self.ctx.config
        self.checkpointer.save(
            step,
            self._state_dict(model_only=config.checkpoint.last_save_model_only and step == config.train.steps),
            metrics=without_non_finite(metrics),
            kept=kept,
            consumed_sequences=(step + self.bad_step_detector.skipped_batches) * self.inputs.batch_plan.global_batch_size,
            rng=checkpoint.get_rng_state(),
            bad_step_detector=self.bad_step_detector.state_dict(),
        )

    def _state_dict(self, model_only: bool) -> StateDict:
        state: StateDict = self.parallel_model.state_dict(self.optimizer, named_optimizer_state)
        if model_only:
            return {"model": state["model"]}
        rollouts = self.batch_source.state_dict()
        return {**state, "rollouts": rollouts} if rollouts else state

    def close(self) -> None:
        """Finish the save in flight, and close what was opened."""
        self.checkpointer.drain()
        if hasattr(self, "batch_source"):
            self.batch_source.close()
        if self.metrics_file is not None:
            self.metrics_file.close()
