"""Run in every rank: `lmforge` with a fault in one of them, put there from outside.

FAULTY_RANK names the rank; FAULT is `data` (sleep before the batch of step 7 until the file AWAKE is there), `forward` (sleep
for SLEEP seconds in every forward pass) or `skip` (skip the seventh all-reduce, with a barrier in its place).
"""

import os
import time
from typing import Any

import torch.distributed as dist

from lmforge.cli import main
from lmforge.cluster.distributed import DistributedContext
from lmforge.data.loader import BatchLoader
from lmforge.parallel.parallel_model import ModelWithLoss

SLEEP = float(os.environ.get("SLEEP", "0"))


def sleeps_in_the_data() -> None:
    before = BatchLoader.batches

    def batches(self: Any, step: int) -> Any:
        while step == 7 and not os.path.exists(os.environ["AWAKE"]):
            time.sleep(SLEEP)
        return before(self, step)

    BatchLoader.batches = batches  # type: ignore[method-assign]


def sleeps_in_forward() -> None:
    before = ModelWithLoss.forward

    def forward(self: Any, *given: Any, **named: Any) -> Any:
        time.sleep(SLEEP)
        return before(self, *given, **named)

    ModelWithLoss.forward = forward  # type: ignore[method-assign]


def skips_a_collective() -> None:
    before = DistributedContext.all_reduce_sum
    calls = 0

    def all_reduce_sum(self: Any, tensor: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 7:
            dist.barrier()
            return tensor
        return before(self, tensor)

    DistributedContext.all_reduce_sum = all_reduce_sum  # type: ignore[method-assign]


FAULTS = {"data": sleeps_in_the_data, "forward": sleeps_in_forward, "skip": skips_a_collective}

if __name__ == "__main__":
    if os.environ["RANK"] == os.environ["FAULTY_RANK"]:
        FAULTS[os.environ["FAULT"]]()
    main()
