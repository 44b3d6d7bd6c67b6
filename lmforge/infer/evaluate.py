"""Loss, perplexity and bits per byte of a model on rows of text, on one rank or shared out over many."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lmforge.cluster.ranks import Ranks
from lmforge.data.batch import Batch
from lmforge.data.stream import Rows
from lmforge.model.layers import LanguageModel
from lmforge.objectives.language import score_text

Score = Callable[[Batch], Tensor]


def evaluate(
    score: Score,
    stream: Rows,
    ranks: Ranks,
    *,
    rows: int | None,
    batch_rows: int,
    place: tuple[int, int] | None = None,
    on_rows: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, float]:
    """Measure `rows` rows (None: all) of an unshuffled `stream`, evenly spaced, so that few stand for all.

    `score` maps a batch on this rank's device to `score_text`'s four sums. Every rank makes the same number of forward
    passes, over equal shares padded with masked rows, so that sharded models stay in step. Returns `loss` (nats per
    target), `perplexity`, `bits_per_byte` (special tokens left out), `targets`, `bytes`. `place` is (which share of the
    rows is this rank's, how many shares there are), where ranks share rows; then the last two count each row for each of them.
    """
    sums = torch.zeros(4, dtype=torch.float64, device=ranks.device)
    for batch in shared_out(
        stream, place or (ranks.place.rank, ranks.count), rows=rows, batch_rows=batch_rows, on_rows=on_rows
    ):
        sums += score(batch.to(ranks.device))
    nats, targets, text_nats, text_bytes = ranks.sum_(sums).tolist()
    loss = nats / targets if targets else 0.0
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": text_nats / math.log(2) / text_bytes if text_bytes else 0.0,
        "targets": targets,
        "bytes": text_bytes,
    }


def shared_out(
    stream: Rows,
    place: tuple[int, int],
    *,
    rows: int | None,
    batch_rows: int,
    on_rows: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Batch]:
    """This rank's share of `rows` rows of an unshuffled stream, evenly spaced, as many batches on every rank.

    `place` is (which share, of how many). `on_rows(done, total)` hears how far all are, after each batch was used.
    """
    there = stream.rows_per_epoch
    total_rows = min(rows or there, there)
    share, shares = place
    stride = batch_rows * shares
    for first in range(0, total_rows, stride):
        start = first + share * batch_rows
        # Rows beyond the last one asked for are rows beyond the stream's end: all padding.
        yield Batch.of([stream.row(number * there // total_rows) for number in range(start, start + batch_rows)])
        on_rows(min(first + stride, total_rows), total_rows)


def scorer(model: LanguageModel, token_bytes: Tensor) -> Score:
    """`score` for a model that is not spread over ranks."""
    return lambda batch: score_text(model, batch, token_bytes)
