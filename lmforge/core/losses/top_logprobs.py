"""The likeliest tokens of a model at each place with their log-probabilities, or tokens drawn from
it: what is stored of a teacher, and what a server says of a prompt.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from lmforge.core.losses.language import final_logits
from lmforge.core.losses.sharded_head import VocabShard
from lmforge.core.model.layers import PLAIN_HEAD, HeadOptions

# A chunk has about six arrays of logits here, where cross-entropy has one or two.
CHUNK_TOKENS = 512
# The logit of an id that no token has. Finite, so that its ratio of two probabilities is a number,
# which 0 is multiplied by.
NO_TOKEN = -1e30
# So that it has a logarithm where fewer than k tokens have a probability.
LEAST_THRESHOLD = 1e-300
# Tokens are drawn for so many places at a time: an array of their probabilities in fp64 is no
# larger than a quarter of a chunk.
DRAWN_TOKENS = 64
# The unit of probabilities there: integers, which a GPU adds up in any order to the same. 2^16 of
# them are below 2^63.
ONE = 2**44


def token_log_probs(logits: Tensor, vocab_size: int | None, shard: VocabShard) -> Tensor:
    """Log-probabilities [n, vocab] of a shard of the vocabulary, in place of its final logits.

    Ids from `vocab_size` on pad the head and are no tokens; None: all are.
    """
    if vocab_size is not None:
        logits[:, max(0, vocab_size - shard.start) :] = NO_TOKEN
    largest = shard.all_reduce_max(logits.amax(-1, keepdim=True))
    (sums,) = shard.all_reduce_sum((logits - largest).exp().sum(-1, keepdim=True))
    return logits.sub_(largest + sums.log())


@torch.no_grad()
def top_log_probs(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    head: HeadOptions = PLAIN_HEAD,
    rng_keys: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What a stored teacher needs: the `k` likeliest ids int64 [sequences, length, k], the
    likeliest first, and `values` fp32 [sequences, length, k + 1]. With `rng_keys` int64 [sequences,
    length] what a sampled one needs.

    With a sharded head of the tokens that `hidden` has, so the weight is gathered.
    """
    weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
    flat = hidden.flatten(0, 1)
    found = list[tuple[Tensor, Tensor]]()
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, max(1, len(flat)), CHUNK_TOKENS):
            tokens = slice(start, start + CHUNK_TOKENS)
            logits = final_logits(
                flat[tokens] @ weight.to(flat.dtype).t(), head.bias, head.softcap, temperature
            )
            logprobs = token_log_probs(logits, vocab_size, VocabShard())
            keys = None if rng_keys is None else rng_keys.flatten()[tokens]
            if keys is None:
                found.append(likeliest_tokens(logprobs, k))
            else:
                parts = zip(logprobs.split(DRAWN_TOKENS), keys.split(DRAWN_TOKENS), strict=True)
                found += [drawn_tokens(part, k, part_keys) for part, part_keys in parts]
    ids, values = (
        torch.cat(each).unflatten(0, hidden.shape[:2]) for each in zip(*found, strict=True)
    )
    return ids, values


def likeliest_tokens(logprobs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """What a stored teacher has of `logprobs` [n, vocab]: ids [n, k] and values fp32 [n, k + 1].

    `logprobs` are overwritten.
    """
    values, ids = logprobs.topk(k, dim=-1)
    others = logprobs.scatter_(1, ids, NO_TOKEN).logsumexp(-1, keepdim=True)
    return ids, torch.cat([values, others], 1).float()


def drawn_tokens(logprobs: Tensor, k: int, rng_keys: Tensor) -> tuple[Tensor, Tensor]:
    """`k` ids drawn from `logprobs` [n, vocab]: ids [n, k], and their values with log τ at the end,
    fp32 [n, k + 1]. `rng_keys`: int64 [n].

    A token is drawn with probability min(1, p / τ), where τ is such that these add up to k.
    Anshumann et al. (arXiv 2503.16870) draw k times from p, where a likely token comes again and
    again; here none comes twice (systematic sampling, Madow 1949): with u uniform in 0 to 1, those
    are drawn whose step in the running sum of the probabilities holds one of u, u + 1, ….
    """
    probs = logprobs.double().exp()
    largest, likeliest = probs.topk(k, dim=-1)
    others = probs.scatter(1, likeliest, 0.0).sum(-1, keepdim=True)
    # If the first i are drawn for sure, what is left has k − i draws. The least of these quotients
    # is the one where no other token is as likely as that.
    left = _sums_from_each(largest) + others
    threshold = (
        (left / torch.arange(k, 0, -1, device=left.device))
        .amin(-1, keepdim=True)
        .clamp(min=LEAST_THRESHOLD)
    )
    steps = ((probs / threshold).clamp_(max=1.0) * ONE).long().cumsum(-1)
    points = (rng_keys & (ONE - 1)).unsqueeze(1) + ONE * torch.arange(k, device=left.device)
    ids = torch.searchsorted(steps, points, right=True).clamp(max=probs.shape[1] - 1)
    return ids, torch.cat([logprobs.gather(1, ids), threshold.log()], 1).float()


def _sums_from_each(values: Tensor) -> Tensor:
    """The sum of each of `values` [n, k] and all after it.

    A GPU adds up floats in no fixed order in `cumsum`.
    """
    shift = 1
    while shift < values.shape[1]:
        values = values + F.pad(values[:, shift:], (0, shift))
        shift *= 2
    return values
