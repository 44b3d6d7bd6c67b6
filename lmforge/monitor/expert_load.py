"""How many tokens each expert of a mixture gets, and a line where one gets none.

A mixture counts the choices of its router in the training step itself (model/mixture/experts.py); here the counts of all ranks
are added up at log steps.
"""

import torch
from torch import Tensor

from lmforge.cluster.distributed import DistributedContext
from lmforge.errors import name_some
from lmforge.model.layers import LanguageModel
from lmforge.model.mixture.experts import MixtureOfExperts

# After so many steps without a token an expert is called dead.
DEAD_AFTER_STEPS = 100


class ExpertLoad:
    """Of a model whose mixtures it makes count. Every rank has one; in a pipeline the mixtures of other ranks count there."""

    def __init__(self, model: LanguageModel, dist_ctx: DistributedContext) -> None:
        config = model.config
        self._dist_ctx, self._chosen = dist_ctx, config.num_experts_per_tok
        self._layers = [layer for layer, sparse in enumerate(config.sparse_layers) if sparse]
        shape = len(self._layers), config.num_experts
        self._counts = torch.zeros(shape, dtype=torch.long, device=dist_ctx.device)
        for layer, counts in zip(self._layers, self._counts, strict=True):
            mixture = getattr(model.blocks[layer], "mlp", None)  # None in a block of another rank's stage
            if isinstance(mixture, MixtureOfExperts):
                mixture.counts = counts
        self._idle_steps = torch.zeros(shape, dtype=torch.long)
        self._last_step: int | None = None

    def take(self, step: int) -> tuple[dict[str, float], list[str]]:
        """Metrics of the steps since the last call, by name, and lines about experts that have become dead. All ranks call it.

        For each mixture: "experts/fullest/LAYER" and "experts/emptiest/LAYER", fractions of the tokens that went to these, and
        "experts/entropy/LAYER", of the choices, in parts of the largest possible; and "experts/dead", their number in all.
        """
        counts = self._dist_ctx.all_reduce_sum(self._counts.clone()).cpu()
        self._counts.zero_()
        steps = 0 if self._last_step is None else step - self._last_step
        self._last_step = step
        was_dead = self._idle_steps >= DEAD_AFTER_STEPS
        self._idle_steps = torch.where(counts > 0, 0, self._idle_steps + max(0, steps))
        dead = self._idle_steps >= DEAD_AFTER_STEPS
        record = {"experts/dead": float(dead.sum())}
        for layer, choices in zip(self._layers, counts.double(), strict=True) if counts.any() else ():
            record |= {f"experts/{name}/{layer}": value for name, value in self._describe(choices).items()}
        return record, self._lines(dead & ~was_dead)

    def discard(self) -> None:
        """Forget what was counted: a pipeline computes meaningless inputs in its first step, to find its shapes."""
        self._counts.zero_()

    def _describe(self, choices: Tensor) -> dict[str, float]:
        total = max(float(choices.sum()), 1.0)
        entropy = -(choices / total).xlogy(choices / total).sum() / torch.tensor(max(2.0, len(choices))).log()
        of_tokens = choices / total * self._chosen
        return {"fullest": float(of_tokens.max()), "emptiest": float(of_tokens.min()), "entropy": float(entropy)}

    def _lines(self, newly_dead: Tensor) -> list[str]:
        lines = []
        for layer, dead in zip(self._layers, newly_dead, strict=True):
            if experts := dead.nonzero().flatten().tolist():
                names = name_some([*map(str, experts)], limit=8)
                lines.append(f"layer {layer}: no token went to expert {names} for {DEAD_AFTER_STEPS} steps")
        return lines
