"""The loop: one function that every stage calls. What differs between stages is in the Trainer it is given."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmforge.data.batch import Batch, Metrics
from lmforge.errors import RunFailed
from lmforge.parallel.parallel_model import ParallelModel
from lmforge.parallel.precision import compiled_graph_count, has_compiled_blocks
from lmforge.train.checkpoint_schedule import SaveRequest, StopSignals
from lmforge.train.inputs import RunContext
from lmforge.train.metrics import MetricsAccumulator, peak_memory_gib
from lmforge.train.optimizers.optimizer import set_learning_rate, step_unless
from lmforge.train.profiling import StepProfiler
from lmforge.train.resume import roll_back
from lmforge.train.trainer import Trainer
from lmforge.train.validation import validate, write_samples

# By this step everything has been compiled once.
COMPILE_WARMUP_STEPS = 3


def train_step(
    parallel_model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Batch],
    count_items: Callable[[Batch], Tensor],
    *,
    lr: float,
    max_grad_norm: float,
    set_phase: Callable[[str], None] = lambda phase: None,
    before_update: Callable[[], None] = lambda: None,
    is_bad_step: Callable[[list[Metrics], Tensor], Tensor] | None = None,
) -> tuple[Tensor, list[Metrics]]:
    """One optimizer step on this rank's micro-batches of a global batch.

    The gradient is that of the sum of losses over the global batch, divided once by its `num_items`, which are counted
    over micro-batches and ranks before the first backward. `is_bad_step(metrics, gradient norm)` says on the device
    whether to skip the update. `set_phase` is called as each phase begins, and `before_update` before weights change.

    Returns the gradient norm before clipping and the metrics of each micro-batch, on the device: the host does not wait.
    """
    set_phase("reduce")
    num_items = parallel_model.dist_ctx.all_reduce_sum(torch.stack([count_items(batch) for batch in micro_batches]).sum())
    num_items = (num_items / parallel_model.model_parallel_size).clamp(min=1.0)
    metrics = parallel_model.forward_backward(micro_batches, num_items, set_phase)
    set_phase("reduce")
    grad_norm = parallel_model.clip_grad_norm(max_grad_norm)
    set_phase("optimizer")
    before_update()
    set_learning_rate(optimizer, lr)
    if is_bad_step is None:
        optimizer.step()
    else:
        step_unless(optimizer, is_bad_step(metrics, grad_norm))
    parallel_model.zero_grad(optimizer)
    return grad_norm, metrics


def train(trainer: Trainer) -> tuple[int, int]:
    """Train to `train.steps`. Returns the number of steps done, and the signal that stopped it or 0.

    Between log steps the host runs at most one step ahead of the device, and does not wait for it.
    """
    config, watch, console = trainer.ctx.config, trainer.ctx.watch, trainer.ctx.console
    detector, schedule = trainer.bad_step_detector, trainer.checkpoint_schedule
    accumulator, stop_signals = MetricsAccumulator(trainer.ctx.dist_ctx), StopSignals(trainer.ctx.dist_ctx)
    throughput, done, callbacks = _Throughput(trainer), trainer.start_step, trainer.ctx.callbacks
    callbacks.call("on_run_start", trainer.ctx, done, trainer.parallel_model.model)
    console.start_progress(done)
    with closing(stop_signals), closing(_build_profiler(trainer.ctx)) as profiler, _garbage_collection_paused():
        if done == 0 and config.validation.at_start:
            watch.set_phase("evaluate", 0)
            trainer.log({"step": 0, "tokens": 0, **throughput.exclude(validate, trainer, 0)})
        while done < config.train.steps:
            step, done = done, done + 1
            with profiler.step(done):
                lr, grad_norm = _run_step(trainer, throughput, accumulator, step)
            console.update_progress(done)

            watch.set_phase("barrier", step)
            signal, save_request = stop_signals.exchange(schedule.requested_by_clock())
            if save_request == SaveRequest.GIVE_UP:
                raise RunFailed(f"step {done}: {trainer.checkpointer.describe_failures()}")
            is_last = done == config.train.steps
            stopping = is_last or signal != 0
            save_request = SaveRequest(max(save_request, schedule.requested_by_step(done, stopping)))
            log_is_due = bool(save_request) or done % config.log.every_steps == 0

            if bad_steps := detector.take_bad_steps(log_is_due, config.faults.max_bad_steps):
                for bad_step in bad_steps:
                    trainer.report_bad_step(bad_step)
                if detector.consecutive_bad_steps >= config.faults.max_bad_steps:
                    schedule.defer(save_request)
                    done = roll_back(trainer, bad_steps[-1])
                    throughput.reset(done)
                    accumulator.reset()
                    continue

            record: dict[str, Any] = {}
            if log_is_due:
                record = {**accumulator.reduce_and_reset(), "lr": lr, "grad_norm": float(grad_norm), **throughput.take(done)}
                gc.collect()
                for line in watch.check_step_times(done, record["step_seconds"], trainer.parallel_model.pipeline_rank):
                    console.info(line)
            if is_last or _is_due(config.validation.every_steps, done) or (save_request and schedule.needs_validation):
                watch.set_phase("evaluate", done)
                record |= (scores := throughput.exclude(validate, trainer, done))
                callbacks.call("on_validation_end", trainer.ctx, done, scores)
            if record:
                watch.set_phase("save", done)
                trainer.log({"step": done, "tokens": trainer.tokens_until(done), **record})
            if save_request:
                watch.set_phase("save", done)
                throughput.exclude(trainer.save, done, record, save_request == SaveRequest.KEPT, stopping)
            callbacks.call("on_step_end", trainer.ctx, done, record)
            trainer.report_saved()
            if signal:
                return done, signal
            if _is_due(config.sample.every_steps, done):
                watch.set_phase("sample", done)
                throughput.exclude(write_samples, trainer, done)
    return done, 0


def _build_profiler(ctx: RunContext) -> StepProfiler:
    trace = ctx.run.path / "profile" / f"rank-{ctx.dist_ctx.rank_info.rank}.json"
    return StepProfiler(ctx.config.log.profile_window, trace, ctx.dist_ctx.device, ctx.console.info)


def _run_step(trainer: Trainer, throughput: "_Throughput", accumulator: MetricsAccumulator, step: int) -> tuple[float, Tensor]:
    """Step `step` (from 0) on the next batch. Returns its learning rate, and the gradient norm on the device."""
    began = time.perf_counter()
    trainer.ctx.watch.set_phase("data", step)
    micro_batches = trainer.batch_source.batches(step + trainer.bad_step_detector.batch_offset)
    throughput.add_tokens(micro_batches)
    lr, num_graphs = trainer.learning_rate(step), compiled_graph_count()
    grad_norm, _ = train_step(
        trainer.parallel_model,
        trainer.optimizer,
        micro_batches,
        trainer.objective.num_items,
        lr=lr,
        max_grad_norm=trainer.ctx.config.optimizer.max_grad_norm,
        set_phase=partial(trainer.ctx.watch.set_phase, step=step),
        before_update=trainer.checkpointer.wait_for_staging,  # a save in flight copies the weights of the step before
        is_bad_step=partial(_check_and_accumulate, trainer, accumulator, step + 1),
    )
    has_compiled = compiled_graph_count() > num_graphs
    seconds = time.perf_counter() - began
    if has_compiled or step == trainer.start_step:
        throughput.count_unusual_step(seconds)
    elif trainer.prediction_check is not None:
        trainer.prediction_check.add_step(seconds)
    if trainer.compiled and step == trainer.start_step and not has_compiled_blocks(trainer.parallel_model.model):
        trainer.ctx.console.warn("compile is on, but no block was compiled; TORCH_LOGS=dynamo,graph_breaks shows why")
    if has_compiled and step >= trainer.start_step + COMPILE_WARMUP_STEPS:
        line = "compiled again, which stalls every rank; TORCH_LOGS=recompiles shows why"
        trainer.ctx.console.info(f"step {step + 1}: {line}")
    return lr, grad_norm


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Garbage collection on one rank stalls all ranks, so it runs at log steps only. Objects that exist now are frozen:
    scanning all modules of torch at each collection takes a tenth of a second.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


def _check_and_accumulate(
    trainer: Trainer, accumulator: MetricsAccumulator, step: int, metrics: list[Metrics], grad_norm: Tensor
) -> Tensor:
    is_bad = trainer.bad_step_detector.check(step, metrics, grad_norm)
    for each in metrics:
        accumulator.add(each, skip_if=is_bad)
    return is_bad


def _is_due(every_steps: int | None, step: int) -> bool:
    return every_steps is not None and step % every_steps == 0


class _Throughput:
    """Rates of training since the last log step, without validation, saving and samples. Padding is not counted.

    The remaining time is estimated from regular steps (not the first, nor those that compiled) and from the last validation,
    save and sample.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        # Tokens, and the FLOPs that they take.
        self._work = torch.zeros(2, dtype=torch.float64, device=trainer.ctx.dist_ctx.device)
        self._usual_step_seconds: float | None = None
        # Seconds of the last validation, save and sample, by the name of the function.
        self._seconds_of: dict[str, float] = {}
        self.reset(trainer.start_step)

    def reset(self, step: int) -> None:
        """Start to measure: `step` steps are done."""
        self._start_step, self._start_time, self._excluded_seconds = step, time.perf_counter(), 0.0
        self._unusual_steps, self._unusual_seconds = 0, 0.0
        self._start_data_seconds = self._trainer.batch_source.data_wait_seconds
        self._work.zero_()

    def add_tokens(self, batches: Sequence[Batch]) -> None:
        """Count the tokens of these batches; the host does not wait."""
        for batch in batches:
            tokens = (batch.document_ids >= 0).sum().double()
            self._work += torch.stack([tokens, tokens * self._trainer.flops_per_token(batch.sequence_length)])

    def count_unusual_step(self, seconds: float) -> None:
        """Leave this step out of the estimate of the remaining time: it compiled, or was the first."""
        self._unusual_steps += 1
        self._unusual_seconds += seconds

    def exclude(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Returns `work(*arguments)`; its seconds are left out of the rates."""
        began, num_graphs = time.perf_counter(), compiled_graph_count()
        result = work(*arguments)
        seconds = time.perf_counter() - began
        self._excluded_seconds += seconds
        if compiled_graph_count() == num_graphs:
            self._seconds_of[work.__name__] = seconds
        return result

    def take(self, step: int) -> dict[str, Any]:
        """The rates, and counters that are not zero. Call it after something has waited for the device."""
        trainer, dist_ctx = self._trainer, self._trainer.ctx.dist_ctx
        steps = max(1, step - self._start_step)
        seconds = max(1e-9, time.perf_counter() - self._start_time - self._excluded_seconds)
        # Ranks that share a model count the same sequences.
        work = dist_ctx.all_reduce_sum(self._work.clone()) / trainer.parallel_model.model_parallel_size
        tokens, flops = (work / seconds).tolist()
        rates = {
            "tokens_per_second": tokens,
            "mfu": flops / dist_ctx.world_size / trainer.peak_flops if trainer.peak_flops else None,
            "step_seconds": seconds / steps,
            "data_seconds": (trainer.batch_source.data_wait_seconds - self._start_data_seconds) / steps,
            "memory_gib": peak_memory_gib(dist_ctx.device),
            "seconds_left": self._seconds_left(step, steps, seconds),
        }
        if trainer.prediction_check is not None:
            is_last = step == trainer.ctx.config.train.steps
            rates |= trainer.prediction_check.compare(step, rates["memory_gib"], is_last=is_last)
        self.reset(step)
        detector, stall_seconds = trainer.bad_step_detector, trainer.checkpointer.blocking_seconds
        counters: dict[str, float] = {"skipped_steps": detector.skipped_steps, "batch_offset": detector.batch_offset}
        counters["save_stall_seconds"] = stall_seconds
        return rates | {name: value for name, value in counters.items() if value}

    def _seconds_left(self, step: int, steps: int, seconds: float) -> float | None:
        """The remaining seconds at `step`, after `steps` that took `seconds`; None before the first regular step."""
        config = self._trainer.ctx.config
        last = config.train.steps
        if steps > self._unusual_steps:
            self._usual_step_seconds = (seconds - self._unusual_seconds) / (steps - self._unusual_steps)
        if self._usual_step_seconds is None:
            return None if step < last else 0.0
        intervals = {
            validate.__name__: config.validation.every_steps,
            Trainer.save.__name__: config.checkpoint_every_steps,
            write_samples.__name__: config.sample.every_steps,
        }
        other = (self._seconds_of.get(name, 0.0) * (last // each - step // each) for name, each in intervals.items() if each)
        return (last - step) * self._usual_step_seconds + sum(other)
