"""Loss, perplexity and bits per byte of a model on rows of text, on one rank or shared out over many."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lmforge.cluster.distributed import DistributedContext
from lmforge.data.batch import Batch
from lmforge.data.dataset import PackedDataset
from lmforge.model.layers import LanguageModel
from lmforge.objectives.language import score_text

ScoreFn = Callable[[Batch], Tensor]


def evaluate_loss(
    score: ScoreFn,
    dataset: PackedDataset,
    dist_ctx: DistributedContext,
    *,
    num_sequences: int | None,
    batch_size: int,
    shard: tuple[int, int] | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, float]:
    """Measure `rows` rows (None: all) of an unshuffled `stream`, evenly spaced, so that few stand for all.

    `score` maps a batch on this rank's device to `score_text`'s four sums. Every rank makes the same number of forward
    passes, over equal shares padded with masked rows, so that sharded models stay in step. Returns `loss` (nats per
    target), `perplexity`, `bits_per_byte` (special tokens left out), `targets`, `bytes`. `place` is (which share of the
    rows is this rank's, how many shares there are), where ranks share rows; then the last two count each row for each of them.
    """
    sums = torch.zeros(4, dtype=torch.float64, device=dist_ctx.device)
    for batch in local_batches(
        dataset,
        shard or (dist_ctx.rank_info.rank, dist_ctx.world_size),
        num_sequences=num_sequences,
        batch_size=batch_size,
        on_progress=on_progress,
    ):
        sums += score(batch.to(dist_ctx.device))
    nats, targets, text_nats, text_bytes = dist_ctx.all_reduce_sum(sums).tolist()
    loss = nats / targets if targets else 0.0
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": text_nats / math.log(2) / text_bytes if text_bytes else 0.0,
        "targets": targets,
        "bytes": text_bytes,
    }


def local_batches(
    dataset: PackedDataset,
    shard: tuple[int, int],
    *,
    num_sequences: int | None,
    batch_size: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Batch]:
    """This rank's share of `rows` rows of an unshuffled stream, evenly spaced, as many batches on every rank.

    `place` is (which share, of how many). `on_rows(done, total)` hears how far all are, after each batch was used.
    """
    there = dataset.sequences_per_epoch
    total_rows = min(num_sequences or there, there)
    share, shares = shard
    stride = batch_size * shares
    for first in range(0, total_rows, stride):
        start = first + share * batch_size
        # Rows beyond the last one asked for are rows beyond the stream's end: all padding.
        yield Batch.from_sequences(
            [dataset.sequence(number * there // total_rows) for number in range(start, start + batch_size)]
        )
        on_progress(min(first + stride, total_rows), total_rows)


def make_score_fn(model: LanguageModel, token_bytes: Tensor) -> ScoreFn:
    """`score` for a model that is not spread over ranks."""
    return lambda batch: score_text(model, batch, token_bytes)
