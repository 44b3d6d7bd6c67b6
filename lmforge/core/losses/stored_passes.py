"""Passes over the logits of a chunk that are compiled for CPUs, where exponentials cost more than
anything else that is done to logits, and memory less: those of all logits are computed once and
kept for the gradient.
"""

import torch
from torch import Tensor

from lmforge.core.data.labels import stores_exponentials
from lmforge.core.losses.language import HeadChunk, final_logits, loss_dtype
from lmforge.core.losses.sharded_head import Scoring
from lmforge.core.model.attention import compiled


def chunk_class(scoring: Scoring) -> type[HeadChunk]:
    """What scores a chunk with this head: these passes neither cap logits nor see a part of the
    vocabulary.
    """
    group = scoring.vocab_shard.group
    shards = 1 if group is None else group.size()
    return StoredHeadChunk if stores_exponentials(scoring.softcap, shards) else HeadChunk


class StoredHeadChunk(HeadChunk):
    """HeadChunk with two compiled passes that compute the exponentials of all logits once, without
    soft-capping.
    """

    def _score(self, logits: Tensor) -> Tensor:
        dtype = loss_dtype(logits)
        self._logits = logits
        self._exponentials = (
            logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)
        )
        self._largest, self._sums, label_logits = compiled(store_exponentials)(
            logits, self._bias, self._local_labels, self._scoring.temperature, self._exponentials
        )
        return label_logits

    def _logit_gradient(self, softmax_scales: Tensor, label_scales: Tensor) -> Tensor:
        compiled(write_stored_gradient)(
            self._exponentials,
            self._columns,
            softmax_scales / self._sums,
            label_scales,
            self._logits,
        )
        return self._logits


def store_exponentials(
    logits: Tensor,
    bias: Tensor | None,
    local_labels: Tensor,
    temperature: float,
    exponentials: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `logit_statistics` returns; exp(logit − largest) goes to `exponentials` [n, vocab],
    which may be `logits`.
    """
    values = final_logits(logits, bias, None, temperature)
    largest = values.amax(-1, keepdim=True)
    shifted = (values - largest).exp()
    sums = shifted.sum(-1, keepdim=True)
    label_logits = values.gather(1, local_labels)
    exponentials.copy_(shifted)
    return largest, sums, label_logits


def write_stored_gradient(
    exponentials: Tensor,
    local_labels: Tensor,
    softmax_scales: Tensor,
    label_scales: Tensor,
    gradient: Tensor,
) -> None:
    """softmax_scales · exponentials − label_scales · one-hot, to `gradient` [n, vocab], which may
    be `exponentials`.

    `local_labels` and the scales are [n, 1]; a label below 0 is none.
    """
    columns = torch.arange(exponentials.shape[1], device=exponentials.device)
    gradient.copy_(
        exponentials * softmax_scales - torch.where(columns == local_labels, label_scales, 0.0)
    )
