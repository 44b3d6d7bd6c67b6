"""Metrics and messages of a run: `metrics.jsonl`, and the console with the log."""

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from lmforge.atomic_files import without_non_finite
from lmforge.cluster.distributed import DistributedContext
from lmforge.cluster.memory import peak_resident_bytes
from lmforge.data.batch import Metrics
from lmforge.errors import format_duration
from lmforge.monitor.captured_output import CapturedOutput
from lmforge.monitor.rank_log import redirect_terminal, stamp_lines, terminal_stderr
from lmforge.plan.run_prediction import RunPrediction
from lmforge.terminal.cells import format_metrics
from lmforge.terminal.live_area import LiveArea, can_redraw
from lmforge.train.progress_panel import ProgressPanel
from lmforge.train.run_events import has_torn_end

# The number of steps after which the prediction is compared with the run.
PREDICTED_STEPS = 20


class MetricsAccumulator:
    """Sums of metrics since the last log step, on the device as (sum, count) pairs: adding to them never waits."""

    def __init__(self, dist_ctx: DistributedContext) -> None:
        self._dist_ctx = dist_ctx
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, metrics: Metrics, skip_if: torch.Tensor | None = None) -> None:
        """Add metrics, unless the condition `skip_if`, on the device, holds."""
        for name, pair in metrics.items():
            total = torch.stack([part.detach().double() for part in pair])
            if skip_if is not None:
                total = torch.where(skip_if, 0.0, total)
            self._sums[name] = self._sums[name] + total if name in self._sums else total

    def reset(self) -> None:
        """Discard what was added since the last log step."""
        self._sums = {}

    def reduce_and_reset(self) -> dict[str, float]:
        """The mean of each metric over all ranks and micro-batches since the last call; the host waits.

        Metrics that were never counted are omitted.
        """
        if not self._sums:
            return {}
        names = sorted(self._sums)
        table = self._dist_ctx.all_reduce_sum(torch.stack([self._sums[name] for name in names])).tolist()
        self.reset()
        return {name: total / count for name, (total, count) in zip(names, table, strict=True) if count}


def describe_device(device: torch.device) -> str:
    """The name of the GPU, or the number of CPU threads of a rank."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads per rank"


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this process in GiB: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return peak_resident_bytes() / 2**30


class MetricsFile:
    """Appends one JSON object per log step."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "a+b")  # noqa: SIM115
        if has_torn_end(self._file):
            self._file.write(b"\n")

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(without_non_finite(record)).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class PredictionCheck:
    """Compares the prediction for a run with its first steps. It never ends the run, and never waits for the device."""

    def __init__(
        self, prediction: RunPrediction | str, tokens_per_step: int, start_step: int, log: Callable[[str], None]
    ) -> None:
        """`prediction` is a string with the reason where there is no prediction."""
        self._prediction, self._tokens, self._log = prediction, tokens_per_step, log
        self._due_step, self._seconds = start_step + PREDICTED_STEPS, list[float]()

    def describe(self) -> str:
        return self._prediction if isinstance(self._prediction, str) else self._prediction.describe()

    def add_step(self, seconds: float) -> None:
        """Record the seconds of a step, which is neither the first nor one that compiled."""
        if len(self._seconds) < PREDICTED_STEPS:
            self._seconds.append(seconds)

    def compare(self, step: int, memory_gib: float, *, is_last: bool) -> dict[str, float]:
        """Fields for metrics.jsonl, once: at the first log step after PREDICTED_STEPS, or at the last of a shorter run."""
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


class ConsoleLogger:
    """Writes lines on the first rank, and all of them to the log. A terminal shows a panel while the run trains, and log
    steps only there; elsewhere each log step is a line."""

    def __init__(self, dist_ctx: DistributedContext, steps: int, log_path: Path | None, *, panel: bool = True) -> None:
        self._is_rank0, self._steps = dist_ctx.is_rank0, steps
        self._log_path = log_path
        self._log_file = open(log_path, "a", encoding="utf-8") if log_path and dist_ctx.is_rank0 else None  # noqa: SIM115
        self._console = Console(highlight=False)
        self._has_panel = panel and self._is_rank0 and can_redraw(self._console)
        self._panel: ProgressPanel | None = None
        self._area: LiveArea | None = None
        self._captured: CapturedOutput | None = None
        self._last_line = ""

    def info(self, line: str) -> None:
        """One line for the reader."""
        if not self._is_rank0:
            return
        self._write_log(line)
        if self._area is not None:
            self._area.print(line)
        else:
            print(line, flush=True)

    def _write_log(self, line: str) -> None:
        if self._log_file is not None:
            self._log_file.write(stamp_lines(line))
            self._log_file.flush()

    def warn(self, line: str) -> None:
        """One line that must not be overlooked: also printed on standard error, if that is another stream."""
        self.info(line)
        if self._is_rank0 and not self._console.is_terminal:
            print(f"lmforge: {line}", file=terminal_stderr(), flush=True)

    def start_progress(self, step: int) -> None:
        """Show the panel, on a terminal."""
        if self._has_panel:
            redirects_stderr = terminal_stderr().isatty()
            if self._log_path is not None:
                self._captured = CapturedOutput(self._log_path)
            self._panel = ProgressPanel(step, self._steps)
            self._area = LiveArea(self._console, self._draw)
            self._area.start()
            if redirects_stderr:
                redirect_terminal(self._area.writer)

    def _draw(self, columns: int, lines: int) -> Sequence[Text]:
        assert self._panel is not None
        if self._captured is not None and self._area is not None and (written := self._captured.take_lines()):
            self._area.print("\n".join(written))
        return self._panel.draw(columns, lines)

    def update_progress(self, step: int) -> None:
        if self._panel is not None:
            self._panel.step = step

    def log_metrics(self, record: dict[str, Any]) -> None:
        """One readable line of a metrics record, or the panel."""
        parts = format_metrics(record)
        left = record.get("seconds_left")
        if left is not None:
            parts["seconds_left"] = f"{format_duration(left)} left"
        self._last_line = "  ".join([f"step {record['step']:>{len(str(self._steps))}}/{self._steps}", *parts.values()])
        if self._panel is None:
            self.info(self._last_line)
        else:
            self._write_log(self._last_line)
            self._panel.add_record(record)

    def log_sample(self, step: int, text: str) -> None:
        """Samples of the model after `step` steps, a line each; the panel shows the last one."""
        line = f"  sample: {text!r}"
        if self._panel is None:
            self.info(line)
        else:
            self._write_log(line)
            self._panel.add_sample(step, repr(text))

    def stop_progress(self) -> None:
        """Remove the panel; the line of the last log step remains."""
        if self._area is None:
            return
        self._area.stop()
        redirect_terminal(None)
        for line in self._captured.close() if self._captured is not None else []:
            print(line, flush=True)
        self._area = self._panel = self._captured = None
        if self._last_line:
            print(self._last_line, flush=True)

    def close(self) -> None:
        self.stop_progress()
        if self._log_file is not None:
            self._log_file.close()
            self._log_file = None
