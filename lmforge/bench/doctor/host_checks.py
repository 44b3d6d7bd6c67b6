"""What a rank reports about its host, and whether the ranks agree: versions, code, variables, limits, interfaces, clocks."""

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import xxhash

import lmforge
from lmforge.bench.doctor.finding import Finding
from lmforge.cluster.environment import LAUNCHER_PID_VARIABLE
from lmforge.cluster.joining import GLOO_GROUPS, OTHER_OPEN_FILES, interface_towards
from lmforge.cluster.rank_info import RankInfo

PACKAGES = ("lmforge", "torch", "numpy", "tokenizers", "safetensors", "triton", "datasets", "transformers")
# Variables by which libraries choose how they communicate. One that only some ranks have makes them wait for each other.
VARIABLES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "UCX_", "FI_", "OMP_", "CUDA_DEVICE_", "HF_", "PYTORCH_", "LMFORGE_")
SECRETS = ("TOKEN", "KEY", "SECRET", "PASSWORD")
OF_A_PROCESS = (LAUNCHER_PID_VARIABLE, "LMFORGE_TEST", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
MAX_CLOCK_DIFFERENCE_SECONDS = 1.0
LOW_PROCESSES, LOW_LOCKED_BYTES, LOW_SHARED_BYTES = 4096, 2**30, 2**30
LIMITS = {
    "open files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
    "locked memory": resource.RLIMIT_MEMLOCK,
    "core file": resource.RLIMIT_CORE,
}


def describe_host(info: RankInfo) -> dict[str, Any]:
    """Versions, variables and network of this rank, for comparison with the others'. No torch device is touched."""
    versions = {"python": platform.python_version(), "lmforge code": _code_digest(), "CUDA": torch.version.cuda or "none"}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    with suppress(OSError):
        versions["NVIDIA driver"] = Path("/proc/driver/nvidia/version").read_text().split("Kernel Module")[-1].split()[0]
    if torch.cuda.is_available():
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    several_hosts = info.local_world_size < info.world_size
    gloo = os.environ.get("GLOO_SOCKET_IFNAME") or (several_hosts and interface_towards(os.environ.get("MASTER_ADDR", "")))
    return {
        "host": platform.node(),
        "versions": versions,
        "variables": {name: value for name, value in sorted(os.environ.items()) if _is_compared(name)},
        "gloo": gloo or "",
        "nccl": os.environ.get("NCCL_SOCKET_IFNAME", ""),
        "interfaces": [name for _, name in socket.if_nameindex()],
        "infiniband": sorted(each.name for each in Path("/sys/class/infiniband").glob("*")),
    }


def _code_digest() -> str:
    """Hexadecimal digits that differ where the code of lmforge does: a clone on each host may be another commit."""
    folder = Path(lmforge.__file__).parent
    digest = xxhash.xxh3_64()
    for path in sorted(folder.rglob("*.py")):
        digest.update(bytes(path.relative_to(folder)))
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _is_compared(name: str) -> bool:
    return name.startswith(VARIABLES) and name not in OF_A_PROCESS and not any(word in name for word in SECRETS)


def check_limits(info: RankInfo, uses_gpu: bool) -> Iterator[Finding]:
    """The limits of this process that affect a run: open files, processes, locked and shared memory."""
    needed = GLOO_GROUPS * info.world_size + OTHER_OPEN_FILES
    has_infiniband = any(Path("/sys/class/infiniband").glob("*"))
    limits = {name: resource.getrlimit(number) for name, number in LIMITS.items()}
    shown = ", ".join(f"{name} {_limit(name, soft)}" for name, (soft, _) in limits.items())
    problems = []
    if 0 <= limits["open files"][1] < needed:
        problems.append((f"at most {limits['open files'][1]:,} open files, and {needed:,} are needed", "ulimit -Hn"))
    if 0 <= limits["processes"][0] < LOW_PROCESSES and os.geteuid() != 0:
        problems.append(
            (f"at most {limits['processes'][0]:,} processes and threads, {LOW_PROCESSES:,} are needed", "ulimit -u")
        )
    if has_infiniband and 0 <= limits["locked memory"][0] < LOW_LOCKED_BYTES:
        problems.append(
            (f"locked memory {_limit('locked memory', limits['locked memory'][0])}, InfiniBand needs more", "ulimit -l")
        )
    for text, command in problems:
        todo = f"raise it where jobs are started ({command}; LimitNOFILE and the like of slurmd or sshd), for all hosts"
        yield Finding("limits", "warn", text, todo)
    if not problems:
        yield Finding("limits", "pass", shown)
    with suppress(OSError):
        shared = shutil.disk_usage("/dev/shm").total
        if uses_gpu and shared < LOW_SHARED_BYTES:
            text = f"{shared / 2**20:,.0f} MiB of shared memory, which NCCL and loaders need"
            yield Finding("shared memory", "warn", text, "give the container more: --shm-size 16g, or --ipc host")


def _limit(name: str, value: int) -> str:
    if value == resource.RLIM_INFINITY:
        return "unlimited"
    return f"{value:,}" if name in ("open files", "processes") else f"{value / 2**20:,.0f} MiB"


def compare_hosts(facts: Mapping[int, Mapping[str, Any]], several_hosts: bool) -> Iterator[Finding]:
    """Findings about what ranks have in different versions, values or interfaces. `facts` by rank, of `describe_host`."""
    hosts = {rank: each["host"] for rank, each in facts.items()}
    versions = list(_differences({rank: each["versions"] for rank, each in facts.items()}, hosts))
    for text, where in versions:
        yield Finding("versions", "fail", text, "install the same on all hosts, or share one environment", where)
    if not versions:
        shown = ", ".join(f"{name} {value}" for name, value in next(iter(facts.values()))["versions"].items())
        yield Finding("versions", "pass", f"{'the same on all ranks: ' if len(facts) > 1 else ''}{shown}")
    for text, where in _differences({rank: each["variables"] for rank, each in facts.items()}, hosts):
        todo = "export it to all ranks, or to none (mpiexec -x or -genv; srun --export)"
        yield Finding("variables", "warn", text, todo, where)
    if several_hosts:
        yield from _check_interfaces(facts, hosts)


def _differences(values: Mapping[int, Mapping[str, str]], hosts: Mapping[int, str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """For each name whose values differ: the most frequent value beside the others, and the hosts that have the others."""
    for name in dict.fromkeys(name for each in values.values() for name in each):
        counts = Counter(each.get(name, "not there") for each in values.values())
        if len(counts) == 1:
            continue
        usual = counts.most_common(1)[0][0]
        for other in list(counts)[:4]:
            if other != usual:
                ranks = [rank for rank, each in values.items() if each.get(name, "not there") == other]
                where = tuple(dict.fromkeys(hosts[rank] for rank in ranks))
                yield f"{name} {other} on {len(ranks)} of {len(values)} ranks, {usual} on {counts[usual]}", where


def _check_interfaces(facts: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]) -> Iterator[Finding]:
    problems = 0
    for rank, each in facts.items():
        for library in ("gloo", "nccl"):
            # NCCL takes prefixes, lists, and ^ before those to leave out.
            names = [name.removeprefix("=") for name in each[library].split(",") if name and not each[library].startswith("^")]
            if names and not any(has.startswith(name) for name in names for has in each["interfaces"]):
                problems += 1
                text = f"{library.upper()}_SOCKET_IFNAME = {each[library]}: there is only {', '.join(each['interfaces'])}"
                yield Finding(
                    "interface", "fail", text, "name one that every host has, or unset it", (f"rank {rank} on {hosts[rank]}",)
                )
        if each["gloo"] in ("", "lo"):
            problems += 1
            text = "gloo would use the loopback, which reaches no other host"
            yield Finding(
                "interface", "fail", text, "set GLOO_SOCKET_IFNAME to the interface between the hosts", (hosts[rank],)
            )
        if each["infiniband"] and each["variables"].get("NCCL_IB_DISABLE") == "1":
            problems += 1
            text = f"NCCL_IB_DISABLE = 1, and there is InfiniBand ({', '.join(each['infiniband'])})"
            yield Finding("interface", "warn", text, "unset it: NCCL is several times slower over TCP", (hosts[rank],))
    if not problems:
        used = Counter(each["gloo"] for each in facts.values())
        nccl = ", ".join(dict.fromkeys(each["nccl"] or "its own choice" for each in facts.values()))
        infiniband = ", ".join(dict.fromkeys(name for each in facts.values() for name in each["infiniband"])) or "none"
        yield Finding("interface", "pass", f"gloo {', '.join(used)}; NCCL {nccl}; InfiniBand {infiniband}")


def compare_clocks(times: Mapping[int, float], names: Mapping[int, str]) -> Finding:
    """A finding about the clocks of ranks, in seconds since the epoch, read when rank 0 asked for them."""
    offsets = {rank: seconds - times[0] for rank, seconds in times.items()}
    late = {rank: offset for rank, offset in offsets.items() if abs(offset) > MAX_CLOCK_DIFFERENCE_SECONDS}
    if late:
        offsets_text = ", ".join(f"{names[rank]}: {offset:+,.1f} s" for rank, offset in list(late.items())[:8])
        todo = "synchronize it (chronyd or ntpd): logs of hosts are merged by time, and object stores refuse wrong clocks"
        return Finding("clocks", "warn", f"relative to rank 0: {offsets_text}", todo, tuple(names[rank] for rank in late))
    largest = max(map(abs, offsets.values()))
    return Finding("clocks", "pass", f"within {max(largest, 0.01):.2f} s of rank 0's, which includes the time to ask")


def name_ranks(hosts: Mapping[int, str], ranks: Sequence[int]) -> dict[int, str]:
    """What messages call each rank: with its host, where that is known."""
    return {rank: f"rank {rank} on {hosts[rank]}" if rank in hosts else f"rank {rank}" for rank in ranks}
