"""Slow drifts of the step time: a run that has become slower by a fifth and stays so is told of, with when it was quicker.

Single log steps vary with everything else a machine does. So what is compared are medians of several, and most of
the late ones have to be slow, not one of them very slow.
"""

import statistics
from collections import deque

# Log steps in a median; quick ones are taken together until they cover a second.
READINGS = 20
READING_SECONDS = 1.0
# So much slower than the best median is told, and again for each as much again; recovered is below half of it.
DRIFT = 0.2
# So many of the late readings have to be slower than the baseline by half of that.
MOST = 0.8


class Drift:
    """Step times in, lines out. The baseline is the median of twenty neighbouring readings at its quickest so far."""

    def __init__(self) -> None:
        self._readings: deque[float] = deque(maxlen=READINGS)
        self._steps: deque[int] = deque(maxlen=READINGS)
        self._seconds = self._taken = 0.0
        self._before: int | None = None
        # (median, its step, of the readings that have left the window) and what has been told of.
        self._baseline: tuple[float, int] | None = None
        self._fresh = 0
        self._told = 0.0

    def read(self, step: int, step_seconds: float) -> list[str]:
        """Hear that the steps since the last reading took `step_seconds` each; what to say of it."""
        if self._before is None:  # the first steps compile and allocate
            self._before = step
            return []
        self._taken += step - self._before
        self._seconds += (step - self._before) * step_seconds
        self._before = step
        if self._seconds < READING_SECONDS or not self._taken:
            return []
        self._readings.append(self._seconds / self._taken)
        self._steps.append(step)
        self._seconds = self._taken = 0.0
        self._fresh += 1
        if len(self._readings) < READINGS:
            return []
        now = statistics.median(self._readings)
        lines = self._judge(now)
        if self._fresh >= READINGS:  # windows that do not overlap: the quickest of many that do is a lucky one
            self._fresh = 0
            if self._baseline is None or now < self._baseline[0]:
                self._baseline = (now, self._steps[READINGS // 2])
        return lines

    def _judge(self, now: float) -> list[str]:
        if self._baseline is None:
            return []
        usual, around = self._baseline
        slower = now / usual - 1
        most = sum(reading > (1 + DRIFT / 2) * usual for reading in self._readings) >= MOST * READINGS
        compared = f"steps take {now:.3g} s, {usual:.3g} s around step {around}"
        if slower >= self._told + DRIFT and most:
            self._told = slower
            return [f"{compared}: {100 * slower:.0f} % slower"]
        if self._told and slower < DRIFT / 2:
            self._told = 0.0
            return [f"{compared}: no longer slow"]
        return []
