"""Standby ranks: ranks left over where ranks work in groups, which wait until the others are done.

For example, five ranks may remain of a job whose model is split over two ranks. Four of them train;
the fifth waits, and takes part again when all ranks are restarted with more hosts. It joins no
process group.
"""

import os
import signal
import socket
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from lmforge.core.distributed.joining import connect_to_store, find_rank0
from lmforge.core.distributed.processes import STOP_SIGNALS, handle_signals
from lmforge.core.distributed.rank_info import read_rank_info
from lmforge.core.distributed.waiting import print_line, wait_until
from lmforge.core.errors import PeerLost

REGISTRATION = timedelta(seconds=30)
CONNECTION = timedelta(minutes=30)
# The ranks that stand by, for the rank 0 that releases them.
_standby_ranks = range(0)


def leave_out_ranks(group_size: int) -> bool:
    """Continue with as many ranks as fill groups of `group_size`.

    Returns whether this rank is left over.

    Every rank calls it before `init_distributed`, which then sees WORLD_SIZE and LOCAL_WORLD_SIZE
    of the remaining ranks. With fewer ranks than one group nothing is changed, and the caller
    refuses that. Raises UserError and RunFailed as `find_rank0` does.
    """
    global _standby_ranks
    info = read_rank_info()
    left_over = info.world_size % group_size
    if not left_over or info.world_size < group_size:
        return False
    find_rank0(info)
    world_size = info.world_size - left_over
    _standby_ranks = range(world_size, info.world_size)
    # The ranks of a host are consecutive.
    local_world_size = min(info.local_world_size, world_size - (info.rank - info.local_rank))
    if info.rank in _standby_ranks:
        return True
    os.environ["WORLD_SIZE"] = f"{world_size}"
    if info.is_counted:  # else those that remain are counted when they meet
        os.environ["LOCAL_WORLD_SIZE"] = f"{local_world_size}"
    return False


def describe_standby() -> list[str]:
    """A log line that names the standby ranks; empty where there are none."""
    if not _standby_ranks:
        return []
    ranks = ", ".join(map(str, _standby_ranks))
    count = f"{len(_standby_ranks)} of {_standby_ranks.stop} ranks"
    stand = "stands" if len(_standby_ranks) == 1 else "stand"
    return [
        (
            f"{count} {stand} by ({ranks}): too few to form another group of ranks that the model is"
            " split over"
        )
    ]


def stand_by() -> int:
    """Wait until the other ranks are done.

    Returns the exit status: 0, or 128 + a signal that reached this rank too.

    Raises PeerLost where rank 0 is gone.
    """
    rank = os.environ["RANK"]
    received = list[int]()
    # A scheduler's signal to save goes to all ranks; torchrun ends ranks with SIGTERM before it
    # restarts them.
    by_torchrun = {signal.SIGTERM} if "TORCHELASTIC_RUN_ID" in os.environ else set()
    handle_signals([*{*STOP_SIGNALS} - by_torchrun], lambda number, _: received.append(number))
    print_line(describe_standby()[0])
    try:
        store = connect_to_store(CONNECTION)
        # A store may outlive one start of the ranks, so each start has its own name for the key
        # that releases them.
        name = f"{socket.gethostname()}-{os.getpid()}"
        store.set(_registration(rank), name)
        wait_until(lambda: bool(store.check([_release(name)])))
        store.set(_receipt(name), "")
        return 128 + received[0] if received else 0
    except dist.DistNetworkError as problem:
        raise PeerLost(
            f"rank {rank}, on standby: rank 0 is gone ({str(problem).splitlines()[0]})"
        ) from None


def release_standby(rank: int) -> None:
    """On rank 0, release the standby ranks, which may have started only just now."""
    if rank != 0 or not _standby_ranks:
        return
    # The rank or the store has ended.
    with suppress(RuntimeError):
        store = connect_to_store(CONNECTION)
        names = list[str]()
        for each in _standby_ranks:
            store.wait([_registration(f"{each}")], REGISTRATION)
            names.append(store.get(_registration(f"{each}")).decode())
            store.set(_release(names[-1]), "")
        # The store may end with this process.
        store.wait([_receipt(name) for name in names], REGISTRATION)


def _registration(rank: str) -> str:
    return f"lmforge/standby/{rank}"


def _release(name: str) -> str:
    return f"lmforge/released/{name}"


def _receipt(name: str) -> str:
    return f"lmforge/ended/{name}"
