"""Which steps are bad.

A step whose loss or gradient norm is not finite, or whose loss is a spike, is skipped and counted.
After several in a row the run rolls back to a checkpoint and goes on with later batches (as PaLM
did, arXiv 2204.02311, section 5.1). A step is checked on the device and the result is read one step
later, so that the host does not wait for it. The check uses sums over all ranks, so all ranks
decide the same.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmforge.core.data.batch import Metrics
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.files.atomic_files import atomic_write_json
from lmforge.core.options.sections import SPIKE_WINDOW_STEPS

# What a run that ends of them says.
IN_A_ROW = "bad steps in a row"


@dataclass(frozen=True)
class BadStep:
    """A step that was skipped: its number (from 1), the index of its batch (from 0), and its loss
    and gradient norm.
    """

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

    def write(self, folder: Path, batch: dict[str, Any]) -> Path:
        """Write it and the `batch` description to a file for `lmforge show data`.

        Returns the file's path.
        """
        path = folder / f"step-{self.step:08d}-batch-{self.batch_index}.json"
        path.parent.mkdir(exist_ok=True)
        numbers = {"loss": repr(self.loss), "grad_norm": repr(self.grad_norm)}
        atomic_write_json(path, {"step": self.step, "reason": self.reason, **numbers, **batch})
        return path


class BadStepDetector:
    """Checks every step and counts the bad ones.

    skipped_steps          bad steps so far, whose updates were skipped
    consecutive_bad_steps  bad steps in a row, up to the last one that was read
    batch_offset           step k trains on batch k + batch_offset: a rollback repeats steps, and
                           goes on with later batches
    rollbacks              times the run has rolled back
    """

    def __init__(
        self,
        dist_ctx: DistributedContext,
        *,
        spike_sigmas: float | None,
        window_steps: int = SPIKE_WINDOW_STEPS,
    ) -> None:
        self.skipped_steps = 0
        self.consecutive_bad_steps = 0
        self.batch_offset = 0
        self.rollbacks = 0
        self._dist_ctx = dist_ctx
        self._spike_sigmas = spike_sigmas
        # Losses of good steps, the newest last; NaN where there was none yet.
        self._recent_losses = torch.full(
            (window_steps if spike_sigmas else 0,),
            torch.nan,
            dtype=torch.float64,
            device=dist_ctx.device,
        )
        self._pending: deque[tuple[int, int, Tensor, torch.cuda.Event | None]] = deque()

    def check(self, step: int, metrics: Sequence[Metrics], gradient_norm: Tensor) -> Tensor:
        """Whether step `step` (from 1) is bad: bool, on the device.

        `metrics` are this rank's, of each micro-batch.
        """
        pairs = [each["loss"] for each in metrics if "loss" in each]
        losses = [torch.stack([part.detach().double() for part in pair]) for pair in pairs]
        device = self._dist_ctx.device
        total = (
            torch.stack(losses).sum(0)
            if losses
            else torch.zeros(2, dtype=torch.float64, device=device)
        )
        total, count = self._dist_ctx.all_reduce_sum(total)
        loss = total / count.clamp(min=1)
        norm = gradient_norm.double()
        bad = ~(torch.isfinite(loss) & torch.isfinite(norm))
        if self._spike_sigmas:
            bad = bad | self._is_spike(loss)
            self._recent_losses = torch.where(
                bad, self._recent_losses, torch.cat([self._recent_losses[1:], loss[None]])
            )
        values = torch.stack([bad.double(), loss, norm])
        event = None
        if values.is_cuda:
            values = torch.empty(3, dtype=torch.float64, pin_memory=True).copy_(
                values, non_blocking=True
            )
            event = torch.cuda.current_stream().record_event()
        self._pending.append((step, step - 1 + self.batch_offset, values, event))
        return bad

    def _is_spike(self, loss: Tensor) -> Tensor:
        assert self._spike_sigmas is not None
        known = ~self._recent_losses.isnan()
        count = known.sum()
        mean = self._recent_losses.nansum() / count.clamp(min=1)
        deviation = (
            torch.where(known, self._recent_losses - mean, 0.0).square().sum() / count.clamp(min=1)
        ).sqrt()
        # The standard deviation of a few losses is not reliable.
        return (count * 2 >= len(self._recent_losses)) & (
            loss > mean + self._spike_sigmas * deviation
        )

    def take_bad_steps(self, wait: bool, max_consecutive: int) -> list[BadStep]:
        """The bad steps among those checked before the last one; with `wait` also the last, for
        which the host waits.

        After `max_consecutive` in a row later steps are not read, so the result does not depend on
        when this is called.
        """
        bad_steps: list[BadStep] = []
        while (
            len(self._pending) > (0 if wait else 1) and self.consecutive_bad_steps < max_consecutive
        ):
            step, batch, values, event = self._pending.popleft()
            if event is not None:
                event.synchronize()
            bad, loss, norm = values.tolist()
            self.consecutive_bad_steps = self.consecutive_bad_steps + 1 if bad else 0
            self.skipped_steps += bool(bad)
            if bad:
                bad_steps.append(BadStep(step, batch, loss, norm))
        return bad_steps

    @property
    def counters(self) -> dict[str, float]:
        """What metrics.jsonl has of it."""
        return {"skipped_steps": self.skipped_steps, "batch_offset": self.batch_offset}

    def rolled_back_to(self, step: int, next_batch: int) -> None:
        """The run rolled back to `step` and goes on with batch `next_batch`."""
        self.batch_offset = next_batch - step
        self.consecutive_bad_steps = 0
        self._pending.clear()
        self.rollbacks += 1

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, so that a resumed run decides the same.

        All checked steps have been read.
        """
        return {
            "skipped_steps": self.skipped_steps,
            "consecutive_bad_steps": self.consecutive_bad_steps,
            "rollbacks": self.rollbacks,
            "losses": [None if math.isnan(loss) else loss for loss in self._recent_losses.tolist()],
        }

    def load_state_dict(self, state: Mapping[str, Any], batch_offset: int) -> None:
        self.skipped_steps = state["skipped_steps"]
        self.consecutive_bad_steps = state["consecutive_bad_steps"]
        self.rollbacks = state["rollbacks"]
        self.batch_offset = batch_offset
        self.load_losses(state)

    def load_losses(self, state: Mapping[str, Any]) -> None:
        """Load the newest losses of a checkpoint, as many as fit in this run's window."""
        losses = [math.nan if loss is None else loss for loss in state["losses"]][
            -len(self._recent_losses) :
        ]
        if len(self._recent_losses) and losses:
            self._recent_losses[-len(losses) :] = torch.tensor(losses, dtype=torch.float64)
