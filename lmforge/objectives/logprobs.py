"""Log-probabilities of single tokens, differentiable, and their sums over documents: what preference and policy objectives
are made of. Next-token prediction does not pass here; its sum has a cheaper gradient (chunked.py).

As there the logits are never whole: a backward pass makes those of each chunk again, which costs one product more.
"""

from typing import Any

import torch
from torch import Tensor

from lmforge.objectives.cross_entropy import CHUNK_TOKENS, IGNORE_INDEX, accumulate_gradients, chunk_losses, loss_dtype
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
        compute = weight.to(hidden.dtype)
        logprobs = torch.empty(labels.shape, dtype=loss_dtype(hidden), device=hidden.device)
        entropy = torch.zeros_like(logprobs)
        for start in range(0, hidden.shape[0], CHUNK_TOKENS):
            rows = slice(start, start + CHUNK_TOKENS)
            losses, exponentials, sums = chunk_losses(hidden[rows], compute, labels[rows], vocab_shard, temperature)
            logprobs[rows] = -losses
            if with_entropy:
                (weighted,) = vocab_shard.all_reduce_sum(torch.xlogy(exponentials, exponentials).sum(-1, keepdim=True))
                found = (sums.log() - weighted / sums).squeeze(1)
                entropy[rows] = torch.where(labels[rows] != IGNORE_INDEX, found, 0.0)
        # The weight as it came and no copy of it: a sharded one is freed after the forward pass and gathered for this one.
        ctx.save_for_backward(hidden, weight, labels)
        ctx.part, ctx.temperature = vocab_shard, temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        hidden, weight, targets = ctx.saved_tensors
        compute = weight.to(hidden.dtype)
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight, dtype=loss_dtype(hidden)) if ctx.needs_input_grad[1] else None
        for start in range(0, hidden.shape[0], CHUNK_TOKENS):
            rows = slice(start, start + CHUNK_TOKENS)
            chunk = hidden[rows], compute, targets[rows], ctx.part
            _, exponentials, sums = chunk_losses(*chunk, ctx.temperature)
            share = torch.where(targets[rows] != IGNORE_INDEX, -upstream[0][rows] / ctx.temperature, 0.0).unsqueeze(1)
            accumulate_gradients((exponentials, sums, share), chunk, hidden_gradient[rows], weight_gradient)
        of_weight = None if weight_gradient is None else weight_gradient.to(weight.dtype)
        return hidden_gradient, of_weight, None, None, None, None


def _logprobs(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor]:
    shared = ShardedHead.from_weight(hidden, weight, labels)
    hidden = shared.hidden
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    with torch.autocast(hidden.device.type, enabled=False):
        flat, wanted = hidden.reshape(-1, hidden.shape[-1]), shared.labels.reshape(-1)
        found = _ChunkedLogprobs.apply(flat, shared.weight, wanted, shared.vocab_shard, temperature, with_entropy)
        logprobs, entropy = (shared.gather_tokens(values.view(shared.labels.shape)) for values in found)
        return logprobs, entropy


def token_logprobs(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """log p(target) of every token in nats, fp32 (fp64 if `hidden` is), shaped like `targets`; 0 where not scored.

    `hidden` [rows, length, width], `weight` [vocab, width], `targets` [rows, length] int64 with −100 where not scored.
    p is the softmax of the logits divided by `temperature`. Differentiable in `hidden` and `weight`. Of a head that is
    spread over ranks see shared_head.py; each of them gets the values of all tokens, and must go on alike with them.
    """
    return _logprobs(hidden, weight, labels, temperature, with_entropy=False)[0]


def token_logprobs_and_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """As token_logprobs, and the entropy of p at every token in nats, 0 where not scored, which is not differentiable."""
    return _logprobs(hidden, weight, labels, temperature, with_entropy=True)


def document_sums(values: Tensor, document_ids: Tensor) -> Tensor:
    """Sum of `values` [rows, length] over each document: [rows, length], at [r, d] that of document d of row r.

    `documents` int32 [rows, length] as in Batch; padding (−1) belongs to none. There are as many places as tokens, so
    that shapes are static and the host waits for nothing; those of documents that are not there are 0.
    """
    inside = torch.where(document_ids >= 0, values, 0)
    return torch.zeros_like(inside).scatter_add(1, document_ids.clamp(min=0).long(), inside)


def document_label_counts(labels: Tensor, document_ids: Tensor) -> Tensor:
    """Number of scored targets of each document, fp32 [rows, length], placed as by document_sums."""
    return document_sums((labels != IGNORE_INDEX).float(), document_ids)


def broadcast_to_tokens(values: Tensor, document_ids: Tensor) -> Tensor:
    """The other way round: for each token the value [rows, length] of its document, 0 on padding."""
    return torch.where(document_ids >= 0, values.gather(1, document_ids.clamp(min=0).long()), 0)
