"""Why a barrier after saving makes another rank's all-reduce time out, on two CPU processes.

    torchrun --standalone --nproc-per-node 2 examples/barrier_ddp.py [agree]

Each rank keeps the best losses so far and saves when a new one is among them. Only rank 0 really
keeps the list, so the ranks come to different answers. With "agree" rank 0 decides for all. The
story is in docs/barriers.md.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

AGREE = "agree" in sys.argv
KEPT = 2


def should_save(best: list[float], loss: float) -> bool:
    return len(best) < KEPT or loss < max(best)


def save_checkpoint(best: list[float], loss: float) -> None:
    if dist.get_rank() == 0:
        best.append(loss)  # and write a file; the other ranks write nothing, so they keep no list
        del best[:-KEPT]
    dist.barrier()  # "so that all ranks are in step again"


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    best: list[float] = []
    losses = [4.0, 3.0, 5.0, 2.0]  # the third is no improvement, which only rank 0 knows
    for step, loss in enumerate(losses):
        model(torch.ones(2, 4)).sum().backward()  # gradients are all-reduced here
        decision = [should_save(best, loss)]
        if AGREE:
            dist.broadcast_object_list(decision, src=0)
        if decision[0]:
            save_checkpoint(best, loss)
        print(f"rank {dist.get_rank()}: step {step} done, {'saved' if decision[0] else 'not saved'}", flush=True)
    # First the model: if it holds the last reference to the group, the process may never end
    # (docs/barriers.md).
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
