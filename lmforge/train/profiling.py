"""A profiler's trace of some steps of a run, a file for each rank."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function


class StepProfiler:
    """Traces the steps `first` to `last` (from 1), and writes a file that Perfetto (https://ui.perfetto.dev) opens.

    `log` is called with a line about the file.
    """

    def __init__(self, window: tuple[int, int] | None, path: Path, device: torch.device, log: Callable[[str], None]) -> None:
        self._window, self._path, self._log = window or (0, -1), path, log
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profile: profile | None = None
        self._traced: list[int] = []

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around step `number` (from 1)."""
        first, last = self._window
        if not first <= number <= last:
            yield
            return
        if self._profile is None:
            self._profile = profile(activities=self._activities)
            self._profile.start()
        with record_function(f"step {number}"):
            yield
        self._traced.append(number)
        if number == last:
            self.close()

    def close(self) -> None:
        """Write what has been traced, if it is not yet written."""
        if self._profile is None:
            return
        traced, self._profile = self._profile, None
        traced.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        traced.export_chrome_trace(str(self._path))
        self._log(f"profile    steps {self._traced[0]} to {self._traced[-1]}: {self._path.parent} (open a file with Perfetto)")
