"""Log-probabilities of single tokens, and their sums over documents: what preference and policy objectives are made of.

The full logits never exist here either, but a backward pass computes those of each chunk again, which costs one more matrix
product. Next-token prediction therefore uses the cheaper `cross_entropy_sum` (cross_entropy.py).
"""

from typing import Any

import torch
from torch import Tensor

from lmforge.data.labels import IGNORE_INDEX
from lmforge.objectives.cross_entropy import empty_gradients, head_chunks, loss_dtype
from lmforge.objectives.sharded_head import ShardedHead, VocabShard


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        vocab_shard: VocabShard,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(labels.shape, dtype=loss_dtype(hidden), device=hidden.device)
        entropy = torch.zeros_like(logprobs)
        for chunk in head_chunks(hidden, weight, labels, vocab_shard, temperature):
            logprobs[chunk.tokens] = -chunk.losses
            if with_entropy:
                weighted = torch.xlogy(chunk.exponentials, chunk.exponentials).sum(-1, keepdim=True)
                (weighted,) = vocab_shard.all_reduce_sum(weighted)
                chunk_entropy = (chunk.sums.log() - weighted / chunk.sums).squeeze(1)
                entropy[chunk.tokens] = torch.where(chunk.is_scored, chunk_entropy, 0.0)
        # The weight itself and no copy: a sharded weight is freed after the forward pass and gathered again for this one.
        ctx.save_for_backward(hidden, weight, labels)
        ctx.vocab_shard, ctx.temperature = vocab_shard, temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        hidden_gradient, weight_gradient = empty_gradients(ctx, hidden, weight)
        for chunk in head_chunks(hidden, weight, labels, ctx.vocab_shard, ctx.temperature):
            chunk.add_gradients(-upstream[0][chunk.tokens] / ctx.temperature, hidden_gradient, weight_gradient)
        if weight_gradient is not None:
            weight_gradient = weight_gradient.to(weight.dtype)
        return hidden_gradient, weight_gradient, None, None, None, None


def token_logprobs_and_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0, *, with_entropy: bool = True
) -> tuple[Tensor, Tensor]:
    """`token_logprobs`, and the entropy of p at every token in nats, 0 where not scored. The entropy is not differentiable."""
    head = ShardedHead.from_weight(hidden, weight, labels)
    logprobs, entropy = head.apply(_ChunkedLogprobs, temperature, with_entropy)
    return head.gather_tokens(logprobs), head.gather_tokens(entropy)


def token_logprobs(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """log p(label) of every token in nats: fp32 (fp64 if `hidden` is) of the shape of `labels`, 0 where not scored.

    `hidden` [sequences, length, width], `weight` [vocab, width], `labels` int64 [sequences, length], IGNORE_INDEX where a
    token is not scored. p is the softmax of the logits divided by `temperature`. Differentiable in `hidden` and `weight`.
    With a sharded head (sharded_head.py) every rank gets the values of all tokens, and must use them as the others do.
    """
    return token_logprobs_and_entropy(hidden, weight, labels, temperature, with_entropy=False)[0]


@torch.no_grad()
def token_losses(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """−log p(label) of every token, as `token_logprobs` gives log p(label). Not differentiable."""
    return -token_logprobs(hidden, weight, labels)


def document_sums(values: Tensor, document_ids: Tensor) -> Tensor:
    """Sum of `values` [sequences, length] over each document: [sequences, length], at [s, d] that of document d in sequence s.

    `document_ids` int32 [sequences, length] as in Batch; padding (−1) belongs to no document. There is an entry for each
    token, 0 where there is no such document, so that shapes are static and the host need not wait for the device.
    """
    values = torch.where(document_ids >= 0, values, 0)
    return torch.zeros_like(values).scatter_add(1, document_ids.clamp(min=0).long(), values)


def document_label_counts(labels: Tensor, document_ids: Tensor) -> Tensor:
    """Number of labels of each document, fp32 [sequences, length], indexed as by `document_sums`."""
    return document_sums((labels != IGNORE_INDEX).float(), document_ids)


def broadcast_to_tokens(values: Tensor, document_ids: Tensor) -> Tensor:
    """The inverse: for each token the value of its document, from `values` by document [sequences, length]; 0 on padding."""
    return torch.where(document_ids >= 0, values.gather(1, document_ids.clamp(min=0).long()), 0)
