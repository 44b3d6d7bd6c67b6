"""Metrics and messages of a run: `metrics.jsonl`, TensorBoard where requested, and the console with the log."""

import json
import math
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from lmforge.cluster.distributed import DistributedContext
from lmforge.data.batch import Metrics


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

    def reduce_and_reset(self) -> dict[str, float]:
        """The mean of each metric over all ranks and micro-batches since the last call; the host waits.

        Metrics that were never counted are omitted.
        """
        if not self._sums:
            return {}
        names = sorted(self._sums)
        table = self._dist_ctx.all_reduce_sum(torch.stack([self._sums[name] for name in names])).tolist()
        self._sums = {}
        return {name: total / count for name, (total, count) in zip(names, table, strict=True) if count}


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this process in GiB: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def without_non_finite(record: dict[str, Any]) -> dict[str, Any]:
    """A record with None for NaN and infinity, which JSON lacks."""
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()}


class MetricsFile:
    """Appends one JSON object a log step; with `tensorboard`, the same numbers as events."""

    def __init__(self, path: Path, tensorboard: Path | None = None) -> None:
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115
        with open(path, "rb") as written:
            size = written.seek(0, os.SEEK_END)
            written.seek(max(0, size - 1))
            is_torn = written.read() not in (b"", b"\n")
        if is_torn:
            # A killed process left half a line.
            self._file.write("\n")
        self._events: Any = None
        if tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(tensorboard))

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(without_non_finite(record)) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in record.items():
                if isinstance(value, int | float) and name != "step":
                    self._events.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()


def format_duration(seconds: float) -> str:
    """Seconds as 42s, 3m05s or 2h07m."""
    whole = int(max(0.0, seconds) + 0.5)
    if whole < 60:
        return f"{whole}s"
    return f"{whole // 60}m{whole % 60:02d}s" if whole < 3600 else f"{whole // 3600}h{whole % 3600 // 60:02d}m"


# What the console shows of a record.
CONSOLE_METRICS = {
    "loss": "loss {:.4f}",
    "val/loss": "val {:.4f}",
    "val/bits_per_byte": "({:.3f} bits/byte)",
    "val/reward": "val reward {:.2f}",
    "rewards/accuracy": "preferred {:.2f}",
    "rewards/margin": "margin {:.2f}",
    "reward": "reward {:.2f}",
    "pass@1": "pass {:.2f}",
    "kl": "KL {:.2f}",
    "lr": "lr {:.2e}",
    "grad_norm": "grad {:.2f}",
    "tokens_per_second": "{:,.0f} tok/s",
    "mfu": "MFU {:.0%}",
    "memory_gib": "{:.1f} GiB",
}


class ConsoleLogger:
    """Writes lines on the first rank: above a progress bar on a terminal, plain elsewhere, and all of it to the log."""

    def __init__(self, dist_ctx: DistributedContext, steps: int, log_path: Path | None) -> None:
        self._is_rank0 = dist_ctx.is_rank0
        self._steps = steps
        self._log_file = open(log_path, "a", encoding="utf-8") if log_path and dist_ctx.is_rank0 else None  # noqa: SIM115
        self._console = Console(highlight=False)
        self._progress: Progress | None = None

    def info(self, line: str) -> None:
        """One line for the reader."""
        if not self._is_rank0:
            return
        if self._log_file is not None:
            self._log_file.write(f"{time.strftime('%H:%M:%S')} {line}\n")
            self._log_file.flush()
        if self._console.is_terminal:
            self._console.print(line, markup=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def warn(self, line: str) -> None:
        """One line for the reader that is not to be overlooked: on standard error too, where that is another place."""
        self.info(line)
        if self._is_rank0 and not sys.stdout.isatty():
            print(f"lmforge: {line}", file=sys.stderr, flush=True)

    def start_progress(self, step: int) -> None:
        """Show the bar, on a terminal."""
        if self._is_rank0 and self._console.is_terminal:
            self._progress = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.description}"),
                console=self._console,
                transient=True,  # erased in the end: rich would draw it again below the last line
            )
            self._progress.add_task("", total=self._steps, completed=step)
            self._progress.start()

    def update_progress(self, step: int) -> None:
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step)

    def log_metrics(self, record: dict[str, Any]) -> None:
        """One readable line of a metrics record."""
        parts = {name: words.format(record[name]) for name, words in CONSOLE_METRICS.items() if record.get(name) is not None}
        if bits := parts.pop("val/bits_per_byte", None):
            parts["val/loss"] += f" {bits}"
        left = record.get("seconds_left")
        if left is not None:
            parts["seconds_left"] = f"{format_duration(left)} left"
        self.info("  ".join([f"step {record['step']:>{len(str(self._steps))}}/{self._steps}", *parts.values()]))
        description = ", ".join(parts[name] for name in ("loss", "seconds_left") if name in parts)
        if self._progress is not None and description:
            self._progress.update(self._progress.task_ids[0], description=description)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if self._log_file is not None:
            self._log_file.close()
            self._log_file = None
