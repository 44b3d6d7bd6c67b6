"""The last collectives of this rank, from PyTorch's flight recorders: gloo has one, and NCCL
another.

A collective has no name: in each group the n-th of one rank pairs with the n-th of the others. So
ranks are compared by group and sequence number: a rank with a pending one waits, and ranks with
different operations of one number have diverged. `stall.py` reports it.
"""

import pickle
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lmforge.core.records.run_records import Count

MAX_PER_GROUP = 8
# The functions of gloo and of NCCL; builds for the CPU lack the second. Private to torch; checked
# with 2.13.0.
_DUMP_FUNCTIONS = ("_dump_fr_trace", "_dump_nccl_trace")


@dataclass(frozen=True)
class CollectiveRecord:
    """A collective of this rank: the `sequence`-th of its group; `pending` until it is complete."""

    group: str
    sequence: Count
    operation: str
    pending: bool


def recent_collectives() -> list[CollectiveRecord]:
    """The last few collectives of every group, oldest first. Empty where nothing is recorded."""
    import torch  # imported here, since reading reports does not need torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return []
    dump_functions = [getattr(torch._C._distributed_c10d, name, None) for name in _DUMP_FUNCTIONS]
    # Without the recorded stacks: looking up their lines takes seconds, and the stack of a waiting
    # rank says the same.
    return merge_records([pickle.loads(dump(True, False, False)) for dump in dump_functions if dump is not None])


def merge_records(dumps: Iterable[dict[str, Any]]) -> list[CollectiveRecord]:
    """The last few collectives of every group of all recorders, each recorder's oldest first."""
    by_group: dict[str, list[CollectiveRecord]] = {}
    for entry in (entry for dump in dumps for entry in dump.get("entries", ())):
        number, described = entry["process_group"]
        group = described if described not in ("", "undefined") else f"group {number}"
        sequence = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
        operation = re.sub(r"^\w+:", "", entry["profiling_name"])
        pending = entry["state"] != "completed" and not entry["retired"]
        by_group.setdefault(group, []).append(CollectiveRecord(group, sequence, operation, pending))
    return [entry for entries in by_group.values() for entry in entries[-MAX_PER_GROUP:]]
