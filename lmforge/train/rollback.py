"""What a run does about bad steps: it records which samples each one used, and rolls back after several in a row."""

from functools import partial

from lmforge.atomic_files import atomic_write_json
from lmforge.errors import RunFailed
from lmforge.runs import remove_checkpoint
from lmforge.train.bad_steps import BadStep
from lmforge.train.resume import find_resume_point, load_resume_point
from lmforge.train.trainer import Trainer


def report_bad_step(trainer: Trainer, bad_step: BadStep) -> None:
    """Warn that a step was skipped, and write which samples or completions it used, for `lmforge show data`."""
    if not trainer.ctx.dist_ctx.is_rank0:
        return
    folder = trainer.ctx.run.path / "bad"
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{bad_step.step:08d}-batch-{bad_step.batch_index}.json"
    record = {
        "step": bad_step.step,
        "reason": bad_step.reason,
        "loss": repr(bad_step.loss),
        "grad_norm": repr(bad_step.grad_norm),
    }
    batch, words = trainer.batch_source.describe(bad_step.batch_index)
    atomic_write_json(path, record | batch)
    words = words or f"its samples are named in {path}"
    trainer.ctx.console.warn(f"step {bad_step.step}: {bad_step.reason}; not used, and {words}")


def roll_back(trainer: Trainer, last_bad_step: BadStep) -> int:
    """Load the newest checkpoint from before the bad steps in a row, and delete those after it. Returns its step.

    Training goes on with the batch after the last bad one. Every rank calls it at the same step. Raises RunFailed where
    there is no such checkpoint, or the run has rolled back too often.
    """
    ctx, detector, checkpointer = trainer.ctx, trainer.bad_step_detector, trainer.checkpointer
    cause = f"step {last_bad_step.step}: {detector.consecutive_bad_steps} bad steps in a row"
    if detector.rollbacks >= ctx.config.faults.max_rollbacks:
        times = f"after {detector.rollbacks} rollbacks" if detector.rollbacks else "and faults.max_rollbacks = 0"
        raise RunFailed(f"{cause}, {times}; a lower optimizer.lr or a longer warm-up may help")
    checkpointer.wait()
    first_bad_step = max(0, last_bad_step.step - detector.consecutive_bad_steps) + 1
    point = ctx.dist_ctx.decide_on_rank0(partial(find_resume_point, ctx.run, ctx.config.train.steps, first_bad_step))
    if point.manifest is None:
        raise RunFailed(f"{cause}, and no checkpoint from before them to roll back to")
    point = load_resume_point(ctx, point, trainer.parallel_model, trainer.optimizer)
    assert point.manifest is not None
    # A run that resumed from a later checkpoint would be back on the trajectory that went wrong.
    for later in [step for step in ctx.run.checkpoint_steps() if step > point.step] if ctx.dist_ctx.is_rank0 else []:
        try:
            remove_checkpoint(ctx.run.checkpoint_path(later))
        except Exception as problem:
            ctx.console.warn(f"{ctx.run.checkpoint_path(later)}: could not be deleted: {problem}")
    detector.load_losses(point.manifest.bad_step_detector)
    detector.rolled_back_to(point.step, next_batch=last_bad_step.batch_index + 1)
    ctx.console.warn(f"{cause}: rolled back to step {point.step}, continuing with the batches after them")
    return point.step
