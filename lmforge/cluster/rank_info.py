"""The rank of this process, from the variables of torchrun or of a launcher that sets the same ones.

A process that was not launched is the only rank. No torch here: the rank is needed before torch is imported.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from lmforge.config.ranges import RANKS
from lmforge.errors import UserError
from lmforge.untrusted import quoted

# Set for ranks that `--launch.processes` starts: the id of the process that started them.
LAUNCHER_PID_VARIABLE = "LMFORGE_LAUNCHER"
RESTARTS_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
MAX_RANKS: int = RANKS["le"]
MAX_PORT = 65_535


@dataclass(frozen=True)
class RankInfo:
    """`rank` of `world_size` ranks, `local_rank` of `local_world_size` on its host; `launched` by torchrun or the like."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launched: bool = False

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0


def read_rank_info(environ: Mapping[str, str] = os.environ) -> RankInfo:
    """Read the variables of torchrun. Raises UserError where only some are set, or they contradict each other."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = ", ".join(name for name in names if name not in environ)
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return RankInfo()
    if missing:
        raise UserError(f"environment: RANK or WORLD_SIZE is set but {missing} is not; start with torchrun, or unset them")
    rank, world_size, local_rank = (_read_number(environ, name, -MAX_RANKS, MAX_RANKS) for name in names[:3])
    local_world_size = (
        _read_number(environ, "LOCAL_WORLD_SIZE", -MAX_RANKS, MAX_RANKS) if "LOCAL_WORLD_SIZE" in environ else world_size
    )
    _read_number(environ, "MASTER_PORT", 1, MAX_PORT)
    if not environ["MASTER_ADDR"].strip():
        raise UserError("environment: MASTER_ADDR is empty; give the name or address of the host of rank 0")
    if not (0 <= rank < world_size and 0 <= local_rank < local_world_size <= world_size):
        ranks = f"rank {rank} of {world_size}, local rank {local_rank} of {local_world_size}"
        raise UserError(f"environment: {ranks}: ranks count from 0 to below WORLD_SIZE and LOCAL_WORLD_SIZE")
    return RankInfo(rank, world_size, local_rank, local_world_size, launched=True)


def _read_number(environ: Mapping[str, str], name: str, least: int, most: int) -> int:
    text = environ[name]
    number = int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None
    if number is None or not least <= number <= most:
        raise UserError(f"environment: {name}: expected a whole number up to {most}, got {quoted(text)}")
    return number


def count_restarts(environ: Mapping[str, str] = os.environ) -> int:
    """How often the launcher has restarted these ranks; 0 without a launcher. Raises UserError."""
    return _read_number(environ, RESTARTS_VARIABLE, 0, MAX_RANKS) if environ.get(RESTARTS_VARIABLE) else 0


def threads_per_rank(local_world_size: int) -> int:
    """CPU threads for each of `local_world_size` ranks on this machine, from the cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_world_size)
