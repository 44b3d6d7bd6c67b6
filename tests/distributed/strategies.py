"""Run in every rank: cases of strategies, one after another, in one set of processes.

    strategies.py FOLDER SEED KIND WHICH     as shapes.select_cases takes them

Writes FOLDER/NAME.json of each case (what it measured, and how far it is from one process) from
rank 0, and FOLDER/NAME-RANK.json of the memory that each rank held.
"""

import json
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lmforge.core.data.batch import Batch
from lmforge.core.distributed import distributed as cluster
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.parallel.precision import missing_for_compile
from lmforge.lab.bench.bounds import FP32, relative_difference
from lmforge.lab.bench.parity import (
    OPTIMIZER,
    ParityCase,
    ParityData,
    ParityResult,
    relative_differences,
    run_case,
    run_single,
)
from tests.distributed.shapes import SHAPES, select_cases
from tests.support.near_ties import near_ties
from tests.support.rounding import other_rounding


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives of the training group inside this context, by torch's names for
    them.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # A higher-order operator has no namespace.
        namespace, _, name = function.name().rpartition("::")
        asks = name.startswith(("exchange_counts", "sizes_by_rank"))  # of expert parallelism
        if asks or (
            namespace in ("c10d", "_c10d_functional") and not name.startswith(("wait", "_wrap"))
        ):
            self.counts[name.partition(".")[0].strip("_")] += 1
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True)
class DrawnData(ParityData):
    """again: how often the batch of each step was drawn again."""

    again: tuple[int, ...] = ()

    def batch(self, step: int, vocab_size: int) -> Batch:
        seed = self.seed + 2**13 * self.again[step]  # seeds are below
        return ParityData(self.sequences, self.sequence_length, self.steps, seed).batch(
            step, vocab_size
        )


def run_where_rounding_stays_small(
    case: ParityCase, data: DrawnData, dist_ctx: DistributedContext
) -> tuple[DrawnData, ParityResult, ParityResult]:
    """The results of one process, also with other rounding, on data where that chooses no other
    expert and does not grow.

    It grows where a loss spikes: there one process that rounds differently is as far from itself as
    its splits are from it.
    """
    while True:
        with near_ties() as found:
            result = run_single(case, data, dist_ctx)
        with other_rounding():
            rounded = run_single(case, data, dist_ctx)
        mixtures = case.model_config.sparse_layers.count(True)
        near = [
            sum(found[step * mixtures : (step + 1) * mixtures]) > 0 for step in range(data.steps)
        ]
        apart = map(relative_difference, rounded.grad_norms, result.grad_norms)
        # What follows a spike may differ because of it.
        spike = next(
            (step for step, each in enumerate(apart) if each > FP32.gradient_norm / 2), None
        )
        if not any(near) and spike is None:
            return data, result, rounded
        again = [times + (near[step] or step == spike) for step, times in enumerate(data.again)]
        data = replace(data, again=tuple(again))
        assert max(data.again) < 50, "rounding grows on all data"


if __name__ == "__main__":
    folder, seed, kind, which = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    dist_ctx = cluster.init_distributed("cpu", threads=1)
    steps = 3 if which == "sample" else 10
    drawn = DrawnData(4 * dist_ctx.world_size, 48, steps, seed, again=(0,) * steps)
    for shape, cases in select_cases(kind, which, dist_ctx.world_size).items():
        cases = [replace(case, model_config=SHAPES[shape]) for case in cases]
        data, reference = drawn, None
        if cases and dist_ctx.is_rank0:
            data, *results = run_where_rounding_stays_small(cases[0], drawn, dist_ctx)
            reference, rounded = results
            still = OPTIMIZER.model_copy(update={"lr": 1e-30})
            untrained = run_single(replace(cases[0], optimizer=still), data, dist_ctx)
        data = dist_ctx.broadcast(data)
        for case in cases:
            if case.compile_model and missing_for_compile(dist_ctx.device):
                continue  # its tests are skipped
            collectives = CollectiveCounter()
            result = run_case(case, data, dist_ctx, collectives)
            name = f"{shape} {case.name}"
            (folder / f"{name}-{dist_ctx.rank_info.rank}.json").write_text(
                json.dumps(result.memory_bytes)
            )
            if reference is not None:
                content = {
                    "losses": result.losses,
                    "collectives": collectives.counts,
                    "reference": reference.losses,
                    "untrained": untrained.losses,
                    "drawn_again": data.again,
                    "rounding": relative_differences(rounded, reference),
                    **relative_differences(result, reference),
                }
                (folder / f"{name}.json").write_text(json.dumps(content))
            torch.compiler.reset()
    cluster.destroy_distributed()
