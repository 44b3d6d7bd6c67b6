"""Next-token prediction. Pretraining and fine-tuning share this objective; only their labels differ."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from lmforge.data.batch import Batch, Metrics
from lmforge.data.labels import IGNORE_INDEX
from lmforge.model.layers import LanguageModel
from lmforge.objectives.cross_entropy import cross_entropy_and_z_loss
from lmforge.objectives.logprobs import token_losses
from lmforge.objectives.objective import apply_head


class NextTokenObjective:
    """Cross-entropy of every label, as a sum; with `z_loss` above 0 also the z-loss of that weight.

    `source_names` are those of a mixture's sources: each has a metric of its own for batches with `source_ids`.
    """

    def __init__(self, z_loss: float = 0.0, source_names: Sequence[str] = ()) -> None:
        self._z_loss, self._source_names = z_loss, source_names

    def num_items(self, batch: Batch) -> Tensor:
        """Number of labels, an fp32 scalar on the batch's device."""
        return (batch.labels != IGNORE_INDEX).sum().float()

    def loss(self, model: LanguageModel, batch: Batch) -> tuple[Tensor, Metrics]:
        """(sum of losses in nats, metrics as (sum, count) pairs). A batch without labels gives 0, not NaN.

        The metric "loss" is the cross-entropy alone, so that runs compare; "z_loss" is what the z-loss adds to it.
        """
        by_source = batch.source_ids is not None and bool(self._source_names)
        head_fn = partial(cross_entropy_and_z_loss, labels=batch.labels, z_loss=self._z_loss, with_token_losses=by_source)
        total, z_total, token_losses = apply_head(model, batch, head_fn)
        num_items = self.num_items(batch)
        metrics: Metrics = {"loss": (total.detach() - z_total, num_items)}
        if self._z_loss:
            metrics["z_loss"] = (z_total, num_items)
        if by_source:
            metrics |= self._losses_by_source(batch, token_losses)
        return total, metrics

    def _losses_by_source(self, batch: Batch, token_losses: Tensor) -> Metrics:
        """The loss of each source, "loss/NAME"; `token_losses` [sequences, length]."""
        assert batch.source_ids is not None
        sources, is_scored = batch.source_ids.flatten().long(), (batch.labels != IGNORE_INDEX).flatten().float()
        values = torch.stack([token_losses.detach().flatten().float(), is_scored])
        sums = values.new_zeros(2, len(self._source_names)).index_add_(1, sources, values)
        return {f"loss/{name}": (sums[0, n], sums[1, n]) for n, name in enumerate(self._source_names)}


@torch.no_grad()
def score_text(model: LanguageModel, batch: Batch, token_bytes: Tensor) -> Tensor:
    """Sums over each sequence of a batch for evaluation, fp64 [sequences, 4]: nats, labels, nats of text, bytes of text.

    `token_bytes` int32 [vocab] on the batch's device: the UTF-8 bytes of each token, 0 for special tokens. These are no text,
    so that bits per byte compare across tokenizers. There is no dropout, whatever the batch brings.
    """
    hidden = model(batch.tokens, batch.positions, batch.document_ids, document_starts=batch.document_starts)
    losses = model.lm_head(hidden, partial(token_losses, labels=batch.labels)).double()
    num_bytes = torch.where(batch.labels == IGNORE_INDEX, 0, token_bytes[batch.labels.clamp(min=0)])
    text_losses = losses.masked_fill(num_bytes == 0, 0.0)
    is_scored = batch.labels != IGNORE_INDEX
    return torch.stack([values.sum(1).double() for values in (losses, is_scored, text_losses, num_bytes)], dim=1)
