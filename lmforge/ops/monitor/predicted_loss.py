"""The validation loss that a ladder predicts while its big run trains, and a line where the run
leaves the interval.
"""

from bisect import bisect_right
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import describe_os_error, read_json
from lmforge.core.options.stage import StageConfig
from lmforge.core.records.run_records import Measure, StepNumber
from lmforge.core.stages.inputs import RunInputs
from lmforge.core.stages.observer import ObservedRun, Observer


class PredictedLoss(BaseModel):
    """A file of `lmforge ladder`. points: (step, loss, low, high) in ascending steps; low and high
    are of a 90 % interval.
    """

    steps: StepNumber
    points: Annotated[list[tuple[StepNumber, Measure, Measure, Measure]], Field(min_length=1)]

    def at(self, step: int) -> tuple[float, float, float] | None:
        """(loss, low, high) at a step; None before the first and after the last point."""
        steps = [each[0] for each in self.points]
        if not steps[0] <= step <= steps[-1]:
            return None
        after = min(bisect_right(steps, step), len(steps) - 1)
        left = self.points[max(0, after - 1)]
        right = self.points[after]
        part = (step - left[0]) / ((right[0] - left[0]) or 1)
        loss, low, high = (
            one + part * (other - one) for one, other in zip(left[1:], right[1:], strict=True)
        )
        return loss, low, high


def read_predicted_loss(path: Path, steps: int) -> PredictedLoss:
    """The prediction for a run of so many steps.

    Raises UserError where the file cannot be read, or is of another run.
    """
    try:
        predicted = read_json(path, PredictedLoss)
    except OSError as problem:
        raise UserError(
            f"log.prediction: {describe_os_error(problem, path)}; leave it out"
        ) from None
    if predicted.steps != steps:
        raise UserError(
            f"log.prediction: {path}: of a run of {predicted.steps:,} steps, and this one has"
            f" {steps:,}; leave it out"
        )
    return predicted


class LossWatch:
    """Says once where validation losses leave the interval, and once where they return."""

    def __init__(self, predicted: PredictedLoss) -> None:
        self._predicted = predicted
        self._is_outside = False

    def check(self, step: int, loss: float | None) -> str | None:
        """A line about the loss at this step, if it was measured; None where there is nothing new
        to say.
        """
        if loss is None or (expected := self._predicted.at(step)) is None:
            return None
        predicted, low, high = expected
        was_outside = self._is_outside
        self._is_outside = not low <= loss <= high
        if was_outside == self._is_outside:
            return None
        where = f"val/loss {loss:.4f}, predicted {predicted:.4f} ({low:.4f} to {high:.4f})"
        return (
            f"step {step}: {where}: {'outside' if self._is_outside else 'again inside'} the"
            " ladder's interval"
        )


class LossObserver(Observer):
    """Compares the validation losses of a run with those that a ladder has predicted
    (log.prediction).
    """

    @classmethod
    def open(cls, config: StageConfig, inputs: RunInputs, resumes: bool) -> None:
        """A run that resumes says what is wrong with the prediction, and goes on without it."""
        if config.log.prediction is not None and not resumes:
            read_predicted_loss(config.log.prediction, config.train.steps)

    def __init__(self, run: ObservedRun) -> None:
        super().__init__(run)
        self._console = run.ctx.console
        self._watch: LossWatch | None = None
        config = run.ctx.config
        if config.log.prediction is not None and run.ctx.dist_ctx.is_rank0:
            try:
                self._watch = LossWatch(
                    read_predicted_loss(config.log.prediction, config.train.steps)
                )
            except UserError as problem:
                # Refused where a run begins; one that resumes needs no prediction to train.
                self._console.warn(f"{problem}; validation losses are compared with none")

    def on_record(self, step: int, record: dict[str, Any]) -> None:
        if self._watch is not None and (line := self._watch.check(step, record.get("val/loss"))):
            self._console.warn(line)
