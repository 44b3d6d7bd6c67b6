"""How likely a model finds a text after another: what multiple choice is decided by. Many pairs, in batches, over ranks.

The batches are the same for any number of ranks, and so is each result to the last bit. Every rank has the model whole.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from lmforge.cluster.ranks import Ranks
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import Mistake
from lmforge.model.layers import LanguageModel
from lmforge.model.shapes import ModelConfig

Pair = tuple[list[int], list[int]]
Result = TypeVar("Result")
# Logits of so many tokens exist at once.
CHUNK_TOKENS = 2048


class Readable(Protocol):
    """What is needed of an opened model (opening.Opened)."""

    @property
    def model(self) -> LanguageModel: ...
    @property
    def config(self) -> ModelConfig: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def opening(self) -> list[int]: ...
    @property
    def ends(self) -> frozenset[int]: ...


@dataclass(frozen=True)
class Likelihood:
    """log_probability: of the whole continuation, in nats. greedy: whether each of its tokens is the likeliest."""

    log_probability: float
    greedy: bool


def encode_pair(tokenizer: Tokenizer, opening: list[int], context: str, continuation: str) -> Pair:
    """The ids of a context, which is never empty and begins with those of `opening`, and of what continues it.

    Both are encoded together and cut where the context alone would end; blanks at its end belong to what follows, as
    tokenizers have them. That is how lm-evaluation-harness does it.
    """
    kept = context.rstrip()
    before = tokenizer.encode(kept)
    after = tokenizer.encode(context + continuation)[len(before) :]
    if not after:  # the end of the context and what follows are one token
        after = tokenizer.encode(context[len(kept) :] + continuation)
    return [*opening, *before] or [beginning(tokenizer)], after


def beginning(tokenizer: Tokenizer) -> int:
    """The id that a text with nothing before it comes after."""
    return tokenizer.separator_id if tokenizer.bos_id is None else tokenizer.bos_id


def longest_row(config: ModelConfig) -> int:
    """How many tokens a model is given at most: as many as it was made for."""
    return config.longest_row_tokens or config.max_position_embeddings


def likelihoods(
    opened: Readable, pairs: Sequence[Pair], ranks: Ranks, *, batch_rows: int, on_batch: Callable[[], None] = lambda: None
) -> list[Likelihood]:
    """How likely the second of each pair is after the first. Every rank calls it with the same pairs, and gets all results.

    `on_batch` is called before each batch of this rank's.

    A context is cut at its beginning where the pair is longer than the model reads. Raises Mistake where what continues it
    is alone.
    """
    longest = longest_row(opened.config)
    if (most := max((len(after) for _, after in pairs), default=0)) > longest:
        raise Mistake(f"a choice has {most} tokens, and the model reads at most {longest} in a row; shorten it")
    cut = [((before + after)[-(longest + 1) :], len(after)) for before, after in pairs]

    def score(numbers: list[int]) -> list[Likelihood]:
        return _score(opened.model, [cut[number] for number in numbers])

    return in_batches([len(tokens) for tokens, _ in cut], batch_rows, ranks, score, on_batch)


def in_batches(
    sizes: Sequence[int],
    batch_rows: int,
    ranks: Ranks,
    work: Callable[[list[int]], list[Result]],
    on_batch: Callable[[], None] = lambda: None,
) -> list[Result]:
    """What `work` makes of each number below len(sizes), done in batches of like size that are shared out over ranks."""
    order = sorted(range(len(sizes)), key=lambda number: -sizes[number])
    batches = [order[first : first + batch_rows] for first in range(0, len(order), batch_rows)]
    mine: dict[int, Result] = {}
    with ranks.agreeing():
        for numbers in batches[ranks.place.rank :: ranks.count]:
            on_batch()
            mine |= zip(numbers, work(numbers), strict=True)
    everyone = {number: result for share in ranks.gather(mine) for number, result in share.items()}
    return [everyone[number] for number in range(len(sizes))]


@torch.no_grad()
def _score(model: LanguageModel, rows: Sequence[tuple[list[int], int]]) -> list[Likelihood]:
    """Each row: its tokens, of which the last so many are scored."""
    device = model.embeddings[0].weight.device
    length = max(len(tokens) for tokens, _ in rows) - 1
    inputs = torch.zeros(len(rows), length, dtype=torch.long)
    documents = torch.full((len(rows), length), -1, dtype=torch.int32)
    for row, (tokens, _) in enumerate(rows):
        inputs[row, : len(tokens) - 1] = torch.tensor(tokens[:-1])
        documents[row, : len(tokens) - 1] = 0
    positions = torch.arange(length).expand(len(rows), -1)
    hidden = model(inputs.to(device), positions.to(device), documents.to(device))
    scored = torch.cat([hidden[row, len(tokens) - 1 - count : len(tokens) - 1] for row, (tokens, count) in enumerate(rows)])
    targets = torch.cat([torch.tensor(tokens[-count:]) for tokens, count in rows]).to(device)
    found = list(_chosen(model, scored, targets))
    logs, hits = (torch.cat(each).cpu() for each in zip(*found, strict=True))
    counts = [count for _, count in rows]
    return [
        Likelihood(float(log.double().sum()), bool(hit.all()))
        for log, hit in zip(logs.split(counts), hits.split(counts), strict=True)
    ]


def _chosen(model: LanguageModel, hidden: torch.Tensor, targets: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """log p of each target, fp32, and whether it is the likeliest; a chunk of tokens at a time."""
    for part, wanted in zip(hidden.split(CHUNK_TOKENS), targets.split(CHUNK_TOKENS), strict=True):
        logits = model.lm_head(part).float()
        yield logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0], logits.argmax(-1) == wanted
