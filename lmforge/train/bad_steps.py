"""Which steps are bad, what is done about them, and what is told.

A step whose loss or gradient is not finite, or whose loss is a spike, changes nothing: its update is left out and
counted. After some in a row the run goes back to a checkpoint and on with later batches (as PaLM did, arXiv 2204.02311,
section 5.1). The judgement is made on the device and read one step later, so that the host does not wait for it; it
depends on what all ranks know, so that all of them judge alike.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmforge.cluster.distributed import DistributedContext
from lmforge.data.batch import Metrics


@dataclass(frozen=True)
class BadStep:
    """A step that was left out: its number from 1, the batch it was given, from 0, and why."""

    step: int
    batch_index: int
    loss: float
    grad_norm: float

    @property
    def reason(self) -> str:
        for name, value in (("loss", self.loss), ("grad_norm", self.grad_norm)):
            if not math.isfinite(value):
                return f"{name} is {value}"
        return f"loss is {self.loss:.4g}, a spike"


class BadStepDetector:
    """Judges every step and counts.

    skipped     steps left out so far        in_a_row    those just now, up to the last one heard of
    left_out    batches passed over by going back; the batch of step k is k + left_out
    rollbacks   times the run has gone back
    """

    def __init__(self, dist_ctx: DistributedContext, *, spike_sigmas: float | None, window_steps: int) -> None:
        self.skipped_steps, self.consecutive_bad_steps, self.skipped_batches, self.rollbacks = 0, 0, 0, 0
        self._dist_ctx = dist_ctx
        self._spike_sigmas = spike_sigmas
        # Losses of good steps, the newest last; NaN where there was none yet.
        self._recent_losses = torch.full(
            (window_steps if spike_sigmas else 0,), torch.nan, dtype=torch.float64, device=dist_ctx.device
        )
        self._pending: deque[tuple[int, int, Tensor, torch.cuda.Event | None]] = deque()

    def check(self, step: int, metrics: Sequence[Metrics], gradient_norm: Tensor) -> Tensor:
        """Whether step `step` (from 1) is bad: bool, on the device. `metrics` are this rank's, of each micro-batch."""
        told = [torch.stack([part.detach().double() for part in each["loss"]]) for each in metrics if "loss" in each]
        total = torch.stack(told).sum(0) if told else torch.zeros(2, dtype=torch.float64, device=self._dist_ctx.device)
        total, count = self._dist_ctx.all_reduce_sum(total)
        loss, norm = total / count.clamp(min=1), gradient_norm.double()
        bad = ~(torch.isfinite(loss) & torch.isfinite(norm))
        if self._spike_sigmas:
            bad = bad | self._is_spike(loss)
            self._recent_losses = torch.where(bad, self._recent_losses, torch.cat([self._recent_losses[1:], loss[None]]))
        values = torch.stack([bad.double(), loss, norm])
        event = None
        if values.is_cuda:
            values = torch.empty(3, dtype=torch.float64, pin_memory=True).copy_(values, non_blocking=True)
            event = torch.cuda.current_stream().record_event()
        self._pending.append((step, step - 1 + self.skipped_batches, values, event))
        return bad

    def _is_spike(self, loss: Tensor) -> Tensor:
        assert self._spike_sigmas is not None
        known = ~self._recent_losses.isnan()
        count = known.sum()
        mean = self._recent_losses.nansum() / count.clamp(min=1)
        deviation = (torch.where(known, self._recent_losses - mean, 0.0).square().sum() / count.clamp(min=1)).sqrt()
        # Of few losses one does not know how far they usually lie apart.
        return (count * 2 >= len(self._recent_losses)) & (loss > mean + self._spike_sigmas * deviation)

    def take_bad_steps(self, wait: bool, max_consecutive: int) -> list[BadStep]:
        """The bad ones of the steps that were judged before the last, or `of_all`, for which the host waits.

        After `enough` in a row no more are looked at, so that when they are heard of makes no difference.
        """
        found: list[BadStep] = []
        while len(self._pending) > (0 if wait else 1) and self.consecutive_bad_steps < max_consecutive:
            step, batch, values, event = self._pending.popleft()
            if event is not None:
                event.synchronize()
            bad, loss, norm = values.tolist()
            self.consecutive_bad_steps = self.consecutive_bad_steps + 1 if bad else 0
            self.skipped_steps += bool(bad)
            if bad:
                found.append(BadStep(step, batch, loss, norm))
        return found

    def rolled_back_to(self, step: int, next_batch: int) -> None:
        """The run went back to `done` steps done, and goes on with this batch."""
        self.skipped_batches = next_batch - step
        self.consecutive_bad_steps = 0
        self._pending.clear()
        self.rollbacks += 1

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, for a run that goes on to judge alike; with all that was heard."""
        losses = [None if math.isnan(loss) else loss for loss in self._recent_losses.tolist()]
        return {
            "skipped": self.skipped_steps,
            "in_a_row": self.consecutive_bad_steps,
            "rollbacks": self.rollbacks,
            "losses": losses,
        }

    def load_state_dict(self, state: dict[str, Any], skipped_batches: int) -> None:
        self.skipped_steps, self.consecutive_bad_steps = state.get("skipped", 0), state.get("in_a_row", 0)
        self.rollbacks, self.skipped_batches = state.get("rollbacks", 0), skipped_batches
        self.load_losses(state)

    def load_losses(self, state: dict[str, Any]) -> None:
        """Take over the losses of a checkpoint; as many as this run's window has room for."""
        losses = [math.nan if loss is None else loss for loss in state.get("losses", [])][-len(self._recent_losses) :]
        if len(self._recent_losses) and losses:
            self._recent_losses[-len(losses) :] = torch.tensor(losses, dtype=torch.float64)
