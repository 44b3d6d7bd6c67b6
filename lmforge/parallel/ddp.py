"""Distributed data parallel: every rank holds the whole model, and gradients are summed as they appear."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lmforge.cluster.ranks import Ranks


def replicate(scored: nn.Module, ranks: Ranks) -> DistributedDataParallel:
    """Wrap `scored` (a model with its objective) so that its gradients are sums over ranks."""
    wrapped = DistributedDataParallel(
        scored,
        device_ids=[ranks.device.index] if ranks.device.type == "cuda" else None,
        broadcast_buffers=False,  # the models here have none
        gradient_as_bucket_view=True,
    )
    wrapped.register_comm_hook(None, _sum)
    return wrapped


def _sum(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    # DDP's own hook divides by the number of ranks; the loss here is already divided by the weight of the global batch.
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
