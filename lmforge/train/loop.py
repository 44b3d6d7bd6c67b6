"""The loop: one honest function that every stage calls. What differs between stages is in the parts it is given."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from lmforge.cluster.distributed import DistributedContext
from lmforge.config.batch_plan import BatchPlan
from lmforge.data.batch import Batch, Metrics
from lmforge.errors import RunFailed
from lmforge.monitor.watchdog import Watchdog
from lmforge.parallel.parallel_model import ParallelModel
from lmforge.parallel.precision import compiled_graph_count
from lmforge.train.bad_steps import BadStepDetector
from lmforge.train.checkpoint_schedule import GIVE_UP, KEPT, CheckpointSchedule
from lmforge.train.metrics import ConsoleLogger, MetricsAccumulator, MetricsFile, peak_memory_gib
from lmforge.train.optimizer import set_learning_rate, step_unless
from lmforge.train.rollback import Rollback
from lmforge.train.stop_signals import StopSignals

# After so many steps whatever is compiled has been.
COMPILE_WARMUP_STEPS = 3


class BatchSource(Protocol):
    """Where batches come from: this rank's micro-batches of any step, and the time spent waiting for them."""

    @property
    def data_wait_seconds(self) -> float: ...

    def batches(self, step: int) -> list[Batch]: ...


@dataclass
class Trainer:
    """What the loop drives. Every `…_every` is in steps; None is never."""

    parallel_model: ParallelModel
    num_items: Callable[[Batch], Tensor]
    optimizer: torch.optim.Optimizer
    lr_schedule: Callable[[int], float]
    batch_source: BatchSource
    batch_plan: BatchPlan
    dist_ctx: DistributedContext
    watch: Watchdog
    console: ConsoleLogger
    metrics_file: MetricsFile | None
    steps: int
    max_grad_norm: float
    log_every: int
    validate_every: int | None
    sample_every: int | None
    bad_step_detector: BadStepDetector
    max_bad_steps: int
    rollback: Rollback
    checkpoint_schedule: CheckpointSchedule
    validate: Callable[[int], dict[str, float]]
    sample: Callable[[int], None]
    flops_per_token: float
    peak_flops: float | None
    validate_at_start: bool = False


def train_step(
    parallel_model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Batch],
    num_items: Callable[[Batch], Tensor],
    *,
    lr: float,
    max_grad_norm: float,
    set_phase: Callable[[str], None] = lambda phase: None,
    is_bad_step: Callable[[list[Metrics], Tensor], Tensor] | None = None,
) -> tuple[Tensor, list[Metrics]]:
    """One optimizer step over this rank's share of a global batch; `mark` hears which phase begins.

    Where `judge(metrics, gradient norm)` says on the device that the step is bad, nothing is updated.

    The gradient is that of the *sum* of losses over the whole global batch, divided once by the batch's weight, which is
    counted across micro-batches and ranks before the first backward. Returns the gradient's norm before clipping and
    the metrics of each micro-batch, on the device: the host does not wait for it.
    """
    set_phase("reduce")
    counted = parallel_model.dist_ctx.all_reduce_sum(torch.stack([num_items(batch) for batch in micro_batches]).sum())
    metrics = parallel_model.forward_backward(
        micro_batches, (counted / parallel_model.model_parallel_size).clamp(min=1.0), set_phase
    )
    set_phase("reduce")
    gradient_norm = parallel_model.clip_grad_norm(max_grad_norm)
    set_phase("optimizer")
    set_learning_rate(optimizer, lr)
    if is_bad_step is None:
        optimizer.step()
    else:
        step_unless(optimizer, is_bad_step(metrics, gradient_norm))
    parallel_model.zero_grad(optimizer)
    return gradient_norm, metrics


