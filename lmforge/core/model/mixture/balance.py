"""What keeps the experts of mixtures equally busy while they train.

Each way is independent of how the global batch is split.

The auxiliary loss (Switch, arXiv 2101.03961), of a row of the batch: experts · Σ over experts of
(its fraction of the row's choices) · (its mean probability): 1 where all are alike. A batch's loss
is the mean over its rows that are not all padding, and over the mixtures of the model, times
router_aux_loss_coef. For one row, one mixture and a top-k it is transformers'
`load_balancing_loss_func` divided by k. Probabilities are scores that sum to 1.

Over the global batch (arXiv 2501.11873): with the fractions of all choices of the global batch
before, at first all alike, and mean probabilities of all tokens. The router z-loss (ST-MoE, arXiv
2202.08906): the square of log Σ exp of a token's logits, averaged over tokens and mixtures. Without
a loss (arXiv 2408.15664): after each step the bias of an expert that got less than the mean of the
global batch's choices grows by bias_update_speed, and that of one that got more shrinks.

Losses are sums that are divided once, by the rows or tokens of the global batch. Padding is not
counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.tensor import DTensor

from lmforge.core.data.batch import Batch
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.model.config import ModelConfig


@dataclass(frozen=True)
class BalanceConfig:
    """The options of a run (core/options/sections.py); 0 turns one off."""

    scope: str = "row"  # or "global_batch"
    z_loss_coef: float = 0.0
    bias_update_speed: float = 0.0


class Balance:
    """How evenly the tokens of a step go to the experts of a model: counts them, adds the auxiliary
    loss, and moves the biases of routers.

    `mixtures` are those of the model in the order of layers; those of another rank's stage of a
    pipeline are there, too.

    groups: ranks that have parts of the same rows; of several, each splits what a rank of the one
    before it has.
    counts: int64 [mixtures, experts]: the choices of this rank's tokens in training steps.
    previous: int64 [mixtures, experts]: those of the global batch before; zeros at first, and where
    they are not needed.
    """

    groups: tuple[dist.ProcessGroup, ...] = ()
    config = BalanceConfig()

    def __init__(self, config: ModelConfig, mixtures: Sequence[Any]) -> None:
        self._coefficient = config.router_aux_loss_coef if config.output_router_logits else 0.0
        self._has_biases = config.family.sigmoid_router
        self._top_k = config.num_experts_per_tok
        self._mixtures = mixtures
        self._num_experts = config.num_experts
        self.row_weight = self.token_weight = torch.zeros((), device="cpu")
        self.count_on(torch.device("meta"))
        for mixture in mixtures:
            mixture.balance = self

    @property
    def has_loss(self) -> bool:
        return bool(self._coefficient or self.config.z_loss_coef)

    @property
    def is_global(self) -> bool:
        """Whether the loss is over the global batch."""
        return bool(self._coefficient) and self.config.scope == "global_batch"

    @property
    def _moves_biases(self) -> bool:
        return self._has_biases and self.config.bias_update_speed > 0

    def count_on(self, device: torch.device) -> None:
        """Let the mixtures count their choices, which they compute on this device."""
        shape = len(self._mixtures), self._num_experts
        self.counts, self.previous, self._before = (
            torch.zeros(shape, dtype=torch.long, device=device) for _ in range(3)
        )
        self._fractions = torch.zeros(shape, device=device)
        for mixture, counts, fractions in zip(
            self._mixtures, self.counts, self._fractions, strict=True
        ):
            mixture.counts = None if device.type == "meta" else counts
            mixture.fractions = fractions

    @staticmethod
    def count(batches: Sequence[Batch]) -> Tensor:
        """The rows of batches that are not all padding, and the tokens that are none: fp32 [2]."""
        counts = []
        for batch in batches:
            is_token = batch.document_ids >= 0
            counts.append(torch.stack([is_token.any(1).sum(), is_token.sum()]).float())
        return torch.stack(counts).sum(0)

    def begin_step(self, num_rows: Tensor, num_tokens: Tensor, divide_factor: float) -> None:
        """Begin a step whose global batch has so many rows and tokens, scalars; gradients will be
        divided by `divide_factor` when ranks are summed.
        """
        self.row_weight = (
            self._coefficient / len(self._mixtures) * divide_factor / num_rows.clamp(min=1.0)
        )
        self.token_weight = divide_factor / len(self._mixtures) / num_tokens.clamp(min=1.0)
        if self._moves_biases or self.is_global:
            self._before.copy_(self.counts)
            total = self.previous.sum(1, keepdim=True)
            fractions = self.previous / total.clamp(min=1)
            self._fractions.copy_(torch.where(total > 0, fractions, 1 / self._num_experts))

    @torch.no_grad()
    def end_step(self, dist_ctx: DistributedContext, skip: Tensor | None) -> None:
        """Update what follows from the choices of the global batch; all ranks call it.

        Not if `skip`, a bool on the device.
        """
        if not (self._moves_biases or self.is_global):
            return
        counts = dist_ctx.all_reduce_sum(self.counts - self._before)
        skipped = torch.zeros_like(self.counts, dtype=torch.bool)
        skipped = skipped if skip is None else skipped | skip
        self.previous.copy_(torch.where(skipped, self.previous, counts))
        if self._moves_biases:
            moves = torch.where(
                skipped, 0, (counts.sum(1, keepdim=True) - counts * self._num_experts).sign()
            )
            for mixture, move in zip(self._mixtures, moves, strict=True):
                bias = mixture.get_router().e_score_correction_bias  # None in another rank's stage
                if bias is not None:
                    local = bias.to_local() if isinstance(bias, DTensor) else bias
                    local += self.config.bias_update_speed * move

    def add_to(
        self,
        x: Tensor,
        scores: Tensor,
        logits: Tensor,
        chosen: Tensor,
        is_token: Tensor,
        fractions: Tensor,
    ) -> Tensor:
        """x, whose backward pass adds the gradients of the losses.

        scores and logits [sequences · length, experts] of all experts, chosen [sequences · length,
        top-k] of them; is_token [sequences, length], false for padding; fractions [experts] of the
        global batch before.
        """
        if not self.has_loss:
            return x
        weights = is_token.to(scores.dtype)
        loss = torch.zeros((), dtype=scores.dtype, device=scores.device)
        if self._coefficient:
            probabilities = scores / scores.sum(-1, keepdim=True) if self._has_biases else scores
            sums = (probabilities.unflatten(0, is_token.shape) * weights.unsqueeze(-1)).sum(1)
            if self.is_global:
                loss = (fractions * sums).sum() * (
                    self._coefficient * scores.shape[-1] * self.token_weight
                )
            else:
                loss = self._row_losses(sums, chosen, weights) * self.row_weight
        if self.config.z_loss_coef:
            squares = logits.logsumexp(-1).square() * weights.flatten()
            loss = loss + squares.sum() * (self.config.z_loss_coef * self.token_weight)
        result: Tensor = _AddLoss.apply(x, loss)
        return result

    def _row_losses(self, sums: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The sum of the losses of rows whose probabilities sum to `sums` [rows, experts]."""
        counted = weights.repeat_interleave(self._top_k, dim=1)
        counts = torch.zeros_like(sums).scatter_add(1, chosen.view(len(weights), -1), counted)
        for group in self.groups:
            counts = all_reduce(counts, "sum", group)
        # Each token has as many choices. Linear in this rank's scores, so that its part of the loss
        # is known to it alone.
        num_choices = counts.sum(1, keepdim=True).clamp(min=1.0)
        return sums.shape[-1] * (counts / num_choices * sums / (num_choices / self._top_k)).sum()

    def describe(self) -> str:
        """What balances the experts, in words."""
        over = (
            "the global batch, with the choices of the one before" if self.is_global else "each row"
        )
        words = (
            [f"balanced by a loss of weight {self._coefficient:g} over {over}"]
            if self._coefficient
            else []
        )
        if self._moves_biases:
            words.append(
                f"balanced by biases that move by {self.config.bias_update_speed:g} a step"
            )
        words = words or ["no loss balances them (model.output_router_logits is false)"]
        if self.config.z_loss_coef:
            words.append(f"router z-loss of weight {self.config.z_loss_coef:g}")
        return ", ".join(words) + (", which the metric loss is without" if self.has_loss else "")


class _AddLoss(torch.autograd.Function):
    """The identity, whose backward pass is as if `loss` had been added to the loss of the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        dtype, device = ctx.like
        return gradients[0], torch.ones((), dtype=dtype, device=device)
