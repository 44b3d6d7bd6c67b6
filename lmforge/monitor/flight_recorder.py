"""What this rank's collectives were, from PyTorch's flight recorder, which works on gloo and NCCL alike.

A collective has no name: in each group the n-th that one rank issues pairs with the n-th of the others. So ranks are
compared by group and sequence number: who has one pending waits, and who waits in another operation of the same
number has gone another way. How that is told is for `stall.py`.
"""

import pickle
import re
from typing import Any

import torch
import torch.distributed as dist

MAX_PER_GROUP = 8


def recent_collectives() -> list[dict[str, Any]]:
    """The last few of every group: {group, sequence, operation, pending}, oldest first. Empty where nothing is recorded."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    # Without the recorded stacks: looking their lines up takes seconds, and the stack of a rank that waits says the same.
    recorded = pickle.loads(torch._C._distributed_c10d._dump_fr_trace(True, False, False))  # type: ignore[attr-defined]
    by_group: dict[str, list[dict[str, Any]]] = {}
    for entry in recorded.get("entries", ()):
        number, described = entry["process_group"]
        group = described if described not in ("", "undefined") else f"group {number}"
        by_group.setdefault(group, []).append(
            {
                "group": group,
                "sequence": entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"],
                "operation": re.sub(r"^\w+:", "", entry["profiling_name"]),
                "pending": entry["state"] != "completed" and not entry["retired"],
            }
        )
    return [entry for entries in by_group.values() for entry in entries[-MAX_PER_GROUP:]]