def train(trainer: Trainer, start_step: int) -> tuple[int, int]:
    """Train from step `start` to `parts.steps`. Returns the number of steps done and the signal that stopped it, or 0.

    Between log steps the host does not wait for the device.
    """
    meter, wishes = MetricsAccumulator(trainer.dist_ctx), StopSignals(trainer.dist_ctx)
    guard, saves = trainer.bad_step_detector, trainer.checkpoint_schedule
    trainer.console.start_progress(start_step)
    # Collecting garbage stalls one rank and with it all of them; between log steps there is none to speak of.
    # What is here now stays: looking through all modules of torch each time would take a tenth of a second.
    gc.collect()
    gc.freeze()
    gc.disable()
    since = _ThroughputMeter(trainer, start_step)
    done = start_step
    try:
        if start_step == 0 and trainer.validate_at_start:
            trainer.watch.set_phase("evaluate", 0)
            _log_record(trainer, {"step": 0, "tokens": 0, **since.run_excluded(partial(trainer.validate, 0))})
        while done < trainer.steps:
            step = done
            trainer.watch.set_phase("data", step)
            micro_batches = trainer.batch_source.batches(step + guard.skipped_batches)
            since.add(micro_batches)
            lr, graphs = trainer.lr_schedule(step), compiled_graph_count()
            gradient_norm, _ = train_step(
                trainer.parallel_model,
                trainer.optimizer,
                micro_batches,
                trainer.num_items,
                lr=lr,
                max_grad_norm=trainer.max_grad_norm,
                set_phase=partial(_set_phase, trainer, step=step),
                is_bad_step=partial(_check_step, guard, meter, step + 1),
            )
            done = step + 1
            if step >= start_step + COMPILE_WARMUP_STEPS and compiled_graph_count() > graphs:
                trainer.console.info(f"step {done}: compiled again, which stalls every rank; TORCH_LOGS=recompiles tells why")
            last = done == trainer.steps
            trainer.console.update_progress(done)
            trainer.watch.set_phase("barrier", step)
            signal, wish = wishes.exchange(saves.requested_by_clock())
            if wish == GIVE_UP:
                raise RunFailed(
                    f"step {done}: {saves.checkpointer.consecutive_failures} saves in a row have failed: {saves.checkpointer.last_error}"
                )
            stopping = bool(last or signal)
            wish = max(wish, saves.requested_by_step(done, stopping))
            if bad := guard.take_bad_steps(bool(wish) or done % trainer.log_every == 0, trainer.max_bad_steps):
                for one in bad:
                    trainer.rollback.report_bad_step(one)
                if guard.consecutive_bad_steps >= trainer.max_bad_steps:
                    saves.defer(wish)
                    following = bad[-1].batch_index + 1
                    done = since.run_excluded(
                        partial(trainer.rollback.roll_back, max(0, bad[-1].step - guard.consecutive_bad_steps))
                    )
                    guard.rolled_back_to(done, following)
                    since.reset(done)
                    meter.reduce_and_reset()
                    continue
            record: dict[str, Any] = {}
            if wish or done % trainer.log_every == 0:
                record = {**meter.reduce_and_reset(), "lr": lr, "grad_norm": float(gradient_norm), **since.read(done)}
                record |= {"skipped_steps": guard.skipped_steps} if guard.skipped_steps else {}
                record |= (
                    {"save_stall_seconds": saves.checkpointer.blocking_seconds} if saves.checkpointer.blocking_seconds else {}
                )
                gc.collect()
                for line in trainer.watch.check_step_times(done, record["step_seconds"], trainer.parallel_model.pipeline_rank):
                    trainer.console.info(line)
            if last or _is_due(trainer.validate_every, done) or (wish and saves.needs_validation):
                trainer.watch.set_phase("evaluate", done)
                record |= since.run_excluded(partial(trainer.validate, done))
            if record:
                trainer.watch.set_phase("save", done)
                _log_record(trainer, {"step": done, "tokens": done * trainer.batch_plan.tokens, **record})
            if wish:
                trainer.watch.set_phase("save", done)
                since.run_excluded(partial(saves.save, done, record, wish == KEPT, stopping))
            if signal:
                return done, signal
            if _is_due(trainer.sample_every, done):
                trainer.watch.set_phase("sample", done)
                since.run_excluded(partial(trainer.sample, done))
        return trainer.steps, 0
    finally:
        wishes.close()
        gc.unfreeze()
        gc.enable()


def _set_phase(trainer: Trainer, phase: str, step: int) -> None:
    if phase == "optimizer":
        trainer.checkpoint_schedule.checkpointer.wait_for_staging()
    trainer.watch.set_phase(phase, step)


def _check_step(
    bad_step_detector: BadStepDetector, meter: MetricsAccumulator, step: int, metrics: list[Metrics], gradient_norm: Tensor
) -> Tensor:
    bad = bad_step_detector.check(step, metrics, gradient_norm)
    for told in metrics:
        meter.add(told, skip_if=bad)
    return bad


def _is_due(every_steps: int | None, step: int) -> bool:
    return every_steps is not None and step % every_steps == 0


def _log_record(trainer: Trainer, record: dict[str, Any]) -> None:
    if trainer.metrics_file is not None:
        trainer.metrics_file.write(record)
    trainer.console.log_metrics(record)


class _ThroughputMeter:
    """Rates since the last log step, of training alone: validation, saving and samples are taken out. Padding is no token."""

    def __init__(self, trainer: Trainer, start_step: int) -> None:
        self._trainer = trainer
        self._start_step, self._start_time, self._excluded_seconds, self._start_data_seconds = (
            start_step,
            time.perf_counter(),
            0.0,
            0.0,
        )
        self._tokens = torch.zeros((), dtype=torch.float64, device=trainer.dist_ctx.device)

    def add(self, batches: Sequence[Batch]) -> None:
        """These are trained on; the host does not wait."""
        for batch in batches:
            self._tokens += (batch.document_ids >= 0).sum()

    def run_excluded(self, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = work()
        self._excluded_seconds += time.perf_counter() - began
        return result

    def reset(self, step: int) -> None:
        """The run went back to this step."""
        self._start_step, self._start_time, self._excluded_seconds, self._start_data_seconds = (
            step,
            time.perf_counter(),
            0.0,
            self._trainer.batch_source.data_wait_seconds,
        )
        self._tokens.zero_()

    def read(self, step: int) -> dict[str, Any]:
        """Called after something waited for the device, so that the clock means work that is done."""
        parts, now, steps = self._trainer, time.perf_counter(), step - self._start_step
        seconds = max(1e-9, now - self._start_time - self._excluded_seconds)
        # Ranks that share rows count each of them.
        per_second = (
            float(parts.dist_ctx.all_reduce_sum(self._tokens.clone())) / parts.parallel_model.model_parallel_size / seconds
        )
        per_rank = per_second / parts.dist_ctx.world_size
        rates = {
            "tokens_per_second": per_second,
            "mfu": per_rank * parts.flops_per_token / parts.peak_flops if parts.peak_flops else None,
            "step_seconds": seconds / max(1, steps),
            "data_seconds": (parts.batch_source.data_wait_seconds - self._start_data_seconds) / max(1, steps),
            "memory_gib": peak_memory_gib(parts.dist_ctx.device),
            "seconds_left": (parts.steps - step) * seconds / max(1, steps),
        }
        self.reset(step)
        return rates
