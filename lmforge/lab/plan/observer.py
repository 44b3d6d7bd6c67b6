"""The prediction for a run that trains (log.predict).

It is printed before the run's first step, and compared with its first steps.
"""

import statistics
from collections.abc import Callable
from typing import Any

from lmforge.core.stages.observer import ObservedRun, Observer
from lmforge.lab.plan.out_of_memory import MemoryEstimator
from lmforge.lab.plan.planning import RunPrediction

# The number of steps after which the prediction is compared with the run.
PREDICTED_STEPS = 20


class PredictionObserver(Observer):
    """Predicts memory and speed of a run on rank 0, and compares them with its first steps."""

    def __init__(self, run: ObservedRun) -> None:
        super().__init__(run)
        self._first_step = run.built.point.step + 1
        self._last_step = run.ctx.config.train.steps
        self._check: PredictionCheck | None = None
        if not run.ctx.dist_ctx.is_rank0:
            return
        assert run.memory is not None
        prediction = MemoryEstimator.of_run(run.memory).predict_run(
            run.ctx.config, run.ctx.dist_ctx.device
        )
        log = run.ctx.console.info
        log(f"predicted  {prediction if isinstance(prediction, str) else prediction.describe()}")
        self._check = PredictionCheck(
            prediction, run.inputs.batch_plan.tokens, run.built.point.step, log
        )

    def on_weights_updated(self, step: int, seconds: float, has_compiled: bool) -> None:
        if self._check is not None and step != self._first_step and not has_compiled:
            self._check.add_step(seconds)

    def on_log(self, step: int, record: dict[str, Any]) -> None:
        if self._check is not None:
            record |= self._check.compare(
                step, record["memory_gib"], is_last=step == self._last_step
            )


class PredictionCheck:
    """Compares the prediction for a run with its first steps.

    It never ends the run, and never waits for the device.
    """

    def __init__(
        self,
        prediction: RunPrediction | str,
        tokens_per_step: int,
        start_step: int,
        log: Callable[[str], None],
    ) -> None:
        """`prediction` is a string with the reason where there is no prediction."""
        self._prediction = prediction
        self._tokens = tokens_per_step
        self._log = log
        self._due_step = start_step + PREDICTED_STEPS
        self._seconds = list[float]()

    def add_step(self, seconds: float) -> None:
        """Record the seconds of a step, which is neither the first nor one that compiled."""
        if len(self._seconds) < PREDICTED_STEPS:
            self._seconds.append(seconds)

    def compare(self, step: int, memory_gib: float, *, is_last: bool) -> dict[str, float]:
        """Fields for metrics.jsonl, once.

        They come at the first log step after PREDICTED_STEPS, or at the last of a shorter run.
        """
        prediction = self._prediction
        if isinstance(prediction, str) or not (step >= self._due_step or is_last):
            return {}
        self._prediction = "nothing any more"
        try:
            speed = self._tokens / statistics.median(self._seconds) if self._seconds else None
            self._log(f"predicted  {prediction.compare(memory_gib * 2**30, speed)}")
            fields = {
                "predicted/memory_gib": prediction.memory_bytes / 2**30,
                "measured/memory_gib": memory_gib,
                "predicted/tokens_per_second": prediction.tokens_per_second,
                "measured/tokens_per_second": speed,
            }
            return {name: value for name, value in fields.items() if value is not None}
        except Exception as problem:  # a failed comparison must not end the run
            self._log(f"predicted  failed, and the run continues: {problem}")
            return {}
