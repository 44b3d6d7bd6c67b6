"""Output head and cross-entropy in one, a chunk of tokens at a time, so that logits are never whole.

At a vocabulary of 128,000 the logits of 8,192 tokens are 4 GiB in fp32, and their gradient as much again. Here the
gradient of a chunk is finished while its logits are at hand, and both are gone before the next chunk. Log-probabilities
of single tokens, whose gradients come later, are in logprobs.py.
"""

from typing import Any

import torch
from torch import Tensor

from lmforge.objectives.shared_head import SharedHead, Vocabulary

CHUNK_TOKENS = 2048
IGNORED = -100


def score_chunk(
    hidden: Tensor, weight: Tensor, targets: Tensor, part: Vocabulary, temperature: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [n] (0 where not scored), exp(logit − the row's highest) [n, vocab], its sums over all parts [n, 1].

    In `wide`. `weight` is that of `part` of the vocabulary; logits are divided by `temperature`. The exponentials are
    made once, for the loss and for its gradient: they cost more than any other pass over the logits on a CPU.
    """
    logits = (hidden @ weight.t()).to(wide(hidden))
    if temperature != 1:
        logits.div_(temperature)
    place, here = _places(targets, weight.shape[0], part)
    chosen = logits.gather(1, place) * here
    highest = part.highest(logits.amax(-1, keepdim=True))
    exponentials = logits.sub_(highest).exp_()
    sums, chosen = part.total(exponentials.sum(-1, keepdim=True), chosen)
    losses = (highest - chosen + sums.log()).squeeze(1)
    return torch.where(targets != IGNORED, losses, 0.0), exponentials, sums


def _places(targets: Tensor, size: int, part: Vocabulary) -> tuple[Tensor, Tensor]:
    """Each target's row of a head of `size` rows [n, 1], and 1 where it has one, 0 where it is elsewhere or not scored."""
    places = (targets - part.first).unsqueeze(1)
    return places.clamp(0, size - 1), (places >= 0) & (places < size)


def wide(hidden: Tensor) -> torch.dtype:
    """fp32, in which losses are computed and summed whatever the dtype of the model; fp64 for a model in fp64."""
    return torch.promote_types(hidden.dtype, torch.float32)


def add_gradients(
    scored: tuple[Tensor, Tensor, Tensor],
    chunk: tuple[Tensor, Tensor, Tensor, Vocabulary],
    hidden_gradient: Tensor,
    weight_gradient: Tensor | None,
) -> None:
    """Write the gradient of a chunk's losses to `hidden_gradient` [n, width] and add it to `weight_gradient` [vocab, width],
    which is None where the head is frozen.

    `scored` is what score_chunk gave, the exponentials, which are overwritten, and their sums, and how much each token's
    loss counts [n, 1], 0 where it is not scored; `chunk` is what score_chunk was given.
    """
    exponentials, sums, share = scored
    hidden, weight, targets, part = chunk
    # softmax − one-hot, in place of the exponentials.
    gradient = exponentials.mul_(share / sums)
    place, here = _places(targets, weight.shape[0], part)
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
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, part: Vocabulary) -> Tensor:
        compute = weight.to(hidden.dtype)
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        total = torch.zeros((), dtype=wide(hidden), device=hidden.device)
        hidden_gradient = torch.empty_like(hidden) if wanted else None
        # Wide, or the small contributions of late chunks vanish beside the sum of the early ones.
        weight_gradient = torch.zeros_like(weight, dtype=wide(hidden)) if ctx.needs_input_grad[1] else None
        for start in range(0, hidden.shape[0], CHUNK_TOKENS):
            rows = slice(start, start + CHUNK_TOKENS)
            losses, exponentials, sums = score_chunk(hidden[rows], compute, targets[rows], part)
            total += losses.sum()
            if hidden_gradient is None:
                continue
            share = (targets[rows] != IGNORED).unsqueeze(1).to(sums.dtype)
            add_gradients(
                (exponentials, sums, share),
                (hidden[rows], compute, targets[rows], part),
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


def cross_entropy_sum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum of −log p(target), in nats, over the scored targets: a scalar in fp32 (fp64 if `hidden` is), 0 where none is scored.

    `hidden` [rows, length, width], `weight` [vocab, width], `targets` [rows, length] int64 with −100 where not scored. Of
    a head that is spread over ranks see shared_head.py; each of them gets the whole sum.
    """
    shared = SharedHead.of(hidden, weight, targets)
    hidden = shared.hidden
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    with torch.autocast(hidden.device.type, enabled=False):
        flat, wanted = hidden.reshape(-1, hidden.shape[-1]), shared.targets.reshape(-1)
        return shared.total(_ChunkedCrossEntropy.apply(flat, shared.weight, wanted, shared.vocabulary))


@torch.no_grad()
def token_losses(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """−log p(target) of every token in nats, fp32, shaped like `targets`; 0 where not scored. Not differentiable."""
    shared = SharedHead.of(hidden, weight, targets)
    flat, wanted = shared.hidden.reshape(-1, hidden.shape[-1]), shared.targets.reshape(-1)
    compute = shared.weight.to(flat.dtype)
    chunks = zip(flat.split(CHUNK_TOKENS), wanted.split(CHUNK_TOKENS), strict=True)
    losses = torch.cat([score_chunk(part, compute, chosen, shared.vocabulary)[0] for part, chosen in chunks])
    return shared.all_tokens(losses.view(shared.targets.shape))
