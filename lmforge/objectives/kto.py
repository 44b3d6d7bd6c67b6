"""Learning from completions that are labelled desirable or undesirable, one at a time: KTO (arXiv 2402.01306).

In a batch the documents of a sequence are numbered so that 2i is a prompt with its completion, and 2i + 1 the mismatched
one: the same prompt with the completion of another document of the same sequence (the completions, rotated by one). The
mismatched completions' log-ratios estimate the KL divergence from the reference, against which gains and losses are
measured. The estimate is made for each sequence, so that it is the same for any split of the batch; TRL makes it over all
sequences that happen to share a micro-batch, and averages over ranks.
"""

import torch
from torch import Tensor

from lmforge.data.batch import Batch, Metrics
from lmforge.data.labels import IGNORE_INDEX
from lmforge.model.layers import LanguageModel
from lmforge.objectives.logprobs import document_label_counts, document_sums
from lmforge.objectives.objective import label_logprobs
from lmforge.objectives.preference import reference_gap, split_pairs


class KTOObjective:
    """KTO as an objective. Batches bring the extras "reference_logprobs" and "kto_labels" (1 desirable, 0 not; constant in a
    document)."""

    def __init__(self, *, beta: float, desirable_weight: float, undesirable_weight: float) -> None:
        self._beta, self._desirable_weight, self._undesirable_weight = beta, desirable_weight, undesirable_weight

    def num_items(self, batch: Batch) -> Tensor:
        """Number of labelled completions, an fp32 scalar on the batch's device."""
        num_labels, _ = split_pairs(document_label_counts(batch.labels, batch.document_ids))
        return (num_labels > 0).sum().float()

    def loss(self, model: LanguageModel, batch: Batch) -> tuple[Tensor, Metrics]:
        """(sum over completions, metrics as (sum, count) pairs). A batch without completions gives 0, not NaN.

        The sum is of w_d (1 − σ(β(x − z))) where desirable and w_u (1 − σ(β(z − x))) where not: x is log π − log reference of
        a completion, z the KL divergence, clamped to at least 0 and not differentiated.
        """
        reference, document_ids = batch.extra("reference_logprobs"), batch.document_ids
        logprobs = label_logprobs(model, batch)
        scored = batch.labels != IGNORE_INDEX
        log_ratios, mismatched = split_pairs(document_sums(logprobs - reference * scored, document_ids))
        lengths, mismatched_lengths = split_pairs(document_label_counts(batch.labels, document_ids))
        desirable_tokens, _ = split_pairs(document_sums(batch.extra("kto_labels") * scored, document_ids))
        completion_mask, desirable, kl_mask = lengths > 0, desirable_tokens > 0, mismatched_lengths > 0
        kl_sum = torch.where(kl_mask, mismatched.detach(), 0.0).sum(1, keepdim=True)
        kl = kl_sum / kl_mask.sum(1, keepdim=True).clamp(min=1)
        gain = self._beta * (log_ratios - kl.clamp(min=0))
        desirable_losses = self._desirable_weight * (-gain).sigmoid()
        losses = torch.where(desirable, desirable_losses, self._undesirable_weight * gain.sigmoid())
        total = torch.where(completion_mask, losses, 0.0).sum()
        metrics = {
            "loss": (total.detach(), completion_mask.sum().float()),
            "kl": (kl_sum.sum(), kl_mask.sum().float()),
        }
        completion_logprobs, _ = split_pairs(document_sums(logprobs.detach(), document_ids))
        values = {"rewards": self._beta * log_ratios.detach(), "logps": completion_logprobs, "tokens": lengths}
        for side, mask in (("chosen", completion_mask & desirable), ("rejected", completion_mask & ~desirable)):
            for name, value in values.items():
                metrics[f"{name}/{side}"] = torch.where(mask, value, 0.0).sum(), mask.sum().float()
        return total, metrics | reference_gap(batch, logprobs.detach(), reference)
