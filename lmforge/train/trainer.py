"""Everything that the loop drives, as one object. stages/setup.py builds it; loop.py drives it.

What is known before the model is built is in inputs.py.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lmforge.atomic_files import without_non_finite
from lmforge.checkpoint import AsyncCheckpointer, StateDict, get_rng_state
from lmforge.data.batch import Batch
from lmforge.errors import RunFailed
from lmforge.objectives.objective import Objective
from lmforge.parallel.parallel_model import ParallelModel
from lmforge.report.page import ReportThread
from lmforge.train.bad_steps import BadStep, BadStepDetector
from lmforge.train.checkpoint_schedule import CheckpointSchedule
from lmforge.train.inputs import ResumePoint, RunContext, RunInputs
from lmforge.train.metrics import MetricsFile, PredictionCheck
from lmforge.train.optimizers.optimizer import named_optimizer_state
from lmforge.train.optimizers.schedules import learning_rate

# After the last step there is no later step at which to retry.
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
        """What a batch was made of: fields for the file of a bad step, and text for the message where the file is not
        enough."""

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors that a checkpoint has to keep, the same on all ranks; empty where batches depend only on their index."""

    def close(self) -> None:
        """Called when training ends."""


@dataclass
class Trainer:
    """What the loop drives.

    `resume_point` says where training starts. `flops_per_token` (by the sequence length) and `peak_flops` (of a rank;
    None: unknown) give the MFU.
    `compiled`: whether blocks are to be compiled. `metrics_file` and `prediction_check` are None on all ranks but 0.
    `batch_source` is set last: references and rollouts need the model.
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
    metrics_file: MetricsFile | None
    flops_per_token: Callable[[int], float]
    peak_flops: float | None
    compiled: bool = False
    prediction_check: PredictionCheck | None = None
    checkpoint_schedule: CheckpointSchedule = field(init=False)
    batch_source: BatchSource = field(init=False)

    def __post_init__(self) -> None:
        is_rank0 = self.ctx.dist_ctx.is_rank0
        self.checkpoint_schedule = CheckpointSchedule(self.checkpointer, self.ctx.config, is_rank0)
        self._report = ReportThread(self.ctx.run)

    @property
    def start_step(self) -> int:
        """Steps that were done before this attempt."""
        return self.resume_point.step

    def learning_rate(self, step: int) -> float:
        config = self.ctx.config
        return learning_rate(step, config.train.steps, config.schedule, config.optimizer.lr)

    def tokens_until(self, step: int) -> int:
        """The tokens read in this many steps, including padding and the batches skipped by a rollback."""
        return self.inputs.train_dataset.tokens_until(self._consumed_sequences(step))

    def _consumed_sequences(self, step: int) -> int:
        return (step + self.bad_step_detector.batch_offset) * self.inputs.batch_plan.global_batch_size

    def log(self, record: dict[str, Any]) -> None:
        """Write a record to metrics.jsonl and to the console, and the report when it is due."""
        if self.metrics_file is not None:
            self.metrics_file.write(record)
            self._report.write_if_due()
        self.ctx.console.log_metrics(record)
        self.ctx.trackers.report(record)

    def report_bad_step(self, bad_step: BadStep) -> None:
        """Warn that a step was skipped, and write which samples or completions it used, for `lmforge show data`."""
        if not self.ctx.dist_ctx.is_rank0:
            return
        batch, words = self.batch_source.describe(bad_step.batch_index)
        path = bad_step.write(self.ctx.run.path / "bad", batch)
        words = words or f"its samples are named in {path}"
        self.ctx.events.add("bad step", bad_step.step, reason=bad_step.reason)
        self.ctx.console.warn(f"step {bad_step.step}: {bad_step.reason}; not used, and {words}")

    def save(self, step: int, metrics: dict[str, Any], kept: bool, stopping: bool) -> None:
        """Save a checkpoint of `step`; where the run is `stopping`, wait until it is written.

        Raises RunFailed where the last checkpoint of a run cannot be written.
        """
        options, detector, dataset = self.ctx.config.checkpoint, self.bad_step_detector, self.inputs.train_dataset
        consumed = self._consumed_sequences(step)
        for attempt in range(FINAL_SAVE_ATTEMPTS):
            if attempt:
                time.sleep(min(FINAL_RETRY_SECONDS, options.retry_seconds))
            self.checkpoint_schedule.record_save(kept)
            self.ctx.events.add("checkpoint", step, kept=kept)
            self.checkpointer.save(
                step,
                self._state_dict(model_only=options.last_save_model_only and step == self.ctx.config.train.steps),
                metrics=without_non_finite(metrics),
                kept=kept,
                consumed_sequences=consumed,
                plan_hash=dataset.plan_hash_at(consumed),
                data_plan=dataset.plan_at(consumed),
                rng=get_rng_state(),
                bad_step_detector=detector.state_dict(),
            )
            if not stopping:
                return
            self.checkpointer.wait()
            if not self.checkpointer.consecutive_failures:
                return
        raise RunFailed(f"step {step}: {self.checkpointer.describe_failures()}")

    def report_saved(self) -> None:
        """Call the callbacks of checkpoints that are complete since the last call. Every rank calls it, at the same step."""
        ctx = self.ctx
        if ctx.callbacks.has("on_checkpoint_saved"):
            for step in ctx.dist_ctx.broadcast(self.checkpointer.take_saved_steps()):
                ctx.callbacks.call("on_checkpoint_saved", ctx, step, ctx.run.checkpoint_path(step))

    def _state_dict(self, model_only: bool) -> StateDict:
        state: StateDict = self.parallel_model.state_dict(self.optimizer, named_optimizer_state)
        if model_only:
            return {"model": state["model"]}
        rollouts = self.batch_source.state_dict()
        return {**state, "rollouts": rollouts} if rollouts else state

    def close(self) -> None:
        """Finish the save in flight, and close what was opened."""
        self.ctx.console.stop_progress()
        self.checkpointer.close()
        if hasattr(self, "batch_source"):
            self.batch_source.close()
        if self.metrics_file is not None:
            self.metrics_file.close()
        self._report.close()
