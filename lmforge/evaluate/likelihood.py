"""How likely a model finds a text after another: what multiple choice is decided by. Many pairs, in batches, over ranks.

The batches are the same for any number of ranks, and so is each result to the last bit. Every rank has the model whole.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from lmforge.cluster.distributed import DistributedContext
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import UserError
from lmforge.model.config import ModelConfig
from lmforge.model.layers import LanguageModel

TokenPair = tuple[list[int], list[int]]
Result = TypeVar("Result")
# Logits of so many tokens exist at once.
CHUNK_TOKENS = 2048


class ModelWithTokenizer(Protocol):
    """What is needed of an opened model (opening.Opened)."""

    @property
    def model(self) -> LanguageModel: ...
    @property
    def config(self) -> ModelConfig: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def prefix_ids(self) -> list[int]: ...
    @property
    def stop_token_ids(self) -> frozenset[int]: ...


@dataclass(frozen=True)
class Likelihood:
    """log_probability: of the whole continuation, in nats. greedy: whether each of its tokens is the likeliest."""

    logprob: float
    is_greedy: bool


def encode_pair(tokenizer: Tokenizer, prefix_ids: list[int], context: str, continuation: str) -> TokenPair:
    """The ids of a context, which is never empty and begins with those of `opening`, and of what continues it.

    Both are encoded together and cut where the context alone would end; blanks at its end belong to what follows, as
    tokenizers have them. That is how lm-evaluation-harness does it.
    """
    kept = context.rstrip()
    before = tokenizer.encode(kept)
    after = tokenizer.encode(context + continuation)[len(before) :]
    if not after:  # the end of the context and what follows are one token
        after = tokenizer.encode(context[len(kept) :] + continuation)
    return [*prefix_ids, *before] or [default_prefix_id(tokenizer)], after


def default_prefix_id(tokenizer: Tokenizer) -> int:
    """The id that a text with nothing before it comes after."""
    return tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id


def max_sequence_length(config: ModelConfig) -> int:
    """How many tokens a model is given at most: as many as it was made for."""
    return config.max_sequence_length or config.max_position_embeddings


def loglikelihoods(
    loaded: ModelWithTokenizer,
    pairs: Sequence[TokenPair],
    dist_ctx: DistributedContext,
    *,
    batch_size: int,
    on_batch: Callable[[], None] = lambda: None,
) -> list[Likelihood]:
    """How likely the second of each pair is after the first. Every rank calls it with the same pairs, and gets all results.

    `on_batch` is called before each batch of this rank's.

    A context is cut at its beginning where the pair is longer than the model reads. Raises UserError where what continues it
    is alone.
    """
    longest = max_sequence_length(loaded.config)
    if (most := max((len(after) for _, after in pairs), default=0)) > longest:
        raise UserError(f"a choice has {most} tokens, and the model reads at most {longest} in a row; shorten it")
    cut = [((before + after)[-(longest + 1) :], len(after)) for before, after in pairs]

    def score(numbers: list[int]) -> list[Likelihood]:
        return _score_batch(loaded.model, [cut[number] for number in numbers])

    return run_in_batches([len(tokens) for tokens, _ in cut], batch_size, dist_ctx, score, on_batch)


def run_in_batches(
    lengths: Sequence[int],
    batch_size: int,
    dist_ctx: DistributedContext,
    fn: Callable[[list[int]], list[Result]],
    on_batch: Callable[[], None] = lambda: None,
) -> list[Result]:
    """What `work` makes of each number below len(sizes), done in batches of like size that are shared out over ranks."""
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
    mine: dict[int, Result] = {}
    with dist_ctx.raise_on_all():
        for numbers in batches[dist_ctx.rank_info.rank :: dist_ctx.world_size]:
            on_batch()
            mine |= zip(numbers, fn(numbers), strict=True)
    everyone = {number: result for share in dist_ctx.all_gather(mine) for number, result in share.items()}
    return [everyone[number] for number in range(len(lengths))]


@torch.no_grad()
def _score_batch(model: LanguageModel, sequences: Sequence[tuple[list[int], int]]) -> list[Likelihood]:
    """Each row: its tokens, of which the last so many are scored."""
    device = model.embeddings[0].weight.device
    length = max(len(tokens) for tokens, _ in sequences) - 1
    inputs = torch.zeros(len(sequences), length, dtype=torch.long)
    documents = torch.full((len(sequences), length), -1, dtype=torch.int32)
    for row, (tokens, _) in enumerate(sequences):
        inputs[row, : len(tokens) - 1] = torch.tensor(tokens[:-1])
        documents[row, : len(tokens) - 1] = 0
    positions = torch.arange(length).expand(len(sequences), -1)
    hidden = model(inputs.to(device), positions.to(device), documents.to(device))
    scored = torch.cat(
        [hidden[row, len(tokens) - 1 - count : len(tokens) - 1] for row, (tokens, count) in enumerate(sequences)]
    )
    targets = torch.cat([torch.tensor(tokens[-count:]) for tokens, count in sequences]).to(device)
    found = list(_label_logprobs(model, scored, targets))
    logs, hits = (torch.cat(each).cpu() for each in zip(*found, strict=True))
    counts = [count for _, count in sequences]
    return [
        Likelihood(float(log.double().sum()), bool(hit.all()))
        for log, hit in zip(logs.split(counts), hits.split(counts), strict=True)
    ]


def _label_logprobs(
    model: LanguageModel, hidden: torch.Tensor, labels: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """log p of each target, fp32, and whether it is the likeliest; a chunk of tokens at a time."""
    for part, wanted in zip(hidden.split(CHUNK_TOKENS), labels.split(CHUNK_TOKENS), strict=True):
        logits = model.lm_head(part).float()
        yield logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0], logits.argmax(-1) == wanted
