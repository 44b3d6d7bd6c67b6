"""How much of the host's memory this process may still allocate, by the limits of Linux.

This module does not import torch.
"""

import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
# The control group as mounted in a container.
CGROUP_FOLDER = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class AvailableMemory:
    """Bytes that this process uses and may still allocate, and a description of the limit."""

    used_bytes: int
    free_bytes: int
    limited_by: str


def available_host_memory(local_world_size: int) -> AvailableMemory | None:
    """The tightest limit on this process's part of the host's memory; None where the system does
    not report it.

    Memory that the ranks of a host have in common is divided equally.
    """
    status = read_kib_table(Path("/proc/self/status"))
    if not status:
        return None
    resident = status["VmRSS"]
    on_host = read_kib_table(Path("/proc/meminfo"))
    words = f"{format_memory(on_host['MemTotal'])} of this host"
    limits = [AvailableMemory(resident, on_host["MemAvailable"] // local_world_size, words)]
    for which, used, words in (
        (resource.RLIMIT_AS, status["VmSize"], "address space (ulimit -v)"),
        (resource.RLIMIT_DATA, status["VmData"], "data (ulimit -d)"),
    ):
        limit, _ = resource.getrlimit(which)
        if limit != resource.RLIM_INFINITY:
            limits.append(AvailableMemory(used, max(0, limit - used), f"{format_memory(limit)} of {words}"))
    for limit, used in _container_limits():
        free = max(0, limit - used) // local_world_size
        limits.append(AvailableMemory(resident, free, f"{format_memory(limit)} of this container"))
    return min(limits, key=lambda limit: limit.free_bytes)


def _container_limits() -> Iterator[tuple[int, int]]:
    """(limit, bytes in use) of this process's container.

    Cached files do not count: the kernel drops them when it must.
    """
    for folder, limit_name, used_name, cached in (
        (CGROUP_FOLDER, "memory.max", "memory.current", ("active_file", "inactive_file")),
        (
            CGROUP_FOLDER / "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            ("total_active_file", "total_inactive_file"),
        ),
    ):
        try:
            limit, used = (int(Path(folder, name).read_text()) for name in (limit_name, used_name))
            statistics = dict(re.findall(r"^(\w+) (\d+)$", Path(folder, "memory.stat").read_text(), re.M))
        except (OSError, ValueError):  # "max"
            continue
        yield limit, used - sum(int(statistics.get(name, 0)) for name in cached)


def format_memory(count: float) -> str:
    """A number of bytes in MiB or GiB."""
    return f"{count / GIB:,.2f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"


def read_kib_table(path: Path) -> dict[str, int]:
    """Bytes by name, from a file in the form of /proc/meminfo; empty where there is none."""
    try:
        return {name: int(kib) * 2**10 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", path.read_text(), re.M)}
    except OSError:
        return {}
