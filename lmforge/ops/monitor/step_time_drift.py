"""Drift of the step time: a line where steps have become slower by a fifth and stay so.

Single log steps vary with other load on the machine. So medians of several are compared, and most
of the late ones must be slow.
"""

import math
import statistics
from collections import deque

# Log steps in a median; short ones are combined until they cover a second.
WINDOW_READINGS = 20
MIN_READING_SECONDS = 1.0
# How much slower than the best median is reported, and again at each multiple; recovered is below
# half of it.
DRIFT_THRESHOLD = 0.2
# This fraction of the late readings must be slower than the baseline by half of that.
SLOW_FRACTION = 0.8


class DriftDetector:
    """Takes step times, and returns lines.

    The baseline is the smallest median of twenty neighbouring readings so far.
    """

    def __init__(self) -> None:
        # (seconds, step) of each.
        self._readings: deque[tuple[float, int]] = deque(maxlen=WINDOW_READINGS)
        self._seconds = self._num_steps = 0.0
        self._last_step: int | None = None
        # (median, its step) of the best window so far, and the slowdown that was reported last.
        self._baseline = (math.inf, 0)
        self._num_readings = 0
        self._reported = 0.0

    def update(self, step: int, step_seconds: float) -> list[str]:
        """Lines about the steps since the last reading, which took `step_seconds` each."""
        if self._last_step is None:  # the first steps compile and allocate
            self._last_step = step
            return []
        self._num_steps += step - self._last_step
        self._seconds += (step - self._last_step) * step_seconds
        self._last_step = step
        if self._seconds < MIN_READING_SECONDS or self._num_steps <= 0:  # after a rollback, steps are repeated
            return []
        self._readings.append((self._seconds / self._num_steps, step))
        self._seconds = self._num_steps = 0.0
        self._num_readings += 1
        if len(self._readings) < WINDOW_READINGS:
            return []
        now = statistics.median(seconds for seconds, _ in self._readings)
        lines = self._compare(now)
        # Windows of the baseline do not overlap: the fastest of many overlapping ones would be too
        # low by chance.
        if self._num_readings % WINDOW_READINGS == 0 and now < self._baseline[0]:
            self._baseline = (now, self._readings[WINDOW_READINGS // 2][1])
        return lines

    def _compare(self, now: float) -> list[str]:
        usual, around = self._baseline
        slower = now / usual - 1
        slow = sum(seconds > (1 + DRIFT_THRESHOLD / 2) * usual for seconds, _ in self._readings)
        compared = f"steps take {now:.3g} s, {usual:.3g} s around step {around}"
        if slower >= self._reported + DRIFT_THRESHOLD and slow >= SLOW_FRACTION * WINDOW_READINGS:
            self._reported = slower
            return [f"{compared}: {100 * slower:.0f} % slower"]
        if self._reported and slower < DRIFT_THRESHOLD / 2:
            self._reported = 0.0
            return [f"{compared}: no longer slow"]
        return []
