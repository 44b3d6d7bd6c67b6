"""The loop: one honest function that every stage calls. What differs between stages is in the parts it is given."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from lmforge.cluster.ranks import Ranks
from lmforge.config import BatchPlan
from lmforge.data.batch import Batch, Metrics
from lmforge.errors import RunFailed
from lmforge.parallel.engine import Spread
from lmforge.parallel.precision import compiled_graphs
from lmforge.train.guard import Guard
from lmforge.train.health import Wishes
from lmforge.train.metrics import Meter, MetricsFile, Teller, peak_memory_gib
from lmforge.train.optim import set_learning_rate, step_unless
from lmforge.train.recovery import Recovery
from lmforge.train.saves import GIVE_UP, PERMANENT, Saves
from lmforge.train.watch import Watch

# After so many steps whatever is compiled has been.
SETTLED_STEPS = 3


class Batches(Protocol):
    """Where batches come from: this rank's micro-batches of any step, and the time spent waiting for them."""

    @property
    def data_seconds(self) -> float: ...

    def batches(self, step: int) -> list[Batch]: ...


@dataclass
class Parts:
    """What the loop drives. Every `…_every` is in steps; None is never."""

    spread: Spread
    weight: Callable[[Batch], Tensor]
    optimizer: torch.optim.Optimizer
    learning_rate: Callable[[int], float]
    batches: Batches
    plan: BatchPlan
    ranks: Ranks
    watch: Watch
    teller: Teller
    metrics: MetricsFile | None
    steps: int
    clip_norm: float
    log_every: int
    validate_every: int | None
    sample_every: int | None
    guard: Guard
    bad_steps: int
    recovery: Recovery
    saves: Saves
    validate: Callable[[int], dict[str, float]]
    sample: Callable[[int], None]
    flops_per_token: float
    peak_flops: float | None
    validate_at_start: bool = False


def train_step(
    spread: Spread,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Batch],
    weigh: Callable[[Batch], Tensor],
    *,
    lr: float,
    clip_norm: float,
    mark: Callable[[str], None] = lambda phase: None,
    judge: Callable[[list[Metrics], Tensor], Tensor] | None = None,
) -> tuple[Tensor, list[Metrics]]:
    """One optimizer step over this rank's share of a global batch; `mark` hears which phase begins.

    Where `judge(metrics, gradient norm)` says on the device that the step is bad, nothing is updated.

    The gradient is that of the *sum* of losses over the whole global batch, divided once by the batch's weight, which is
    counted across micro-batches and ranks before the first backward. Returns the gradient's norm before clipping and
    the metrics of each micro-batch, on the device: the host does not wait for it.
    """
    mark("reduce")
    counted = spread.ranks.sum_(torch.stack([weigh(batch) for batch in micro_batches]).sum())
    metrics = spread.accumulate(micro_batches, (counted / spread.batch_copies).clamp(min=1.0), mark)
    mark("reduce")
    gradient_norm = spread.clip(clip_norm)
    mark("optimizer")
    set_learning_rate(optimizer, lr)
    if judge is None:
        optimizer.step()
    else:
        step_unless(optimizer, judge(metrics, gradient_norm))
    spread.zero_gradients(optimizer)
    return gradient_norm, metrics


