"""What the loop measures: means of the metrics of an objective, and rates of training."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lmforge.core.data.batch import MAXIMUM, Batch, Metrics
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.memory import peak_resident_bytes
from lmforge.core.parallel.compiled import compiled_graph_count
from lmforge.core.parallel.parallel_model import ParallelModel
from lmforge.core.steps.callbacks import BatchSource


class MetricsAccumulator:
    """Sums (or the largest) of metrics since the last log step, on the device as pairs with counts:
    adding never waits.
    """

    def __init__(self, dist_ctx: DistributedContext) -> None:
        self._dist_ctx = dist_ctx
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, metrics: Metrics, skip_if: torch.Tensor | None = None) -> None:
        """Add metrics, unless the condition `skip_if`, on the device, holds."""
        for name, pair in metrics.items():
            total = torch.stack([part.detach().double() for part in pair])
            if skip_if is not None:
                total = torch.where(skip_if, 0.0, total)
            if name in self._sums:
                before = self._sums[name]
                largest = torch.maximum(before, total)
                total = before + total
                if name.endswith(MAXIMUM):
                    total = torch.stack([largest[0], total[1]])
            self._sums[name] = total

    def reset(self) -> None:
        """Discard what was added since the last log step."""
        self._sums = {}

    def reduce_and_reset(self) -> dict[str, float]:
        """The mean, or the largest, of each metric over all ranks and micro-batches since the last
        call; the host waits.

        Metrics that were never counted are omitted.
        """
        if not self._sums:
            return {}
        names = sorted(self._sums)
        local = torch.stack([self._sums[name] for name in names])
        values = self._dist_ctx.all_reduce_sum(local.clone())
        means = dict(zip(names, (values[:, 0] / values[:, 1]).tolist(), strict=True))
        if any(name.endswith(MAXIMUM) for name in names):
            largest = zip(*self._dist_ctx.all_gather(local[:, 0].tolist()), strict=True)
            means |= {
                name: max(each)
                for name, each in zip(names, largest, strict=True)
                if name.endswith(MAXIMUM)
            }
        self.reset()
        return {
            name: means[name]
            for name, count in zip(names, values[:, 1].tolist(), strict=True)
            if count
        }


class Throughput:
    """Rates of training since the last log step, without what is `excluded`: validation, saving and
    samples. Padding is not counted.

    `flops_per_token` (by the sequence length) and `peak_flops` (of a rank; None: unknown) give the
    MFU. The remaining time is estimated from regular steps (not the first, nor those that
    compiled), and from what was last excluded by each name, which happens every `intervals[name]`
    steps until `steps` are done.
    """

    def __init__(
        self,
        parallel_model: ParallelModel,
        batches: BatchSource,
        flops_per_token: Callable[[int], float],
        peak_flops: float | None,
        steps: int,
        intervals: Mapping[str, int | None],
    ) -> None:
        self._parallel_model = parallel_model
        self._batches = batches
        self._dist_ctx = parallel_model.dist_ctx
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops
        self._steps = steps
        self._intervals = intervals
        # Tokens, and the FLOPs that they take.
        self._work = torch.zeros(2, dtype=torch.float64, device=self._dist_ctx.device)
        self._usual_step_seconds: float | None = None
        self._seconds_of: dict[str, float] = {}  # the last time that was excluded, by its name

    def reset(self, step: int) -> None:
        """Start to measure: `step` steps are done."""
        self._start_step = step
        self._start_time = time.perf_counter()
        self._excluded_seconds = 0.0
        self._unusual_steps = 0
        self._unusual_seconds = 0.0
        self._start_data_seconds = self._batches.data_wait_seconds
        self._work.zero_()

    def add_tokens(self, batches: Sequence[Batch]) -> None:
        """Count the tokens of these batches; the host does not wait."""
        for batch in batches:
            tokens = (batch.document_ids >= 0).sum().double()
            self._work += torch.stack(
                [tokens, tokens * self._flops_per_token(batch.sequence_length)]
            )

    def count_unusual_step(self, seconds: float) -> None:
        """Leave this step out of the estimate of the remaining time: it compiled, or was the
        first.
        """
        self._unusual_steps += 1
        self._unusual_seconds += seconds

    @contextmanager
    def excluded(self, name: str) -> Iterator[None]:
        """The seconds of the block are left out of the rates."""
        began = time.perf_counter()
        num_graphs = compiled_graph_count()
        yield
        seconds = time.perf_counter() - began
        self._excluded_seconds += seconds
        if compiled_graph_count() == num_graphs:
            self._seconds_of[name] = seconds

    def take(self, step: int) -> dict[str, Any]:
        """The rates. Call it after something has waited for the device."""
        steps = max(1, step - self._start_step)
        seconds = max(1e-9, time.perf_counter() - self._start_time - self._excluded_seconds)
        # Ranks that share a model count the same sequences.
        work = (
            self._dist_ctx.all_reduce_sum(self._work.clone())
            / self._parallel_model.model_parallel_size
        )
        tokens, flops = (work / seconds).tolist()
        rates = {
            "tokens_per_second": tokens,
            "mfu": flops / self._dist_ctx.world_size / self._peak_flops
            if self._peak_flops
            else None,
            "step_seconds": seconds / steps,
            "data_seconds": (self._batches.data_wait_seconds - self._start_data_seconds) / steps,
            "memory_gib": peak_memory_gib(self._dist_ctx.device),
            "seconds_left": self._seconds_left(step, steps, seconds),
        }
        self.reset(step)
        return rates

    def _seconds_left(self, step: int, steps: int, seconds: float) -> float | None:
        """The remaining seconds at `step`, after `steps` that took `seconds`; None before the first
        regular step.
        """
        last = self._steps
        if steps > self._unusual_steps:
            self._usual_step_seconds = (seconds - self._unusual_seconds) / (
                steps - self._unusual_steps
            )
        if self._usual_step_seconds is None:
            return None if step < last else 0.0
        every = self._intervals.items()
        other = (
            self._seconds_of.get(name, 0.0) * (last // each - step // each)
            for name, each in every
            if each
        )
        return (last - step) * self._usual_step_seconds + sum(other)


def describe_device(device: torch.device) -> str:
    """The name of the GPU, or the number of CPU threads of a rank."""
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu, {torch.get_num_threads()} threads per rank"
    )


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this process in GiB: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return peak_resident_bytes() / 2**30
