"""The auxiliary loss that keeps experts equally busy, of each row of a batch and each mixture (Switch, arXiv 2101.03961).

Of a row: experts · Σ over experts of (its fraction of the row's choices) · (its mean probability): 1 where all are alike. A
batch's loss is the mean over its rows that are not all padding, and over the mixtures of the model, times router_aux_loss_coef.
It is a sum over rows that is divided once, by the rows of the global batch, so that it does not depend on how that was split.
For one row, one mixture and a top-k it is transformers' `load_balancing_loss_func` divided by k.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce

from lmforge.data.batch import Batch
from lmforge.model.config import ModelConfig


class Balance:
    """The weight of the loss of each row in a step: `coefficient`, a mean over mixtures, divided by the rows of the batch.

    groups: ranks that have parts of the same rows; of several, each splits what a rank of the one before it has.
    """

    groups: tuple[dist.ProcessGroup, ...] = ()

    def __init__(self, coefficient: float, num_mixtures: int) -> None:
        self._coefficient = coefficient / num_mixtures
        self.row_weight = torch.zeros((), device="cpu")

    def begin_step(self, num_rows: Tensor, divide_factor: float) -> None:
        """`num_rows` of the global batch, a scalar; gradients will be divided by `divide_factor` when ranks are summed."""
        self.row_weight = self._coefficient * divide_factor / num_rows.clamp(min=1.0)

    def add_to(self, x: Tensor, scores: Tensor, chosen: Tensor, is_token: Tensor) -> Tensor:
        """x, whose backward pass adds the gradient of the loss.

        scores [sequences · length, experts] of all experts, chosen [sequences · length, count] of them; is_token
        [sequences, length], false for padding.
        """
        experts, weights = scores.shape[-1], is_token.to(scores.dtype)
        of_rows = chosen.view(len(is_token), -1)
        counted = weights.repeat_interleave(chosen.shape[-1], dim=1)
        counts = scores.new_zeros(len(is_token), experts).scatter_add(1, of_rows, counted)
        for group in self.groups:
            counts = all_reduce(counts, "sum", group)
        # Each token has as many choices. Linear in this rank's scores, so that its part of the loss is known to it alone.
        num_choices = counts.sum(1, keepdim=True).clamp(min=1.0)
        tokens = num_choices / chosen.shape[-1]
        sums = (scores.unflatten(0, is_token.shape) * weights.unsqueeze(-1)).sum(1)
        loss = experts * (counts / num_choices * sums / tokens).sum()
        return _AddLoss.apply(x, loss * self.row_weight)


def describe_balance(config: ModelConfig) -> str:
    """What balances the experts of a mixture while it trains."""
    if not config.output_router_logits:
        return "no loss balances them (model.output_router_logits is false)"
    return f"balanced by a loss of weight {config.router_aux_loss_coef:g}, which the metric loss is without"


def count_rows(batch: Batch) -> Tensor:
    """The rows of a batch that are not all padding: an fp32 scalar."""
    return (batch.document_ids >= 0).any(1).sum().float()


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