def train(parts: Parts, start: int) -> tuple[int, int]:
    """Train from step `start` to `parts.steps`. Returns the number of steps done and the signal that stopped it, or 0.

    Between log steps the host does not wait for the device.
    """
    meter, wishes = Meter(parts.ranks), Wishes(parts.ranks)
    guard, saves = parts.guard, parts.saves
    parts.teller.start(start)
    # Collecting garbage stalls one rank and with it all of them; between log steps there is none to speak of.
    # What is here now stays: looking through all modules of torch each time would take a tenth of a second.
    gc.collect()
    gc.freeze()
    gc.disable()
    since = _Since(parts, start)
    done = start
    try:
        if start == 0 and parts.validate_at_start:
            parts.watch.mark("evaluate", 0)
            _write(parts, {"step": 0, "tokens": 0, **since.pausing(partial(parts.validate, 0))})
        while done < parts.steps:
            step = done
            parts.watch.mark("data", step)
            micro_batches = parts.batches.batches(step + guard.left_out)
            since.count(micro_batches)
            lr, graphs = parts.learning_rate(step), compiled_graphs()
            gradient_norm, _ = train_step(
                parts.spread,
                parts.optimizer,
                micro_batches,
                parts.weight,
                lr=lr,
                clip_norm=parts.clip_norm,
                mark=partial(_mark, parts, step=step),
                judge=partial(_judge, guard, meter, step + 1),
            )
            done = step + 1
            if step >= start + SETTLED_STEPS and compiled_graphs() > graphs:
                parts.teller.say(f"step {done}: compiled again, which stalls every rank; TORCH_LOGS=recompiles tells why")
            last = done == parts.steps
            parts.teller.advance(done)
            parts.watch.mark("barrier", step)
            signal, wish = wishes.agreed(saves.wish())
            if wish == GIVE_UP:
                raise RunFailed(f"step {done}: {saves.saver.failures} saves in a row have failed: {saves.saver.problem}")
            stopping = bool(last or signal)
            wish = max(wish, saves.due(done, stopping))
            if bad := guard.heard(bool(wish) or done % parts.log_every == 0, parts.bad_steps):
                for one in bad:
                    parts.recovery.tell(one)
                if guard.in_a_row >= parts.bad_steps:
                    saves.owe(wish)
                    following = bad[-1].batch + 1
                    done = since.pausing(partial(parts.recovery.go_back, max(0, bad[-1].step - guard.in_a_row)))
                    guard.go_on_from(done, following)
                    since.restart(done)
                    meter.read()
                    continue
            record: dict[str, Any] = {}
            if wish or done % parts.log_every == 0:
                record = {**meter.read(), "lr": lr, "grad_norm": float(gradient_norm), **since.read(done)}
                record |= {"skipped_steps": guard.skipped} if guard.skipped else {}
                record |= {"save_stall_seconds": saves.saver.seconds_held} if saves.saver.seconds_held else {}
                gc.collect()
                for line in parts.watch.log_step(done, record["step_seconds"], parts.spread.part):
                    parts.teller.say(line)
            if last or _due(parts.validate_every, done) or (wish and saves.validate):
                parts.watch.mark("evaluate", done)
                record |= since.pausing(partial(parts.validate, done))
            if record:
                parts.watch.mark("save", done)
                _write(parts, {"step": done, "tokens": done * parts.plan.tokens, **record})
            if wish:
                parts.watch.mark("save", done)
                since.pausing(partial(saves.save, done, record, wish == PERMANENT, stopping))
            if signal:
                return done, signal
            if _due(parts.sample_every, done):
                parts.watch.mark("sample", done)
                since.pausing(partial(parts.sample, done))
        return parts.steps, 0
    finally:
        wishes.close()
        gc.unfreeze()
        gc.enable()


def _mark(parts: Parts, phase: str, step: int) -> None:
    if phase == "optimizer":
        parts.saves.saver.before_update()
    parts.watch.mark(phase, step)


def _judge(guard: Guard, meter: Meter, step: int, metrics: list[Metrics], gradient_norm: Tensor) -> Tensor:
    bad = guard.judge(step, metrics, gradient_norm)
    for told in metrics:
        meter.add(told, unless=bad)
    return bad


def _due(every: int | None, done: int) -> bool:
    return every is not None and done % every == 0


def _write(parts: Parts, record: dict[str, Any]) -> None:
    if parts.metrics is not None:
        parts.metrics.write(record)
    parts.teller.tell(record)


class _Since:
    """Rates since the last log step, of training alone: validation, saving and samples are taken out. Padding is no token."""

    def __init__(self, parts: Parts, start: int) -> None:
        self._parts = parts
        self._step, self._began, self._paused, self._waited = start, time.perf_counter(), 0.0, 0.0
        self._tokens = torch.zeros((), dtype=torch.float64, device=parts.ranks.device)

    def count(self, batches: Sequence[Batch]) -> None:
        """These are trained on; the host does not wait."""
        for batch in batches:
            self._tokens += (batch.documents >= 0).sum()

    def pausing(self, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = work()
        self._paused += time.perf_counter() - began
        return result

    def restart(self, step: int) -> None:
        """The run went back to this step."""
        self._step, self._began, self._paused, self._waited = step, time.perf_counter(), 0.0, self._parts.batches.data_seconds
        self._tokens.zero_()

    def read(self, step: int) -> dict[str, Any]:
        """Called after something waited for the device, so that the clock means work that is done."""
        parts, now, steps = self._parts, time.perf_counter(), step - self._step
        seconds = max(1e-9, now - self._began - self._paused)
        # Ranks that share rows count each of them.
        per_second = float(parts.ranks.sum_(self._tokens.clone())) / parts.spread.batch_copies / seconds
        per_rank = per_second / parts.ranks.count
        rates = {
            "tokens_per_second": per_second,
            "mfu": per_rank * parts.flops_per_token / parts.peak_flops if parts.peak_flops else None,
            "step_seconds": seconds / max(1, steps),
            "data_seconds": (parts.batches.data_seconds - self._waited) / max(1, steps),
            "memory_gib": peak_memory_gib(parts.ranks.device),
            "seconds_left": (parts.steps - step) * seconds / max(1, steps),
        }
        self.restart(step)
        return rates
