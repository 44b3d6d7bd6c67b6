"""Run in every rank: `lmforge` with a fault injected into one of them.

FAULTY_RANK names the rank; FAULT is `data` (sleep before the batch of step FAULTY_STEP, by default
7, until the file AWAKE is there), `forward` (sleep for SLEEP seconds in every forward pass), `skip`
(skip the seventh all-reduce, with a barrier in its place), `end` (stop the process when it closes
its files), `raise` (an error before the batch of step 3, after which the process stays for a
while), `kill` or `abort` (end there by SIGKILL or SIGABRT). With COLLECTIVE_SECONDS all ranks wait
no longer for each other.
"""

import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lmforge.cli import main
from lmforge.core import run as stages
from lmforge.core.data.loader import BatchLoader
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.parallel.parallel_model import ModelWithLoss
from lmforge.core.stages.observers import Observers

SLEEP = float(os.environ.get("SLEEP", "0"))
FAULTY_STEP = int(os.environ.get("FAULTY_STEP", "7"))


def sleeps_in_the_data() -> None:
    before = BatchLoader.batches

    def batches(self: Any, step: int) -> Any:
        while step == FAULTY_STEP and not os.path.exists(os.environ["AWAKE"]):
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


def is_stopped_at_the_end() -> None:
    before = Observers.close

    def close(self: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        before(self)

    Observers.close = close  # type: ignore[method-assign]


def ends_at_step_3() -> None:
    before = BatchLoader.batches

    def batches(self: Any, step: int) -> Any:
        if step == 3 and os.environ["FAULT"] != "raise":
            os.kill(os.getpid(), signal.SIGKILL if os.environ["FAULT"] == "kill" else signal.SIGABRT)
        if step == 3:
            raise ValueError("the third batch\x1b[2J is bad")
        return before(self, step)

    def destroy() -> None:
        time.sleep(SLEEP)  # its sockets stay open: the others are not told that it has failed
        destroy_distributed()

    destroy_distributed, stages.destroy_distributed = stages.destroy_distributed, destroy
    BatchLoader.batches = batches  # type: ignore[method-assign]


FAULTS = {"data": sleeps_in_the_data, "forward": sleeps_in_forward, "skip": skips_a_collective, "end": is_stopped_at_the_end}
FAULTS |= dict.fromkeys(("raise", "kill", "abort"), ends_at_step_3)

if __name__ == "__main__":
    if "COLLECTIVE_SECONDS" in os.environ:
        stages.collective_timeout = lambda config: timedelta(seconds=float(os.environ["COLLECTIVE_SECONDS"]))
    if os.environ["RANK"] == os.environ["FAULTY_RANK"]:
        FAULTS[os.environ["FAULT"]]()
    main()
