"""How many tokens each expert of a mixture gets, and a line where one gets none.

A mixture counts the choices of its router in the training step itself
(core/model/mixture/experts.py); here the counts of all ranks are added up at log steps.
"""

from typing import Any

import torch
from torch import Tensor

from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.errors import name_some
from lmforge.core.model.layers import LanguageModel
from lmforge.core.stages.observer import ObservedRun, Observer
from lmforge.core.stages.run_files import MetricsFile

# After so many steps without a token an expert is called dead.
DEAD_AFTER_STEPS = 100
# About as many records of all counts are written over the length of a run: one is 60 kB for 58
# layers of 256 experts.
MAX_RECORDS = 256


class ExpertLoad:
    """The load of the experts of a model, from the counts of its mixtures.

    Every rank has one; in a pipeline the mixtures of other ranks count there.
    """

    def __init__(
        self, model: LanguageModel, dist_ctx: DistributedContext, start_step: int = 0
    ) -> None:
        config = model.config
        self._dist_ctx = dist_ctx
        self._chosen = config.num_experts_per_tok
        self._layers = [layer for layer, sparse in enumerate(config.sparse_layers) if sparse]
        balance = model.balance
        assert balance is not None
        if balance.counts.is_meta:  # a model that is not distributed
            balance.count_on(dist_ctx.device)
        self._counts = balance.counts
        self._idle_steps = torch.zeros(self._counts.shape, dtype=torch.long)
        self._last_step: int | None = None
        self._taken: Tensor | None = None
        self._log_steps = start_step, start_step

    def take(self, step: int) -> tuple[dict[str, float], list[str]]:
        """Metrics of the steps since the last call, by name, and lines about experts that have
        become dead. All ranks call it.

        For each mixture: "experts/fullest/LAYER" and "experts/emptiest/LAYER", fractions of the
        tokens that went to these, and "experts/entropy/LAYER", of the choices, in parts of the
        largest possible; and "experts/dead", their number in all.
        """
        counts = self._dist_ctx.all_reduce_sum(self._counts.clone()).cpu()
        self._counts.zero_()
        self._log_steps = self._log_steps[1], step
        self._taken = counts if counts.any() else None
        steps = 0 if self._last_step is None else step - self._last_step
        self._last_step = step
        was_dead = self._idle_steps >= DEAD_AFTER_STEPS
        self._idle_steps = torch.where(counts > 0, 0, self._idle_steps + max(0, steps))
        dead = self._idle_steps >= DEAD_AFTER_STEPS
        record = {"experts/dead": float(dead.sum())}
        for layer, choices in (
            zip(self._layers, counts.double(), strict=True) if counts.any() else ()
        ):
            record |= {
                f"experts/{name}/{layer}": value for name, value in self._describe(choices).items()
            }
        return record, self._lines(dead & ~was_dead)

    def record(self, steps: int) -> dict[str, Any] | None:
        """A line of experts.jsonl with what the last `take` has counted, once in each of the
        MAX_RECORDS parts of a run of those steps: at the first log step in each, also of a run that
        was continued. None at the others, which are left out.
        """
        before, now = (each * MAX_RECORDS // steps for each in self._log_steps)
        if self._taken is None or before == now:
            return None
        return {"step": self._log_steps[1], "layers": self._layers, "counts": self._taken.tolist()}

    def discard(self, step: int) -> None:
        """Forget what was counted after a log step: a rollback makes steps again."""
        self._counts.zero_()
        self._log_steps = step, step

    def _describe(self, choices: Tensor) -> dict[str, float]:
        total = max(float(choices.sum()), 1.0)
        entropy = (
            -(choices / total).xlogy(choices / total).sum()
            / torch.tensor(max(2.0, len(choices))).log()
        )
        of_tokens = choices / total * self._chosen
        return {
            "fullest": float(of_tokens.max()),
            "emptiest": float(of_tokens.min()),
            "entropy": float(entropy),
        }

    def _lines(self, newly_dead: Tensor) -> list[str]:
        lines = []
        for layer, dead in zip(self._layers, newly_dead, strict=True):
            if experts := dead.nonzero().flatten().tolist():
                names = name_some([*map(str, experts)], limit=8)
                lines.append(
                    f"layer {layer}: no token went to expert {names} for {DEAD_AFTER_STEPS} steps"
                )
        return lines


class ExpertObserver(Observer):
    """The load of experts in the metrics of a run, and all counts in its experts.jsonl."""

    def __init__(self, run: ObservedRun) -> None:
        super().__init__(run)
        self._ctx = run.ctx
        self._load = ExpertLoad(
            run.built.parallel_model.model, run.ctx.dist_ctx, run.built.point.step
        )
        self._file = MetricsFile(run.ctx.run.experts_path) if run.ctx.dist_ctx.is_rank0 else None

    def on_rollback(self, step: int, to: int, reason: str) -> None:
        self._load.discard(to)

    def on_log(self, step: int, record: dict[str, Any]) -> None:
        load, lines = self._load.take(step)
        record |= load
        counts = self._load.record(self._ctx.config.train.steps)
        if counts is not None and self._file is not None and self._ctx.run.holds_lock():
            self._file.write(counts)
        for line in lines:
            self._ctx.console.warn(line)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
