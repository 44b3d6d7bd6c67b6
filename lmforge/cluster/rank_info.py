"""Who am I: the rank of this process among all, as its launcher tells it.

torchrun (and every launcher that sets the same variables) is read here, and a process that nobody launched is alone.
No torch: the answer is needed before it is imported.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lmforge.errors import UserError

# Set for ranks that `--launch.processes` starts: the process that started them.
LAUNCHER_PID_VARIABLE = "LMFORGE_LAUNCHER"


@dataclass(frozen=True)
class RankInfo:
    """Where a process stands: `rank` of `ranks`, and `local_rank` of `local_ranks` on its host."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launched: bool = False

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0


def read_rank_info(environ: Mapping[str, str] = os.environ) -> RankInfo:
    """Read the variables of torchrun. Raises UserError when only some of them are set or they make no sense."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in environ]
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return RankInfo()
    if missing:
        absent = ", ".join(missing)
        raise UserError(f"environment: RANK or WORLD_SIZE is set but {absent} is not; start with torchrun, or unset them")
    try:
        rank, ranks, local_rank = (int(environ[name]) for name in names[:3])
        local_ranks = int(environ.get("LOCAL_WORLD_SIZE", ranks))
    except ValueError:
        raise UserError("environment: RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE must be whole numbers") from None
    if not (0 <= rank < ranks and 0 <= local_rank < local_ranks <= ranks):
        counted = f"rank {rank} of {ranks}, local rank {local_rank} of {local_ranks}"
        raise UserError(f"environment: {counted}: ranks count from 0 to below WORLD_SIZE and LOCAL_WORLD_SIZE")
    return RankInfo(rank, ranks, local_rank, local_ranks, launched=True)


def threads_per_rank(local_world_size: int) -> int:
    """CPU threads for each of `local_ranks` processes on this machine, from the cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_world_size)
