"""Where a run resumes from: the newest checkpoint that can be used, and its weights."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from lmforge.core import checkpoint
from lmforge.core.checkpoint import CorruptCheckpoint, Manifest
from lmforge.core.errors import UserError
from lmforge.core.optim.optimizer import named_optimizer_state
from lmforge.core.parallel.parallel_model import ParallelModel
from lmforge.core.records.runs import Run

NO_USABLE_CHECKPOINT = "{run}: none of its checkpoints can be used ({reason}); restore one, or begin again with --run.overwrite"


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run resumes from, None for a new run, and the lines to log about it."""

    checkpoint_folder: Path | None = None
    manifest: Manifest | None = None
    messages: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Steps done at this point."""
        return self.manifest.step if self.manifest else 0


def find_resume_point(run: Run, steps: int, before_step: int | None = None) -> ResumePoint:
    """The newest checkpoint (of a step below `before_step`) from which a run of `steps` steps can
    resume. Tensors are not read.

    Raises UserError where there are checkpoints and none of them can be used.
    """
    skipped: list[str] = []
    for folder, manifest in checkpoint.candidates(run, skipped, before_step):
        if "optimizer" in manifest.contents or manifest.step >= steps:
            return ResumePoint(folder, manifest, (*skipped, f"continuing {run.path} from step {manifest.step}"))
        skipped.append(f"{folder}: holds the model alone; skipped")
    if run.checkpoint_steps() and skipped:
        raise UserError(NO_USABLE_CHECKPOINT.format(run=run.path, reason=skipped[0].removesuffix("; skipped")))
    begins = f"{run.path}: has no checkpoint yet; it begins at step 0"
    return ResumePoint(messages=(*skipped, begins) if run.exists() else ())


def verify_finished(run: Run, point: ResumePoint, steps: int) -> ResumePoint:
    """Check every byte of the checkpoint of a run that has no steps left.

    Returns an older point where it is corrupt.
    """
    assert point.checkpoint_folder is not None
    try:
        checkpoint.verify(point.checkpoint_folder)
        return point
    except CorruptCheckpoint as reason:
        older = find_resume_point(run, steps, before_step=point.step)
        return replace(older, messages=(f"{point.checkpoint_folder}: {reason}; skipped", *older.messages))


def load_resume_point(
    run: Run,
    steps: int,
    point: ResumePoint,
    parallel_model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    log: Callable[[str], None],
) -> ResumePoint:
    """Load model and optimizer from a checkpoint, or from the newest one before it that is not
    corrupt.

    Every rank calls it. Returns the point that was loaded. Raises UserError where no checkpoint can
    be used.
    """
    dist_ctx = parallel_model.dist_ctx
    while True:
        assert point.checkpoint_folder is not None
        assert point.manifest is not None
        state = parallel_model.state_dict(optimizer, named_optimizer_state)
        if "balance" not in point.manifest.contents:  # the run did not need it before: as at step 0
            state.pop("balance", None)
        try:
            with dist_ctx.raise_on_all():
                checkpoint.load(point.checkpoint_folder, state)
                # Weights, order, dropout and samples are functions of seeds and indices; lmforge
                # never uses torch's generator. Its state is restored for other code in this
                # process.
                checkpoint.set_rng_state(point.manifest.rng)
            break
        except CorruptCheckpoint as error:
            reason = f"{point.checkpoint_folder}: {error}"
            log(f"{reason}; skipped")
            point = dist_ctx.decide_on_rank0(partial(find_resume_point, run, steps, point.step))
            if point.manifest is None:
                raise UserError(NO_USABLE_CHECKPOINT.format(run=run.path, reason=reason)) from None
            for line in point.messages:
                log(line)
    parallel_model.load_state_dict(optimizer, state)
    return point


def last_checkpoint_message(run: Run) -> str:
    """Where the newest checkpoint is, or why that is not known."""
    try:
        steps = run.checkpoint_steps()
    except UserError as problem:
        return str(problem)
    return f"last checkpoint: {run.checkpoint_path(steps[-1])}" if steps else "no checkpoint had been saved"
