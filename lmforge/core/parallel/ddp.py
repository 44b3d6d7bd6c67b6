"""DDP: every rank holds the whole model, and gradients are summed over ranks while the backward
pass runs.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lmforge.core.parallel.parallel_model import ParallelModel

# Keeps the groups of DDP's reducers until the process ends. If a reducer has the last reference to
# its group, the thread that frees the model waits for gloo's thread and keeps Python's lock; if
# gloo's thread needs that lock to free its last tensors, the process never ends. Seen with torch
# 2.13.0.
_groups: set[dist.ProcessGroup] = set()


class DDPModel(ParallelModel):
    """A model under DDP; gradients are all-reduced with the last micro-batch only."""

    engine = "ddp"

    def _wrap(self, model_with_loss: nn.Module) -> nn.Module:
        device = self.dist_ctx.device
        device_ids = [device.index] if device.type == "cuda" else None
        # Buffers are the same on all ranks.
        kwargs: Any = {
            "device_ids": device_ids,
            "gradient_as_bucket_view": True,
            "broadcast_buffers": False,
        }
        self.ddp = DistributedDataParallel(model_with_loss, **kwargs)
        self.ddp.register_comm_hook(self, _all_reduce_hook)
        _groups.add(self.ddp.process_group)
        _fix_bucket_order(self.ddp)
        return self.ddp

    def micro_batch_context(self, is_last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if is_last else self.ddp.no_sync()


def _fix_bucket_order(ddp: DistributedDataParallel) -> None:
    """Let DDP rebuild its buckets before the first step, so that they stay the same from then on.

    DDP rebuilds its buckets after one backward pass. Where a gradient lies in a bucket decides in
    which order three or more ranks are summed, so the first step of a resumed run would differ in
    the last bits. Here DDP gets a backward pass of zeros, in the order that it assumes: the last
    parameters first.

    `reducer._rebuild_buckets` is private to torch; checked with 2.13.0.
    """
    total = torch.zeros(())
    for parameter in ddp.module.parameters():  # autograd computes the last one first
        if parameter.requires_grad:
            total = total.to(parameter.device) + 0.0 * parameter.reshape(-1)[:1].sum()
    ddp.reducer.prepare_for_backward([])
    total.backward()
    ddp.reducer._rebuild_buckets()
    ddp.zero_grad(set_to_none=True)


def _all_reduce_hook(ddp_model: DDPModel, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    # This rank's backward pass is done; the remaining time is waiting for other ranks.
    if bucket.is_last():
        ddp_model._set_phase("reduce")
    # DDP's own hook divides by the number of ranks; here the loss is already divided by the items
    # of the global batch.
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
