"""What a run does about its bad steps: names the samples of each, and after some in a row goes back to a checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lmforge.atomic_files import atomic_write_json
from lmforge.checkpoint import AsyncCheckpointer
from lmforge.config.align import AlignConfig
from lmforge.config.stage import StageConfig
from lmforge.config.tuning import TunedConfig
from lmforge.errors import RunFailed
from lmforge.parallel.parallel_model import ParallelModel
from lmforge.runs import Run, remove_checkpoint
from lmforge.stages.completions import locate_completions
from lmforge.stages.inputs import RunInputs
from lmforge.train.bad_steps import BadStep, BadStepDetector
from lmforge.train.resume import find_resume_point, load_resume_point


@dataclass(frozen=True)
class Rollback:
    """Every rank has one, and calls `go_back` at the same step. `say` gets a line for people, on the first rank."""

    run: Run
    config: StageConfig
    inputs: RunInputs
    parallel_model: ParallelModel
    optimizer: torch.optim.Optimizer
    bad_step_detector: BadStepDetector
    checkpointer: AsyncCheckpointer
    warn: Callable[[str], None]

    def report_bad_step(self, bad_step: BadStep) -> None:
        """Say that a step was left out, and record which samples or answers it was given, for `lmforge show data` to open."""
        if not self.parallel_model.dist_ctx.is_rank0:
            return
        folder = self.run.path / "bad"
        folder.mkdir(exist_ok=True)
        path = folder / f"step-{bad_step.step:08d}-batch-{bad_step.batch_index}.json"
        record = {
            "step": bad_step.step,
            "reason": bad_step.reason,
            "loss": repr(bad_step.loss),
            "grad_norm": repr(bad_step.grad_norm),
        }
        if isinstance(self.config, AlignConfig) and self.config.kind == "prompts":
            place = locate_completions(bad_step.batch_index, self.config.rollout, self.parallel_model.dist_ctx.world_size)
            record |= place
            told = "its answers were not written (rollout.log_completions_every)"
            if place["answers"] is not None:
                told = f"its answers are in {self.run.path / place['answers']}"
        else:
            record |= self._sample_record(bad_step.batch_index)
            told = f"its samples are named in {path}"
        atomic_write_json(path, record)
        self.warn(f"step {bad_step.step}: {bad_step.reason}; not used, and {told}")

    def _sample_record(self, batch_index: int) -> dict[str, Any]:
        rows = self.inputs.batch_plan.rows
        record = {
            "samples": [batch_index * rows, (batch_index + 1) * rows],
            "data": self.inputs.data_source,
            "sequence_length": self.config.data.sequence_length,
            "seed": self.config.train.seed,
            "plan_hash": self.inputs.train_dataset.plan_hash,
        }
        if isinstance(self.config, TunedConfig):
            record["fit"] = self.config.data.packing == "best-fit"
        return record

    def roll_back(self, max_step: int) -> int:
        """Load the newest checkpoint of `done` steps or fewer, and drop those after it. Returns its step.

        Raises RunFailed where there is none, or the run has gone back too often.
        """
        run, guard, ranks, steps = self.run, self.bad_step_detector, self.parallel_model.dist_ctx, self.config.train.steps
        cause = f"step {max_step + guard.consecutive_bad_steps}: {guard.consecutive_bad_steps} bad steps in a row"
        if guard.rollbacks >= self.config.faults.max_rollbacks:
            times = f"after going back {guard.rollbacks} times" if guard.rollbacks else "and faults.max_rollbacks = 0"
            raise RunFailed(f"{cause}, {times}; a lower optimizer.lr or a longer warm-up may help")
        self.checkpointer.wait()
        found = ranks.decide_on_rank0(partial(find_resume_point, run, steps, max_step + 1))
        if found.manifest is None:
            raise RunFailed(f"{cause}, and no checkpoint from before them to go back to")
        found = load_resume_point(run, found, steps, self.parallel_model, self.optimizer, self.warn)
        assert found.manifest is not None
        back = found.manifest.step
        # They lie on a road that was left: whoever resumed from them would be on it again.
        for later in [step for step in run.checkpoint_steps() if step > back] if ranks.is_rank0 else []:
            try:
                remove_checkpoint(run.checkpoint_path(later))
            except Exception as problem:
                self.warn(f"{run.checkpoint_path(later)}: could not be deleted: {problem}")
        guard.load_losses(found.manifest.bad_step_detector)
        self.warn(f"{cause}: back to step {back}, and on with the batches after them")
        return back
