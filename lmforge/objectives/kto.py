"""Learning from completions judged one at a time as desirable or not: KTO (arXiv 2402.01306).

In a batch the documents of a row are numbered so that 2i is a completion with its prompt and 2i + 1 a mismatched one: the
same prompt with the completion of another document of the same row, as a rotation of the row's completions gives them. How
likely the mismatched ones have become estimates the KL divergence to the reference, the point from which gains and
losses are judged. The estimate is made row by row, so that it is the same for any split of the batch; TRL makes it of
all rows that happen to share a micro-batch, and averages over ranks.
"""

from functools import partial

import torch
from torch import Tensor

from lmforge.data.batch import Batch, Metrics
from lmforge.model.layers import LanguageModel
from lmforge.objectives.cross_entropy import IGNORE_INDEX
from lmforge.objectives.logprobs import document_label_counts, document_sums, token_logprobs
from lmforge.objectives.preference import reference_gap, split_pairs


def kto(
    log_ratios: Tensor,
    desirable: Tensor,
    completion_mask: Tensor,
    kl: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[Tensor, Metrics]:
    """The sum over completions of w_d (1 − σ(β(x − z))) where desirable, w_u (1 − σ(β(z − x))) where not.

    All of one shape or broadcast to it: x = `log_ratios`, log π − log reference of whole completions; `labels` bool,
    desirable; `there` bool, whether there is a completion; z = `divergence`, taken as 0 where it is less, not
    differentiated.
    """
    gain = beta * (log_ratios - kl.detach().clamp(min=0))
    losses = torch.where(desirable, desirable_weight * (-gain).sigmoid(), undesirable_weight * gain.sigmoid())
    total = torch.where(completion_mask, losses, 0.0).sum()
    metrics = {"loss": (total.detach(), completion_mask.sum().to(total.dtype))}
    for name, which in (("chosen", completion_mask & desirable), ("rejected", completion_mask & ~desirable)):
        rewards = torch.where(which, beta * log_ratios.detach(), 0.0)
        metrics[f"rewards/{name}"] = rewards.sum(), which.sum().to(total.dtype)
    return total, metrics


class KTOObjective:
    """The objective. Batches bring the extras "reference" and "label" (1 desirable, 0 not, the same in all of a document)."""

    def __init__(self, *, beta: float, desirable_weight: float = 1.0, undesirable_weight: float = 1.0) -> None:
        self._loss_fn = partial(kto, beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)

    def num_items(self, batch: Batch) -> Tensor:
        """Number of completions that are judged, an fp32 scalar on the batch's device."""
        judged, _ = split_pairs(document_label_counts(batch.labels, batch.document_ids))
        return (judged > 0).sum().float()

    def loss(self, model: LanguageModel, batch: Batch) -> tuple[Tensor, Metrics]:
        """(sum over completions, metrics as (sum, count) pairs). A batch without completions gives 0, not NaN."""
        reference = batch.extra("reference")
        hidden = model(batch.tokens, batch.positions, batch.document_ids, rng_keys=batch.rng_keys)
        logprobs = model.lm_head(hidden, partial(token_logprobs, labels=batch.labels))
        scored = batch.labels != IGNORE_INDEX
        matched, mismatched = split_pairs(document_sums(logprobs - reference * scored, batch.document_ids))
        lengths, mismatched_lengths = split_pairs(document_label_counts(batch.labels, batch.document_ids))
        labels, _ = split_pairs(document_sums(batch.extra("label") * scored, batch.document_ids))
        judged, desirable, estimates = lengths > 0, labels > 0, mismatched_lengths > 0
        found = torch.where(estimates, mismatched.detach(), 0.0).sum(1, keepdim=True)
        divergence = found / estimates.sum(1, keepdim=True).clamp(min=1)
        total, metrics = self._loss_fn(matched, desirable, judged, divergence)
        summed, _ = split_pairs(document_sums(logprobs.detach(), batch.document_ids))
        for side, which in (("chosen", judged & desirable), ("rejected", judged & ~desirable)):
            metrics[f"logps/{side}"] = torch.where(which, summed, 0.0).sum(), which.sum().float()
            metrics[f"tokens/{side}"] = torch.where(which, lengths, 0.0).sum(), which.sum().float()
        metrics["kl"] = found.sum(), estimates.sum().float()
        return total, metrics | reference_gap(batch, logprobs.detach(), reference)
