"""The language objective: predict the next token. Pretraining and fine-tuning share it; only their targets differ."""

from functools import partial

import torch
from torch import Tensor

from lmforge.data.batch import Batch, Metrics
from lmforge.model.layers import LanguageModel
from lmforge.objectives.cross_entropy import IGNORE_INDEX, cross_entropy_sum, token_losses


class NextTokenObjective:
    """Cross-entropy of every scored target, as a sum."""

    def num_items(self, batch: Batch) -> Tensor:
        """Number of scored targets, an fp32 scalar on the batch's device."""
        return (batch.labels != IGNORE_INDEX).sum().float()

    def loss(self, model: LanguageModel, batch: Batch) -> tuple[Tensor, Metrics]:
        """(sum of losses in nats, metrics as (sum, count) pairs). A batch without targets gives 0, not NaN."""
        hidden = model(batch.tokens, batch.positions, batch.document_ids, rng_keys=batch.rng_keys)
        total = model.lm_head(hidden, partial(cross_entropy_sum, labels=batch.labels))
        return total, {"loss": (total.detach(), self.num_items(batch))}


@torch.no_grad()
def score_text(model: LanguageModel, batch: Batch, token_bytes: Tensor) -> Tensor:
    """What evaluation needs of a batch: fp64 [nats, targets, nats of text, bytes of text].

    `token_bytes` [vocab] int32 on the batch's device: the UTF-8 bytes of each token, 0 for special tokens, which are
    left out of the text so that bits per byte compare across tokenizers.
    """
    hidden = model(batch.tokens, batch.positions, batch.document_ids)
    losses = model.lm_head(hidden, partial(token_losses, labels=batch.labels)).double()
    sizes = torch.where(batch.labels == IGNORE_INDEX, 0, token_bytes[batch.labels.clamp(min=0)])
    of_text = losses.masked_fill(sizes == 0, 0.0)
    return torch.stack([losses.sum(), (batch.labels != IGNORE_INDEX).sum().double(), of_text.sum(), sizes.sum().double()])
