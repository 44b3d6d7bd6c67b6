"""Passes over the logits of a chunk that are compiled into one kernel each, by Triton on a GPU.

Logits stay in the dtype of the head's product, bf16 in mixed precision, and are read twice and
written once: by the statistics, with an online logsumexp in fp32, and by the gradient, which takes
their place.
"""

import torch
from torch import Tensor

from lmforge.core.losses.language import HeadChunk, final_logits, softcap_slopes
from lmforge.core.losses.sharded_head import Scoring
from lmforge.core.model.attention import compiled


def chunk_class(scoring: Scoring) -> type[HeadChunk]:
    """What scores a chunk with this head."""
    return FusedHeadChunk


class FusedHeadChunk(HeadChunk):
    """HeadChunk with compiled passes.

    They keep logits in the dtype of the hidden states, and compute exponentials twice.
    """

    def _score(self, logits: Tensor) -> Tensor:
        self._logits = logits
        scoring = self._scoring
        vocab_shard = self._scoring.vocab_shard
        largest, sums, label_logits = compiled(logit_statistics)(
            logits, self._bias, self._local_labels, scoring.softcap, scoring.temperature
        )
        self._largest = vocab_shard.all_reduce_max(largest.clone())
        self._sums, label_logits = vocab_shard.all_reduce_sum(
            sums * (largest - self._largest).exp(), label_logits * self._is_local
        )
        return label_logits

    def _logit_gradient(self, softmax_scales: Tensor, label_scales: Tensor) -> Tensor:
        scoring = self._scoring
        compiled(write_logit_gradient)(
            self._logits,
            self._bias,
            self._columns,
            self.logsumexps,
            softmax_scales,
            label_scales,
            scoring.softcap,
            scoring.temperature,
        )
        return self._logits

    def _negative_entropies(self) -> Tensor:
        scoring = self._scoring
        weighted: Tensor = compiled(negative_entropies)(
            self._logits, self._bias, self._largest, scoring.softcap, scoring.temperature
        )
        return weighted


def logit_statistics(
    logits: Tensor,
    bias: Tensor | None,
    local_labels: Tensor,
    softcap: float | None,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The largest final logit of each token, the sum of exp(logit − largest), and that of its
    label: [n, 1] each.

    `local_labels` int64 [n, 1] are columns of `logits`.
    """
    values = final_logits(logits, bias, softcap, temperature)
    largest = values.amax(-1, keepdim=True)
    sums = (values - largest).exp().sum(-1, keepdim=True)
    label_bias = None if bias is None else bias[local_labels]
    return (
        largest,
        sums,
        final_logits(logits.gather(1, local_labels), label_bias, softcap, temperature),
    )


def negative_entropies(
    logits: Tensor, bias: Tensor | None, largest: Tensor, softcap: float | None, temperature: float
) -> Tensor:
    """The sum of e · log e over the vocabulary [n, 1], where e = exp(final logit − largest)."""
    shifted = final_logits(logits, bias, softcap, temperature) - largest
    return (shifted.exp() * shifted).sum(-1, keepdim=True)


def write_logit_gradient(
    logits: Tensor,
    bias: Tensor | None,
    local_labels: Tensor,
    logsumexps: Tensor,
    softmax_scales: Tensor,
    label_scales: Tensor,
    softcap: float | None,
    temperature: float,
) -> None:
    """softmax_scales · softmax − label_scales · one-hot, back through soft-capping, in place of
    `logits`.

    `local_labels`, `logsumexps` and the scales are [n, 1]; a label below 0 or above the columns is
    in another shard.
    """
    values = final_logits(logits, bias, softcap, temperature)
    columns = torch.arange(logits.shape[1], device=logits.device)
    gradient = (values - logsumexps).exp() * softmax_scales - torch.where(
        columns == local_labels, label_scales, 0.0
    )
    if softcap is not None:
        gradient = gradient * softcap_slopes(values, softcap, temperature)
    logits.copy_(gradient)
