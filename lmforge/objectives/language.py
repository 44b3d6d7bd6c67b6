"""Next-token prediction. Pretraining and fine-tuning share this objective; only their labels differ."""

from functools import partial

import torch
from torch import Tensor

from lmforge.data.batch import Batch, Metrics
from lmforge.data.labels import IGNORE_INDEX
from lmforge.model.layers import LanguageModel
from lmforge.objectives.cross_entropy import cross_entropy_sum
from lmforge.objectives.logprobs import token_losses
from lmforge.objectives.objective import apply_head


class NextTokenObjective:
    """Cross-entropy of every label, as a sum."""

    def num_items(self, batch: Batch) -> Tensor:
        """Number of labels, an fp32 scalar on the batch's device."""
        return (batch.labels != IGNORE_INDEX).sum().float()

    def loss(self, model: LanguageModel, batch: Batch) -> tuple[Tensor, Metrics]:
        """(sum of losses in nats, metrics as (sum, count) pairs). A batch without labels gives 0, not NaN."""
        total = apply_head(model, batch, partial(cross_entropy_sum, labels=batch.labels))
        return total, {"loss": (total.detach(), self.num_items(batch))}


@torch.no_grad()
def score_text(model: LanguageModel, batch: Batch, token_bytes: Tensor) -> Tensor:
    """Sums over a batch for evaluation, fp64 [4]: nats, labels, nats of text, bytes of text.

    `token_bytes` int32 [vocab] on the batch's device: the UTF-8 bytes of each token, 0 for special tokens. These are no text,
    so that bits per byte compare across tokenizers. There is no dropout, whatever the batch brings.
    """
    hidden = model(batch.tokens, batch.positions, batch.document_ids)
    losses = model.lm_head(hidden, partial(token_losses, labels=batch.labels)).double()
    num_bytes = torch.where(batch.labels == IGNORE_INDEX, 0, token_bytes[batch.labels.clamp(min=0)])
    text_losses = losses.masked_fill(num_bytes == 0, 0.0)
    num_labels = (batch.labels != IGNORE_INDEX).sum().double()
    return torch.stack([losses.sum(), num_labels, text_losses.sum(), num_bytes.sum().double()])
