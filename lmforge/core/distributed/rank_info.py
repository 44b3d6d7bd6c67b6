"""The rank of this process, how often its launcher has restarted it, and its part of the cores.

This module does not import torch, since the rank is needed before that. The variables of launchers
are in `environment.py`.
"""

import os
import platform
from collections.abc import Mapping

from lmforge.core.distributed.environment import ENVIRONMENT_VARIABLE, MAX_RANKS, RankInfo, read_environment, read_number
from lmforge.core.distributed.processes import read_process_stat

RESTARTS_VARIABLE = "TORCHELASTIC_RESTART_COUNT"


def read_rank_info(environ: Mapping[str, str] = os.environ) -> RankInfo:
    """The rank of this process, by its launcher's variables, or those of the launcher that
    `--environment` names.

    Raises UserError where they are incomplete, contradict each other, or are not understood.
    """
    return read_environment(environ, environ.get(ENVIRONMENT_VARIABLE) or "auto")


def count_restarts() -> int:
    """How often the launcher has restarted these ranks; 0 without a launcher. Raises UserError."""
    return read_number(os.environ, RESTARTS_VARIABLE, 0, MAX_RANKS) if os.environ.get(RESTARTS_VARIABLE) else 0


def has_used_up_restarts() -> bool:
    """Whether torchrun, which may restart ranks, does so no more for those of this host.

    Raises UserError.
    """
    return (restarts := count_restarts()) > 0 and os.environ.get("TORCHELASTIC_MAX_RESTARTS") == f"{restarts}"


def launcher_identity() -> str | None:
    """The process of torchrun that started this rank, the same after a restart of the rank; None
    without torchrun.

    Each torchrun has its own restart count, and none counts a restart caused by a host that joined
    or left.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    parent = os.getppid()
    stat = read_process_stat(parent)
    # A process id can be reused, but not with the same start time in the same boot.
    return f"{platform.node()} {parent} {stat.started if stat else ''}"


def threads_per_rank(local_world_size: int) -> int:
    """CPU threads for each of `local_world_size` ranks on this machine, from the cores that this
    process may use.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_world_size)
