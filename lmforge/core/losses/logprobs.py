"""Log-probabilities of single tokens, and their sums over documents: what preference and policy
objectives are made of.

The full logits never exist here either, but a backward pass computes those of each chunk again,
which costs one more matrix product. Next-token prediction therefore uses the cheaper
`cross_entropy_and_z_loss` (language.py).
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmforge.core.data.batch import Batch
from lmforge.core.data.labels import IGNORE_INDEX
from lmforge.core.losses.language import HeadGradients, head_chunks, loss_dtype
from lmforge.core.losses.sharded_head import Scoring, ShardedHead, sum_over_ranks
from lmforge.core.model.attention import ContextParallel
from lmforge.core.model.layers import PLAIN_HEAD, HeadOptions, LanguageModel


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        scoring: Scoring,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(labels.shape, dtype=loss_dtype(hidden), device=hidden.device)
        entropy = torch.zeros_like(logprobs)
        for chunk in head_chunks(hidden, weight, bias, labels, scoring):
            logprobs[chunk.tokens] = -chunk.losses
            if with_entropy:
                entropy[chunk.tokens] = chunk.entropies()
            del chunk  # and its logits, before there are those of the next
        # The weight itself and no copy: a sharded weight is freed after the forward pass and
        # gathered again for this one.
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.scoring = scoring
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels = ctx.saved_tensors
        gradients = HeadGradients(ctx.needs_input_grad, hidden, bias)
        for chunk in head_chunks(hidden, weight, bias, labels, ctx.scoring):
            chunk.add_gradients(-upstream[0][chunk.tokens] / ctx.scoring.temperature, gradients)
            del chunk
        weight_gradient = None if gradients.weight is None else gradients.weight.to(weight.dtype)
        bias_gradient = None if gradients.bias is None else gradients.bias.to(bias.dtype)
        return gradients.hidden, weight_gradient, bias_gradient, None, None, None


def token_logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    *,
    with_entropy: bool = True,
    head: HeadOptions = PLAIN_HEAD,
) -> tuple[Tensor, Tensor]:
    """`token_logprobs`, and the entropy of p at every token in nats, 0 where not scored.

    The entropy is not differentiable.
    """
    sharded = ShardedHead.from_weight(hidden, weight, labels, head)
    inputs = sharded.inputs(temperature)
    with torch.autocast(hidden.device.type, enabled=False):
        logprobs, entropy = _ChunkedLogprobs.apply(*inputs, with_entropy)
    return sharded.gather_tokens(logprobs), sharded.gather_tokens(entropy)


def token_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0, head: HeadOptions = PLAIN_HEAD
) -> Tensor:
    """log p(label) of every token in nats: fp32 (fp64 if `hidden` is) of the shape of `labels`, 0
    where not scored.

    `hidden` [sequences, length, width], `weight` [vocab, width], `labels` int64 [sequences,
    length], IGNORE_INDEX where a token is not scored; `head` says what else makes logits. p is the
    softmax of the logits divided by `temperature`. Differentiable in `hidden`, `weight` and the
    head's bias. With a sharded head (sharded_head.py) every rank gets the values of all tokens, and
    must use them as the others do.
    """
    return token_logprobs_and_entropy(hidden, weight, labels, temperature, with_entropy=False, head=head)[0]


@torch.no_grad()
def token_losses(hidden: Tensor, weight: Tensor, labels: Tensor, head: HeadOptions = PLAIN_HEAD) -> Tensor:
    """−log p(label) of every token, as `token_logprobs` gives log p(label). Not differentiable."""
    return -token_logprobs(hidden, weight, labels, head=head)


@torch.no_grad()
def score_text(model: LanguageModel, batch: Batch, token_bytes: Tensor) -> Tensor:
    """Sums over each sequence of a batch for evaluation, fp64 [sequences, 4]: nats, labels, nats of
    text, bytes of text.

    `token_bytes` int32 [vocab] on the batch's device: the UTF-8 bytes of each token, 0 for special
    tokens. These are no text, so that bits per byte compare across tokenizers. There is no dropout,
    whatever the batch brings.
    """
    hidden = model(batch.tokens, batch.positions, batch.document_ids, document_starts=batch.document_starts)
    losses = model.lm_head(hidden, partial(token_losses, labels=batch.labels)).double()
    num_bytes = torch.where(batch.labels == IGNORE_INDEX, 0, token_bytes[batch.labels.clamp(min=0)])
    text_losses = losses.masked_fill(num_bytes == 0, 0.0)
    is_scored = batch.labels != IGNORE_INDEX
    return torch.stack([values.sum(1).double() for values in (losses, is_scored, text_losses, num_bytes)], dim=1)


def document_sums(values: Tensor, document_ids: Tensor, context_parallel: ContextParallel | None = None) -> Tensor:
    """Sum of `values` [sequences, length] over each document: [sequences, length], at [s, d] that
    of document d in sequence s.

    `document_ids` int32 [sequences, length] as in Batch; padding (−1) belongs to no document. There
    is an entry for each token, 0 where there is no such document, so that shapes are static and the
    host need not wait for the device. With context parallelism the tensors are this rank's parts,
    and the result is of full sequences, the same on all ranks. Each must use it as the others do,
    and has the gradient of its own tokens.
    """
    ranks = 1 if context_parallel is None else context_parallel.group.size()
    values = torch.where(document_ids >= 0, values, 0)
    sums = values.new_zeros(len(values), values.shape[1] * ranks).scatter_add(1, document_ids.clamp(min=0).long(), values)
    return sums if context_parallel is None else sum_over_ranks(sums, context_parallel.group)


def document_label_counts(labels: Tensor, document_ids: Tensor, context_parallel: ContextParallel | None = None) -> Tensor:
    """Number of labels of each document, fp32 [sequences, length], indexed as by `document_sums`."""
    return document_sums((labels != IGNORE_INDEX).float(), document_ids, context_parallel)


def broadcast_to_tokens(values: Tensor, document_ids: Tensor) -> Tensor:
    """The inverse: for each token the value of its document, from `values` by document [sequences,
    length]; 0 on padding.
    """
    return torch.where(document_ids >= 0, values.gather(1, document_ids.clamp(min=0).long()), 0)
