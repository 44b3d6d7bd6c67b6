"""Output head and cross-entropy together, a chunk of tokens at a time, so that the full logits never exist.

With a vocabulary of 128,000, the fp32 logits of 8,192 tokens take 4 GiB, and their gradient as much again. Here the gradient
of a chunk is computed while its logits exist, and both are freed before the next chunk. logprobs.py goes through the same
chunks where the gradient of each token's log-probability is known only later.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lmforge.data.labels import CHUNK_TOKENS, IGNORE_INDEX
from lmforge.objectives.sharded_head import ShardedHead, VocabShard


def loss_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype in which losses are computed and summed: fp32, or fp64 for a model in fp64."""
    return torch.promote_types(hidden.dtype, torch.float32)


class HeadChunk:
    """The losses of n tokens, and what their gradients need, in `loss_dtype`.

    tokens: their slice of all tokens. is_scored: bool [n], whether a token has a label. losses: −log p(label) [n], 0 where
    it has none. exponentials: exp(logit − the token's largest) [n, vocab of this shard]. sums: those of the exponentials over
    the full vocabulary [n, 1].
    """

    def __init__(
        self, tokens: slice, hidden: Tensor, weight: Tensor, labels: Tensor, vocab_shard: VocabShard, temperature: float
    ) -> None:
        self.tokens, self._hidden, self._weight = tokens, hidden[tokens], weight
        labels = labels[tokens]
        self.is_scored = labels != IGNORE_INDEX
        local_labels = (labels - vocab_shard.start).unsqueeze(1)
        # Whether this shard of the vocabulary holds the label; of an unscored token no shard does.
        self._is_local = (local_labels >= 0) & (local_labels < len(weight))
        self._local_labels = local_labels.clamp(0, len(weight) - 1)
        logits = (self._hidden @ weight.t()).to(loss_dtype(hidden))
        if temperature != 1:
            logits.div_(temperature)
        label_logits = logits.gather(1, self._local_labels) * self._is_local
        largest = vocab_shard.all_reduce_max(logits.amax(-1, keepdim=True))
        # Computed once, for the losses and for their gradients: on a CPU it costs more than any other pass over the logits.
        self.exponentials = logits.sub_(largest).exp_()
        self.sums, label_logits = vocab_shard.all_reduce_sum(self.exponentials.sum(-1, keepdim=True), label_logits)
        losses = (largest - label_logits + self.sums.log()).squeeze(1)
        self.losses = torch.where(self.is_scored, losses, 0.0)

    def add_gradients(self, upstream: Tensor | float, hidden_gradient: Tensor, weight_gradient: Tensor | None) -> None:
        """Write the chunk's rows of `hidden_gradient` [tokens, width], and add to `weight_gradient` [vocab, width].

        `upstream` is the gradient of each loss [n], ignored where there is no label. `weight_gradient` is None for a frozen
        head. Overwrites the exponentials.
        """
        scale = torch.where(self.is_scored, upstream, 0.0).unsqueeze(1).to(self.sums.dtype)
        # softmax − one-hot, in place of the exponentials.
        gradient = self.exponentials.mul_(scale / self.sums)
        gradient.scatter_add_(1, self._local_labels, -(self._is_local * scale))
        gradient = gradient.to(self._hidden.dtype)
        torch.mm(gradient, self._weight, out=hidden_gradient[self.tokens])
        if weight_gradient is None:
            return
        if weight_gradient.dtype == gradient.dtype:
            weight_gradient.addmm_(gradient.t(), self._hidden)
        else:
            weight_gradient += gradient.t() @ self._hidden


def head_chunks(
    hidden: Tensor, weight: Tensor, labels: Tensor, vocab_shard: VocabShard, temperature: float = 1.0
) -> Iterator[HeadChunk]:
    """Score `hidden` [tokens, width] by `weight` [vocab of this shard, width], CHUNK_TOKENS at a time.

    `labels` [tokens] are ids of the full vocabulary, IGNORE_INDEX where there is none. Logits are divided by `temperature`.
    """
    weight = weight.to(hidden.dtype)
    for start in range(0, len(hidden), CHUNK_TOKENS):
        yield HeadChunk(slice(start, start + CHUNK_TOKENS), hidden, weight, labels, vocab_shard, temperature)


def empty_gradients(ctx: Any, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """Tensors for the gradients of a function whose first inputs are `hidden` and `weight`; None for a frozen weight."""
    # In `loss_dtype`: in bf16, the small contributions of late chunks would vanish beside the sum of the early ones.
    weight_gradient = torch.zeros_like(weight, dtype=loss_dtype(hidden)) if ctx.needs_input_grad[1] else None
    return torch.empty_like(hidden), weight_gradient


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, vocab_shard: VocabShard) -> Tensor:
        total = torch.zeros((), dtype=loss_dtype(hidden), device=hidden.device)
        gradients = empty_gradients(ctx, hidden, weight) if any(ctx.needs_input_grad) else None
        for chunk in head_chunks(hidden, weight, labels, vocab_shard):
            total += chunk.losses.sum()
            if gradients is not None:
                chunk.add_gradients(1.0, *gradients)
        if gradients is not None:
            ctx.save_for_backward(*gradients)
            ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        scale = upstream[0]
        if weight_gradient is not None:
            weight_gradient = (weight_gradient * scale).to(ctx.weight_dtype)
        return hidden_gradient * scale.to(hidden_gradient.dtype), weight_gradient, None, None


def cross_entropy_sum(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Sum of −log p(label) over the tokens with a label, in nats: a scalar in fp32 (fp64 if `hidden` is), 0 if there is none.

    `hidden` [sequences, length, width], `weight` [vocab, width], `labels` int64 [sequences, length], IGNORE_INDEX where a
    token is not scored. With a sharded head (sharded_head.py) every rank gets the full sum.
    """
    head = ShardedHead.from_weight(hidden, weight, labels)
    return head.sum_over_tokens(head.apply(_ChunkedCrossEntropy))
