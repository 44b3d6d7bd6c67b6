"""The panel of a training run in a terminal: progress, the curve of the loss, speed, validation and the last sample.

It shows only numbers that were logged anyway: drawing uses neither the model nor the device.
"""

import time
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from lmforge.terminal.cells import METRIC_WORDS, QUIET, clean, fit_words, format_metrics, progress_line, sparkline

MAX_TEXT_LINES = 3
MAX_POINTS = 1000  # of the curve; a terminal shows fewer
# The curve is of the first of these that the run measures, and the others are on the line of numbers.
CURVES = ("reward", "rewards/accuracy", "loss")


class ProgressPanel:
    """The lines of a panel. Values are set by the training, and drawn by another thread."""

    def __init__(self, step: int, steps: int) -> None:
        self.step = step
        self._steps = steps
        self._record: dict[str, Any] = {}
        self._logged_at = time.monotonic()
        self._validation: tuple[int, str] | None = None
        self._sample: tuple[int, str] | None = None
        self._curves: dict[str, list[float | None]] = {name: [] for name in CURVES}

    def add_record(self, record: dict[str, Any]) -> None:
        """A record of metrics.jsonl."""
        words = format_metrics({name: value for name, value in record.items() if name.startswith("val/")})
        if words:
            self._validation = record["step"], "  ".join(words.values())
        if "step_seconds" not in record:
            return  # a validation alone
        self._record, self._logged_at = record, time.monotonic()
        for name, points in self._curves.items():
            if name in record:
                points.append(record[name])
                if len(points) > MAX_POINTS:
                    del points[: MAX_POINTS // 10]

    def add_sample(self, step: int, text: str) -> None:
        self._sample = step, clean(text)

    def draw(self, columns: int, lines: int) -> Sequence[Text]:
        """The panel, the most important lines first."""
        record = self._record
        left = record.get("seconds_left")
        if left is not None:
            left = max(0.0, left - (time.monotonic() - self._logged_at))
        drawn = [progress_line(self.step, self._steps, left, columns)]
        curve = next((name for name in CURVES if any(value is not None for value in self._curves[name])), None)
        if curve:
            words = METRIC_WORDS[curve].format(record[curve]) if record.get(curve) is not None else f"{curve} not finite"
            label = f"{words}  "
            drawn.append(Text.assemble(label, (sparkline(self._curves[curve], columns - len(label)), "cyan")))
        numbers = {name: word for name, word in format_metrics(record).items() if name != curve and not name.startswith("val/")}
        drawn += map(Text, fit_words(list(numbers.values()), columns))
        for what, shown in (("validation", self._validation), ("sample", self._sample)):
            if shown is not None:
                text = Text.assemble((f"{what} at step {shown[0]:,}: ", QUIET), shown[1])
                drawn += text.divide(range(columns, len(text), columns))[:MAX_TEXT_LINES]
        return drawn[:lines]
