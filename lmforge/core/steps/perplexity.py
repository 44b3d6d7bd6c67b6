"""Loss, perplexity and bits per byte of a model on sequences of text, on one rank or many."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lmforge.core.data.batch import Batch
from lmforge.core.data.dataset import PackedDataset
from lmforge.core.distributed.distributed import DistributedContext


def evaluate_loss(
    score: Callable[[Batch], Tensor],
    dataset: PackedDataset,
    dist_ctx: DistributedContext,
    *,
    num_sequences: int | None,
    batch_size: int,
    rank_and_size: tuple[int, int] | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, float]:
    """Measure `num_sequences` sequences (None: all) of an unshuffled dataset, evenly spaced over
    it.

    `score` maps a batch on this rank's device to the sums of `score_text`, or to a zero. Every rank
    makes the same number of forward passes over equal parts, padded with masked sequences, so that
    sharded models stay in step. `rank_and_size` is that of data parallelism, where several ranks
    score the same part; `tokens` and `bytes` then count it for each of them.

    Returns `loss` (nats per token), `perplexity`, `bits_per_byte` (special tokens left out), and
    the `tokens` and `bytes` that were scored; where the dataset is joined of several sources, also
    those of each, such as `loss/NAME`. A source of which nothing was scored has none.
    """
    names = dataset.source_names
    sums = torch.zeros(len(names) or 1, 4, dtype=torch.float64, device=dist_ctx.device)
    # Without `rank_and_size`, as in `lmforge evaluate`, every rank has the full model and scores
    # sequences of its own.
    rank_and_size = rank_and_size or (dist_ctx.rank_info.rank, dist_ctx.world_size)
    for batch in local_batches(dataset, rank_and_size, num_sequences, batch_size, on_progress):
        sources = torch.zeros(batch.batch_size) if batch.source_ids is None else batch.source_ids[:, 0]
        scored = score(batch.to(dist_ctx.device)).expand(batch.batch_size, 4)
        sums.index_add_(0, sources.long().to(dist_ctx.device), scored)
    by_source = dist_ctx.all_reduce_sum(sums).cpu()
    measured = _rates(by_source.sum(0))
    for name, source_sums in zip(names, by_source, strict=False):
        if source_sums[1]:
            measured |= {f"{rate}/{name}": value for rate, value in _rates(source_sums).items()}
    return measured


def _rates(sums: Tensor) -> dict[str, float]:
    nats, tokens, text_nats, text_bytes = sums.tolist()
    loss = nats / tokens if tokens else 0.0
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": text_nats / math.log(2) / text_bytes if text_bytes else 0.0,
        "tokens": tokens,
        "bytes": text_bytes,
    }


def local_batches(
    dataset: PackedDataset,
    rank_and_size: tuple[int, int],
    num_sequences: int | None,
    batch_size: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Batch]:
    """This rank's part of `num_sequences` sequences of an unshuffled dataset, evenly spaced; as
    many batches on every rank.

    `rank_and_size` is that of data parallelism. `on_progress(done, total)` is called after each
    batch, in sequences of all ranks.
    """
    available = dataset.sequences_per_epoch
    total = min(num_sequences or available, available)
    rank, size = rank_and_size
    stride = batch_size * size
    for first in range(0, total, stride):
        start = first + rank * batch_size
        # Indices beyond the last sequence give padding.
        yield Batch.from_sequences(dataset.read([number * available // total for number in range(start, start + batch_size)]))
        on_progress(min(first + stride, total), total)
