"""The loop: one function that every stage calls.

What happens beside the training is in the callbacks that it is given.
"""

import gc
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lmforge.core.data.batch import Metrics
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.processes import (
    STOP_SIGNALS,
    handle_signals,
    read_passed_on,
    restore_signals,
)
from lmforge.core.errors import RunFailed
from lmforge.core.losses.objective import Objective
from lmforge.core.parallel.compiled import compiled_graph_count
from lmforge.core.parallel.parallel_model import ParallelModel, train_step
from lmforge.core.steps.bad_steps import IN_A_ROW, BadStepDetector
from lmforge.core.steps.callbacks import BatchSource, LoopCallbacks, RunCheckpoints, SaveRequest
from lmforge.core.steps.metrics import MetricsAccumulator, Throughput


def train(
    parallel_model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    learning_rate: Callable[[int], float],
    objective: Objective,
    batches: BatchSource,
    detector: BadStepDetector,
    checkpoints: RunCheckpoints,
    throughput: Throughput,
    callbacks: LoopCallbacks,
    *,
    start_step: int,
    steps: int,
    max_grad_norm: float,
    max_bad_steps: int,
    log_every_steps: int,
) -> tuple[int, int]:
    """Train from `start_step` steps done to `steps`.

    Returns the number of steps done, and the signal that stopped it or 0.

    `learning_rate` is that of a step (from 0). Between log steps the host runs at most one step
    ahead of the device, and does not wait for it.
    """
    dist_ctx = parallel_model.dist_ctx
    done = start_step
    first_step = start_step
    accumulator = MetricsAccumulator(dist_ctx)
    set_phase = callbacks.set_phase

    def is_bad_step(metrics: list[Metrics], grad_norm: Tensor) -> Tensor:
        is_bad = detector.check(done, metrics, grad_norm)
        for each in metrics:
            accumulator.add(each, skip_if=is_bad)
        return is_bad

    throughput.reset(done)
    with closing(StopSignals(dist_ctx)) as stop_signals, _garbage_collection_paused():
        callbacks.on_start(done)
        while done < steps:
            step = done
            done = done + 1
            began = time.perf_counter()
            callbacks.on_step_begin(done)
            set_phase("data", step)
            micro_batches = batches.batches(step + detector.batch_offset)
            throughput.add_tokens(micro_batches)
            lr = learning_rate(step)
            num_graphs = compiled_graph_count()
            grad_norm, _ = train_step(
                parallel_model,
                optimizer,
                micro_batches,
                objective.num_items,
                lr=lr,
                max_grad_norm=max_grad_norm,
                set_phase=partial(set_phase, step=step),
                # A save in flight copies the weights of the step before.
                before_update=checkpoints.wait_for_staging,
                is_bad_step=is_bad_step,
            )
            seconds = time.perf_counter() - began
            has_compiled = compiled_graph_count() > num_graphs
            if has_compiled or step == start_step:
                throughput.count_unusual_step(seconds)
            callbacks.on_weights_updated(done, seconds, has_compiled)

            set_phase("barrier", step)
            stop_signal, save_request = stop_signals.exchange(checkpoints.requested_by_clock())
            checkpoints.raise_if_ending(save_request, done)
            is_last = done == steps
            stopping = is_last or stop_signal != 0
            save_request = SaveRequest(
                max(save_request, checkpoints.requested_by_step(done, stopping))
            )
            log_is_due = bool(save_request) or done % log_every_steps == 0

            if bad_steps := detector.take_bad_steps(log_is_due, max_bad_steps):
                for bad_step in bad_steps:
                    callbacks.on_bad_step(bad_step)
                if detector.consecutive_bad_steps >= max_bad_steps:
                    checkpoints.defer(save_request)
                    reason = (
                        f"step {bad_steps[-1].step}: {detector.consecutive_bad_steps} {IN_A_ROW}"
                    )
                    done = checkpoints.roll_back(bad_steps[-1], reason)
                    first_step = min(first_step, done)
                    callbacks.on_rollback(bad_steps[-1].step, done, reason)
                    throughput.reset(done)
                    accumulator.reset()
                    continue

            if is_last and detector.consecutive_bad_steps >= done - first_step:
                which = f"all steps from step {first_step + 1} on were bad"
                raise RunFailed(
                    f"{which}, and nothing was learned; the last one: {bad_steps[-1].reason}"
                )

            record: dict[str, Any] = {}
            if log_is_due:
                record = {
                    **accumulator.reduce_and_reset(),
                    "lr": lr,
                    "grad_norm": float(grad_norm),
                    **throughput.take(done),
                }
                stalls = {"save_stall_seconds": checkpoints.blocking_seconds}
                record |= {
                    name: value for name, value in {**detector.counters, **stalls}.items() if value
                }
                gc.collect()
                callbacks.on_log(done, record)
            record |= callbacks.validate(
                done, required=is_last or (save_request != 0 and checkpoints.needs_validation)
            )
            if record:
                set_phase("save", done)
                read = (done + detector.batch_offset) * batches.global_batch_size
                callbacks.on_record(
                    done, {"step": done, "tokens": batches.dataset.tokens_until(read), **record}
                )
            if save_request:
                set_phase("save", done)
                callbacks.on_save(done, save_request == SaveRequest.KEPT)
                with throughput.excluded("save"):
                    checkpoints.save(done, record, save_request == SaveRequest.KEPT, stopping)
            callbacks.on_step_end(done, record, is_stopping=stop_signal != 0)
            if stop_signal:
                return done, stop_signal
    return done, 0


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Garbage collection on one rank stalls all ranks, so it runs at log steps only.

    Objects that exist now are frozen: scanning all modules of torch at each collection takes a
    tenth of a second.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


class StopSignals:
    """Requests of one rank that all ranks follow at the same step: to stop, by a signal, and to
    save, by the clock of rank 0.

    The handler only sets a flag: a collective in it could pair with one that the training thread
    has in flight. Requests are all-reduced at each step and read at the next one, so that no rank
    waits for them.
    """

    def __init__(self, dist_ctx: DistributedContext) -> None:
        self._dist_ctx = dist_ctx
        self._signal = 0
        self._ctrl_c = False
        self._pending: tuple[torch.Tensor, dist.Work] | None = None
        self._previous_handlers = handle_signals(STOP_SIGNALS, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._ctrl_c and number == signal.SIGINT:  # twice: leave at once
            raise KeyboardInterrupt
        self._ctrl_c |= number == signal.SIGINT
        self._signal = self._signal or read_passed_on(number)  # the first one is named

    def exchange(self, save_request: int) -> tuple[int, int]:
        """Returns (signal, save request): the largest of any rank at the last call, 0 for none, the
        same on all ranks. Called at each step.
        """
        if self._dist_ctx.control_group is None:
            return self._signal, save_request
        requested = 0, 0
        if self._pending is not None:
            flags, work = self._pending
            work.wait()
            requested = int(flags[0]), int(flags[1])
        flags = torch.tensor([self._signal, save_request], dtype=torch.int32)
        work = dist.all_reduce(
            flags, op=dist.ReduceOp.MAX, group=self._dist_ctx.control_group, async_op=True
        )
        assert work is not None
        self._pending = (flags, work)
        return requested

    def close(self) -> None:
        """Wait for the request in flight and restore the previous handlers."""
        if self._pending is not None:
            self._pending[1].wait()
            self._pending = None
        restore_signals(self._previous_handlers)
