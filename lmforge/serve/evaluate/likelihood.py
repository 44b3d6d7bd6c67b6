"""Log-probabilities of continuations, for multiple choice: many pairs, in batches, over ranks.

The batches are the same for any number of ranks, and so are the results, to the last bit. Every
rank has the full model.
"""

import sys
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

import torch

from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.errors import UserError
from lmforge.core.model.layers import LanguageModel
from lmforge.serve.decoding.model_loading import LoadedModel
from lmforge.serve.decoding.prompts import (
    check_token_ids,
    encode_prompt,
    max_input_length,
    scored_logits,
)

TokenPair = tuple[list[int], list[int]]
Result = TypeVar("Result")


class Likelihood(NamedTuple):
    """The likelihood of a continuation.

    logprob: of all of it, in nats. is_greedy: whether each of its tokens is the likeliest.
    """

    logprob: float
    is_greedy: bool


def encode_pair(
    tokenizer: Tokenizer, prefix_ids: list[int], context: str, continuation: str
) -> TokenPair:
    """The ids of a context and of its continuation.

    The context is never empty and begins with `prefix_ids`. Both are encoded together and split
    where the context alone would end. Spaces at the end of the context belong to the continuation,
    as tokenizers have them. lm-evaluation-harness does the same.
    """
    stripped = context.rstrip()
    context_ids = tokenizer.encode(stripped, parse_special_tokens=True)
    ids = tokenizer.encode(context + continuation, parse_special_tokens=True)
    continuation_ids = ids[len(context_ids) :]
    if not continuation_ids:  # the end of the context and the continuation are one token
        spaces = context[len(stripped) :]
        continuation_ids = tokenizer.encode(spaces + continuation, parse_special_tokens=True)
    return encode_prompt(tokenizer, context_ids, prefix_ids), continuation_ids


def loglikelihoods(
    loaded: LoadedModel,
    pairs: Sequence[TokenPair],
    dist_ctx: DistributedContext,
    *,
    batch_size: int,
    on_batch: Callable[[], None] = lambda: None,
) -> list[Likelihood]:
    """The likelihood of each continuation after its context.

    Every rank calls it with the same pairs and gets all results.

    `on_batch` is called before each batch of this rank. Where a pair is longer than the model
    reads, the context loses its beginning, and rank 0 says so. Raises UserError where a
    continuation alone is longer, or the model lacks an id of a pair.
    """
    limit = max_input_length(loaded.config)
    longest = max((len(continuation) for _, continuation in pairs), default=0)
    if longest > limit:
        raise UserError(
            f"a choice has {longest} tokens, and the model reads at most {limit}; shorten it"
        )
    report_truncation(
        [len(context) + len(continuation) - 1 for context, continuation in pairs], limit, dist_ctx
    )
    for tokens in chain.from_iterable(pairs):
        check_token_ids(tokens, loaded.config.vocab_size, "a question")
    truncated = [
        ((context + continuation)[-(limit + 1) :], len(continuation))
        for context, continuation in pairs
    ]

    def score(numbers: list[int]) -> list[Likelihood]:
        return _score_batch(loaded.model, [truncated[number] for number in numbers])

    lengths = [len(tokens) for tokens, _ in truncated]
    return run_in_batches(lengths, batch_size, dist_ctx, score, on_batch)


def report_truncation(lengths: Sequence[int], limit: int, dist_ctx: DistributedContext) -> None:
    """Print on rank 0 how many prompts with their answers are longer than `limit`, if any."""
    count = sum(length > limit for length in lengths)
    if count and dist_ctx.is_rank0:
        print(
            f"lmforge: {count:,} of {len(lengths):,} prompts with an answer are longer than the"
            f" {limit:,} tokens that the model reads: the beginning was cut off",
            file=sys.stderr,
        )


def run_in_batches(
    lengths: Sequence[int],
    batch_size: int,
    dist_ctx: DistributedContext,
    fn: Callable[[list[int]], list[Result]],
    on_batch: Callable[[], None],
) -> list[Result]:
    """The results of `fn(numbers)` for all numbers below len(lengths), on every rank.

    Numbers of similar length share a batch, and the batches are divided among the ranks.
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
    local: dict[int, Result] = {}
    with dist_ctx.raise_on_all():
        # Every rank has the full model, so each takes its own batches, independent of how training
        # uses the ranks.
        for numbers in batches[dist_ctx.rank_info.rank :: dist_ctx.world_size]:
            on_batch()
            local |= zip(numbers, fn(numbers), strict=True)
    results = {
        number: result for part in dist_ctx.all_gather(local) for number, result in part.items()
    }
    return [results[number] for number in range(len(lengths))]


def _score_batch(
    model: LanguageModel, sequences: Sequence[tuple[list[int], int]]
) -> list[Likelihood]:
    """The likelihoods of the ends of sequences.

    A sequence is its tokens and the number of the last ones that are scored.
    """
    logprobs = []
    is_greedy = []
    for logits, ids in scored_logits(model, sequences):
        logprobs.append(logits.log_softmax(-1).gather(1, ids[:, None])[:, 0])
        is_greedy.append(logits.argmax(-1) == ids)
    counts = [count for _, count in sequences]
    logprobs_of = torch.cat(logprobs).cpu().split(counts)
    is_greedy_of = torch.cat(is_greedy).cpu().split(counts)
    return [
        Likelihood(float(values.double().sum()), bool(greedy.all()))
        for values, greedy in zip(logprobs_of, is_greedy_of, strict=True)
    ]
