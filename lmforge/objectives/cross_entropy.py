"""Output head and cross-entropy in one, a chunk of tokens at a time, so that logits are never whole.

At a vocabulary of 128,000 the logits of 8,192 tokens are 4 GiB in fp32, and their gradient as much again. Here the
gradient of a chunk is finished while its logits are at hand, and both are gone before the next chunk. Log-probabilities
of single tokens, whose gradients come later, are in logprobs.py.
"""

from typing import Any

import torch
from torch import Tensor

from lmforge.objectives.sharded_head import ShardedHead, VocabShard

CHUNK_TOKENS = 2048
IGNORE_INDEX = -100


def chunk_losses(
    hidden: Tensor, weight: Tensor, labels: Tensor, vocab_shard: VocabShard, temperature: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [n] (0 where not scored), exp(logit − the row's highest) [n, vocab], its sums over all parts [n, 1].

    In `wide`. `weight` is that of `part` of the vocabulary; logits are divided by `temperature`. The exponentials are
    made once, for the loss and for its gradient: they cost more than any other pass over the logits on a CPU.
    """
    logits = (hidden @ weight.t()).to(loss_dtype(hidden))
    if temperature != 1:
        logits.div_(temperature)
    place, here = _local_label_index(labels, weight.shape[0], vocab_shard)
    chosen = logits.gather(1, place) * here
    highest = vocab_shard.all_reduce_max(logits.amax(-1, keepdim=True))
    exponentials = logits.sub_(highest).exp_()
    sums, chosen = vocab_shard.all_reduce_sum(exponentials.sum(-1, keepdim=True), chosen)
    losses = (highest - chosen + sums.log()).squeeze(1)
    return torch.where(labels != IGNORE_INDEX, losses, 0.0), exponentials, sums


def _local_label_index(labels: Tensor, size: int, vocab_shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Each target's row of a head of `size` rows [n, 1], and 1 where it has one, 0 where it is elsewhere or not scored."""
    places = (labels - vocab_shard.start).unsqueeze(1)
    return places.clamp(0, size - 1), (places >= 0) & (places < size)


def loss_dtype(hidden: Tensor) -> torch.dtype:
    """fp32, in which losses are computed and summed whatever the dtype of the model; fp64 for a model in fp64."""
    return torch.promote_types(hidden.dtype, torch.float32)


def accumulate_gradients(
    forward_result: tuple[Tensor, Tensor, Tensor],
    chunk: tuple[Tensor, Tensor, Tensor, VocabShard],
    hidden_gradient: Tensor,
    weight_gradient: Tensor | None,
) -> None:
    """Write the gradient of a chunk's losses to `hidden_gradient` [n, width] and add it to `weight_gradient` [vocab, width],
    which is None where the head is frozen.

    `scored` is what score_chunk gave, the exponentials, which are overwritten, and their sums, and how much each token's
    loss counts [n, 1], 0 where it is not scored; `chunk` is what score_chunk was given.
    """
    exponentials, sums, share = forward_result
    hidden, weight, targets, part = chunk
    # softmax − one-hot, in place of the exponentials.
    gradient = exponentials.mul_(share / sums)
    place, here = _local_label_index(targets, weight.shape[0], part)
    gradient.scatter_add_(1, place, -(here * share))
    gradient = gradient.to(hidden.dtype)
    torch.mm(gradient, weight, out=hidden_gradient)
    if weight_gradient is None:
        return
    if weight_gradient.dtype == gradient.dtype:
        weight_gradient.addmm_(gradient.t(), hidden)
    else:
        weight_gradient += gradient.t() @ hidden


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, vocab_shard: VocabShard) -> Tensor:
        compute = weight.to(hidden.dtype)
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        total = torch.zeros((), dtype=loss_dtype(hidden), device=hidden.device)
        hidden_gradient = torch.empty_like(hidden) if wanted else None
        # Wide, or the small contributions of late chunks vanish beside the sum of the early ones.
        weight_gradient = torch.zeros_like(weight, dtype=loss_dtype(hidden)) if ctx.needs_input_grad[1] else None
        for start in range(0, hidden.shape[0], CHUNK_TOKENS):
            rows = slice(start, start + CHUNK_TOKENS)
            losses, exponentials, sums = chunk_losses(hidden[rows], compute, labels[rows], vocab_shard)
            total += losses.sum()
            if hidden_gradient is None:
                continue
            share = (labels[rows] != IGNORE_INDEX).unsqueeze(1).to(sums.dtype)
            accumulate_gradients(
                (exponentials, sums, share),
                (hidden[rows], compute, labels[rows], vocab_shard),
                hidden_gradient[rows],
                weight_gradient,
            )
        if wanted:
            ctx.save_for_backward(hidden_gradient, weight_gradient)
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
    """Sum of −log p(target), in nats, over the scored targets: a scalar in fp32 (fp64 if `hidden` is), 0 where none is scored.

    `hidden` [rows, length, width], `weight` [vocab, width], `targets` [rows, length] int64 with −100 where not scored. Of
    a head that is spread over ranks see shared_head.py; each of them gets the whole sum.
    """
    shared = ShardedHead.from_weight(hidden, weight, labels)
    hidden = shared.hidden
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    with torch.autocast(hidden.device.type, enabled=False):
        flat, wanted = hidden.reshape(-1, hidden.shape[-1]), shared.labels.reshape(-1)
        return shared.sum_over_tokens(_ChunkedCrossEntropy.apply(flat, shared.weight, wanted, shared.vocab_shard))


@torch.no_grad()
def token_losses(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """−log p(target) of every token in nats, fp32, shaped like `targets`; 0 where not scored. Not differentiable."""
    shared = ShardedHead.from_weight(hidden, weight, labels)
    flat, wanted = shared.hidden.reshape(-1, hidden.shape[-1]), shared.labels.reshape(-1)
    compute = shared.weight.to(flat.dtype)
    chunks = zip(flat.split(CHUNK_TOKENS), wanted.split(CHUNK_TOKENS), strict=True)
    losses = torch.cat([chunk_losses(part, compute, chosen, shared.vocab_shard)[0] for part, chosen in chunks])
    return shared.gather_tokens(losses.view(shared.labels.shape))
