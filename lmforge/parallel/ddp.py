"""Distributed data parallel: every rank holds the whole model, and gradients are summed as they appear."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lmforge.cluster.ranks import Ranks
from lmforge.data.batch import Batch, Metrics
from lmforge.model.layers import LanguageModel
from lmforge.parallel.engine import Spread


class Replicated(Spread):
    """Gradients are all-reduced with the last micro-batch only."""

    engine = "ddp"

    def __init__(self, scored: nn.Module, model: LanguageModel, ranks: Ranks, autocast_dtype: torch.dtype | None) -> None:
        wrapped = DistributedDataParallel(
            scored,
            device_ids=[ranks.device.index] if ranks.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
        )
        self._mark: Callable[[str], None] = lambda phase: None
        wrapped.register_comm_hook(self, _sum)
        _settle(wrapped)
        super().__init__(wrapped, model, ranks, autocast_dtype)

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        assert isinstance(self.scored, DistributedDataParallel)
        return nullcontext() if last else self.scored.no_sync()

    def accumulate(self, micro_batches: Sequence[Batch], weight: Tensor, mark: Callable[[str], None]) -> list[Metrics]:
        self._mark = mark
        return super().accumulate(micro_batches, weight, mark)


def _settle(wrapped: DistributedDataParallel) -> None:
    """Have DDP arrange its buckets before the first step as it will keep them.

    After one backward it arranges them anew, and where a gradient lies in a bucket decides in which order three or more
    ranks are summed: a run that is continued, whose first step is another one, would differ in the last bits. So it gets
    a backward of zeros, in the order that it has assumed: the last parameters first.
    """
    total = torch.zeros(())
    for parameter in wrapped.module.parameters():  # what was used last is walked back to first
        if parameter.requires_grad:
            total = total.to(parameter.device) + 0.0 * parameter.reshape(-1)[:1].sum()
    wrapped.reducer.prepare_for_backward([])
    total.backward()
    wrapped.reducer._rebuild_buckets()
    wrapped.zero_grad(set_to_none=True)


def _sum(engine: Replicated, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    if bucket.is_last():  # this rank's backward is done: the rest is waiting for the others' gradients
        engine._mark("reduce")
    # DDP's own hook divides by the number of ranks; the loss here is already divided by the weight of the global batch.
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
