"""Peak FLOP/s of a rank, for the MFU: of a GPU from its data sheet, of a CPU as
core/parallel/cpu_flops.py measures it.
"""

from functools import partial

import torch

from lmforge.core import registry
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.rank_info import threads_per_rank
from lmforge.core.parallel.cpu_flops import cpu_peak_flops
from lmforge.core.parallel.precision import dtype_name


def rank_peak_flops(dist_ctx: DistributedContext, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of a rank; None for a GPU that is not in the table.

    Every rank calls it, and gets rank 0's on CPUs.

    The ranks of a host share its cores: a CPU's peak is measured with the threads of all of them,
    and divided.
    """
    if dist_ctx.device.type == "cuda":
        peak: float | None = registry.get("data_sheets", "gpus").build(
            torch.cuda.get_device_name(dist_ctx.device), dtype_name(dtype)
        )
        return peak
    ranks = dist_ctx.rank_info.local_world_size
    threads = min(ranks * torch.get_num_threads(), threads_per_rank(1))
    return dist_ctx.decide_on_rank0(partial(cpu_peak_flops, dtype, threads)) / ranks
