"""Python imports this as it starts, where its folder is on the path: a fault in one rank, put there from outside.

FAULTY_RANK names the rank; FAULT is `data` (sleep before the batch of step 7 until the file AWAKE is there), `forward` (sleep
for SLEEP seconds in every forward pass) or `skip` (skip the seventh all-reduce, with a barrier in its place).
"""

import importlib.abc
import importlib.util
import os
import sys
import time
from typing import Any

SLEEP = float(os.environ.get("SLEEP", "0"))


def sleeps_in_the_data(module: Any) -> None:
    before = module.BatchLoader.batches

    def batches(self: Any, step: int) -> Any:
        while step == 7 and not os.path.exists(os.environ["AWAKE"]):
            time.sleep(SLEEP)
        return before(self, step)

    module.BatchLoader.batches = batches


def sleeps_in_forward(module: Any) -> None:
    before = module.ModelWithLoss.forward

    def forward(self: Any, *given: Any, **named: Any) -> Any:
        time.sleep(SLEEP)
        return before(self, *given, **named)

    module.ModelWithLoss.forward = forward


def skips_a_collective(module: Any) -> None:
    before = module.DistributedContext.all_reduce_sum
    calls = 0

    def all_reduce_sum(self: Any, tensor: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 7:
            import torch.distributed as dist

            dist.barrier()
            return tensor
        return before(self, tensor)

    module.DistributedContext.all_reduce_sum = all_reduce_sum


FAULTS = {
    "data": ("lmforge.data.loader", sleeps_in_the_data),
    "forward": ("lmforge.parallel.parallel_model", sleeps_in_forward),
    "skip": ("lmforge.cluster.distributed", skips_a_collective),
}


class Finder(importlib.abc.MetaPathFinder):
    """Changes one module as it is imported."""

    def __init__(self, name: str, change: Any) -> None:
        self.name, self.change = name, change

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            self.change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("RANK") and os.environ.get("RANK") == os.environ.get("FAULTY_RANK"):
    sys.meta_path.insert(0, Finder(*FAULTS[os.environ["FAULT"]]))
