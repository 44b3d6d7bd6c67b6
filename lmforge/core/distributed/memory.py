"""How much memory this process may still allocate, whether something fits into it, and
out-of-memory errors. What a run needs and what would fit is computed from its recipe in plan/.
Limits of the host are in `host_memory.py`.
"""

import os
import re
import resource
import sys
from collections.abc import Callable, MutableMapping
from pathlib import Path

import torch

from lmforge.core.distributed.host_memory import (
    AvailableMemory,
    available_host_memory,
    format_memory,
    read_kib_table,
)
from lmforge.core.errors import UserError

# The number of allocations and frees that are recorded with their stacks.
MAX_MEMORY_EVENTS = 100_000
# Both are read by torch; the second is the older name.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_OUT_OF_MEMORY_PATTERN = re.compile(
    r"can't allocate memory|[Cc]annot allocate memory|out of memory|bad_alloc|[Uu]nable to allocate"
)
_REQUESTED_BYTES_PATTERN = re.compile(
    r"(?:tried to allocate|Tried to allocate|Unable to allocate) ([\d.]+) (bytes|[KMGTPE]iB)"
)
_UNITS = {
    "bytes": 1,
    **{f"{letter}iB": 2 ** (10 * power) for power, letter in enumerate("KMGTPE", start=1)},
}


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether torch, numpy or Python ran out of memory, on a GPU or in the host."""
    if isinstance(problem, MemoryError | torch.OutOfMemoryError):
        return True
    return (
        isinstance(problem, RuntimeError)
        and _OUT_OF_MEMORY_PATTERN.search(str(problem)) is not None
    )


def describe_request(problem: BaseException) -> str:
    """A description of how much memory was requested when there was none left."""
    request = _REQUESTED_BYTES_PATTERN.search(str(problem))
    return (
        f"{format_memory(float(request[1]) * _UNITS[request[2]])} were requested"
        if request
        else "a request was refused"
    )


def set_allocator_defaults(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let the GPU allocator expand its segments, which reduces fragmentation, unless the user has
    configured it.

    Call it before the first allocation.
    """
    if not any(name in environ for name in ALLOCATOR_VARIABLES):
        environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


def record_memory(device: torch.device) -> None:
    """Record from now on where each block of a GPU's memory is allocated, for
    `write_memory_snapshot`.
    """
    torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS, device=device)


def write_memory_snapshot(path: Path) -> None:
    """Write a snapshot of the GPU's memory for https://pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(str(path))


def available_memory(device: torch.device, local_world_size: int) -> AvailableMemory | None:
    """The tightest limit on the memory in which a model trains on `device`; None where the system
    does not report it.

    Memory that the ranks of a host have in common is divided equally.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return AvailableMemory(
            total - free - idle, free + idle, f"this GPU's {format_memory(total)}"
        )
    return available_host_memory(local_world_size)


def peak_resident_bytes() -> int:
    """The largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def check_fits(
    required_bytes: float,
    device: torch.device,
    what: str,
    way: str | Callable[[int], str],
    *,
    num_ranks: int = 1,
) -> None:
    """Raise UserError where `what` (in words) needs more memory than this process may allocate.

    `way` is the advice, or a function of the free bytes that returns it. `num_ranks` of this host
    check at the same time. It is called before anything is built, since the kernel would kill the
    process later without a message.
    """
    available = available_memory(device, num_ranks)
    swap = 0 if device.type == "cuda" else read_kib_table(Path("/proc/meminfo")).get("SwapFree", 0)
    if available is not None and required_bytes > available.free_bytes + swap:
        need = format_memory(required_bytes)
        free = format_memory(available.free_bytes)
        way = way if isinstance(way, str) else way(available.free_bytes)
        raise UserError(
            f"{what}: needs {need}, and {free} are left of {available.limited_by}; {way}"
        )
