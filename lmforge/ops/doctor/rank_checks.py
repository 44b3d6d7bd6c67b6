"""What ranks report, compared: versions and code, clocks, the speed of matrix products on each
rank's device, and that of communication: collectives of all ranks by size, and each host and the
next in both directions.
"""

import importlib.metadata
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.benchmark import Timer

from lmforge.core.distributed.distributed import code_digest
from lmforge.ops.doctor import Finding, Status

PACKAGES = (
    "lmforge",
    "torch",
    "numpy",
    "tokenizers",
    "safetensors",
    "triton",
    "datasets",
    "transformers",
)
MAX_CLOCK_DIFFERENCE_SECONDS = 1.0
# (rows and columns of a product, dtype, seconds) by kind of device. A GPU slows down only once it
# is warm.
PRODUCTS = {"cpu": (512, torch.float32, 0.2), "cuda": (8192, torch.bfloat16, 2.0)}
# Below this fraction of the median a rank is slow. Ranks on the cores of one machine disturb each
# other.
SLOW_BELOW = {"cpu": 0.5, "cuda": 0.85}
KIB = 2**10
MIB = 2**20
# Bytes of each collective's result on a rank. The next is left out where one would take longer than
# BUDGET_SECONDS.
SIZES = {"cpu": (64 * KIB, 4 * MIB, 32 * MIB), "cuda": (64 * KIB, 16 * MIB, 512 * MIB)}
REPETITIONS = 3
BUDGET_SECONDS = 3.0
# The first connects. A link of 10 Mbit/s takes 6 s for the second on a CPU.
PAIR_BYTES = {"cpu": (256 * KIB, 8 * MIB), "cuda": (4 * MIB, 256 * MIB)}
SLOW_LINK = 0.5  # of the median
# Gigabit Ethernet. Gradients of a small model take seconds over less.
SLOW_BYTES_PER_SECOND = 100e6

Collectives = dict[str, list[list[float]]]


def describe_host() -> dict[str, Any]:
    """The host and versions of this rank, for comparison with the others'. No torch device is
    touched.
    """
    versions = {
        "python": platform.python_version(),
        "lmforge code": code_digest(),
        "CUDA": torch.version.cuda or "none",
    }
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    with suppress(OSError):
        versions["NVIDIA driver"] = (
            Path("/proc/driver/nvidia/version").read_text().split("Kernel Module")[-1].split()[0]
        )
    if torch.cuda.is_available():
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {"host": platform.node(), "versions": versions}


def compare_versions(facts: Mapping[int, Mapping[str, Any]]) -> Iterator[Finding]:
    """A finding for each version that differs between ranks: the most frequent one, the others, and
    the hosts that have these.

    `facts` of `describe_host`, by rank.
    """
    versions = {rank: each["versions"] for rank, each in facts.items()}
    differ = False
    for name in dict.fromkeys(name for each in versions.values() for name in each):
        of_ranks = {rank: each.get(name, "not there") for rank, each in versions.items()}
        counts = Counter(of_ranks.values())
        (usual, most), *others = counts.most_common(4)
        for other, count in others:
            differ = True
            where = tuple(
                dict.fromkeys(facts[rank]["host"] for rank in facts if of_ranks[rank] == other)
            )
            text = f"{name} {other} on {count} of {len(facts)} ranks, {usual} on {most}"
            yield Finding(
                "versions",
                "fail",
                text,
                "install the same on all hosts, or share one environment",
                where,
            )
    if not differ:
        shown = ", ".join(
            f"{name} {value}" for name, value in next(iter(versions.values())).items()
        )
        yield Finding(
            "versions", "pass", f"{'the same on all ranks: ' if len(facts) > 1 else ''}{shown}"
        )


def compare_clocks(times: Mapping[int, float], names: Mapping[int, str]) -> Finding:
    """A finding about the clocks of ranks, in seconds since the epoch, read when rank 0 asked for
    them.
    """
    offsets = {rank: seconds - times[0] for rank, seconds in times.items()}
    late = {
        rank: offset
        for rank, offset in offsets.items()
        if abs(offset) > MAX_CLOCK_DIFFERENCE_SECONDS
    }
    if late:
        offsets_text = ", ".join(
            f"{names[rank]}: {offset:+,.1f} s" for rank, offset in list(late.items())[:8]
        )
        todo = (
            "synchronize it (chronyd or ntpd): logs of hosts are merged by time, and object stores"
            " refuse wrong clocks"
        )
        return Finding(
            "clocks",
            "warn",
            f"relative to rank 0: {offsets_text}",
            todo,
            tuple(names[rank] for rank in late),
        )
    largest = max(map(abs, offsets.values()))
    return Finding(
        "clocks",
        "pass",
        f"within {max(largest, 0.01):.2f} s of rank 0's, which includes the time to ask",
    )


def measure_device(device: torch.device) -> dict[str, float]:
    """TFLOP/s of matrix products on this rank's device."""
    size, dtype, seconds = PRODUCTS[device.type]
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    timer = Timer("a @ b", globals={"a": a, "b": b}, num_threads=torch.get_num_threads())
    times = timer.blocked_autorange(min_run_time=seconds).times
    return {"tflops": 2 * size**3 / statistics.median(times[len(times) // 2 :]) / 1e12}


def check_devices(
    reports: Mapping[int, Mapping[str, Any]], names: Mapping[int, str], kind: str
) -> Iterator[Finding]:
    """Findings about the speed of each rank compared with the others.

    `names` are those of ranks.
    """
    rates = {rank: report["tflops"] for rank, report in reports.items() if "tflops" in report}
    if not rates:
        return
    middle = statistics.median_high(rates.values())
    slow = {rank: rate for rank, rate in rates.items() if rate < SLOW_BELOW[kind] * middle}
    size, dtype, _ = PRODUCTS[kind]
    values = {"tflops": {str(rank): round(rate, 4) for rank, rate in rates.items()}}
    if slow:
        text = (
            f"{', '.join(f'{names[rank]}: {rate:,.3g}' for rank, rate in slow.items())}; the median"
            f" is {middle:,.3g} TFLOP/s"
        )
        todo = (
            "every step waits for the slowest rank: see what else runs there, its clocks and"
            " cooling, or leave the host out"
        )
        yield Finding(
            "device speed", "warn", text, todo, tuple(names[rank] for rank in slow), values
        )
        return
    if len(rates) > 1:
        span = f"{min(rates.values()):,.3g} to {max(rates.values()):,.3g}"
    else:
        span = f"{middle:,.3g}"
    text = (
        f"{span} TFLOP/s per rank, products of {size} × {size} in"
        f" {str(dtype).removeprefix('torch.')}"
    )
    yield Finding("device speed", "pass", text, values=values)


def measure_network(
    store: dist.Store,
    rank: int,
    world_size: int,
    device: torch.device,
    leaders: Sequence[int],
    timeout_seconds: float,
) -> dict[str, Any]:
    """Connect all ranks and measure the network.

    Every rank calls it; raises torch's exception where a rank does not answer.

    leaders: the first rank of each host. Returns {"collectives": …} on every rank, and on leaders
    {"links": …}.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
    backend, device_id = ("cpu:gloo,cuda:nccl", device) if device.type == "cuda" else ("gloo", None)
    timeout = timedelta(seconds=timeout_seconds)
    groups = dist.PrefixStore("groups", store)
    dist.init_process_group(
        backend,
        store=groups,
        rank=rank,
        world_size=world_size,
        device_id=device_id,
        timeout=timeout,
    )
    dist.barrier()
    result = {
        "collectives": time_collectives(
            world_size, device, SIZES[device.type], ("all-reduce", "all-gather")
        ),
        "links": _time_links(leaders, rank, device) if rank in leaders and len(leaders) > 1 else [],
    }
    dist.barrier()
    return result


def time_collectives(
    world_size: int, device: torch.device, sizes: Sequence[int], names: Sequence[str]
) -> Collectives:
    """(bytes, seconds) of each size, by the name of the collective; the seconds of the slowest
    rank, median of repetitions.

    `sizes` are bytes of all that a rank gathers, reduces or scatters. Every rank of the default
    group calls it.
    """
    timed: Collectives = {name: [] for name in names}
    # Their names since torch 2.13; the old ones print a warning there.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    calls: dict[str, Callable[[Tensor, Tensor], object]] = {
        "all-reduce": lambda whole, part: dist.all_reduce(whole),
        "all-gather": gather,
        "reduce-scatter": lambda whole, part: scatter(part, whole),
    }
    for name, results in timed.items():
        call = calls[name]
        for size in sizes:
            if results and results[-1][1] * size / results[-1][0] > BUDGET_SECONDS:
                break
            part = torch.zeros(size // 4 // world_size, device=device)
            buffer = torch.zeros(part.numel() * world_size, device=device)
            seconds = []
            for _ in range(REPETITIONS + 1):
                began = time.perf_counter()
                call(buffer, part)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - began)
            # The first one connects. All ranks must agree on whether to go on.
            slowest = torch.tensor(
                [statistics.median(seconds[1:])], device=device, dtype=torch.float64
            )
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            results.append([float(buffer.numel() * 4), slowest.item()])
    return timed


def _time_links(leaders: Sequence[int], rank: int, device: torch.device) -> list[list[float]]:
    """[sender, receiver, bytes per second] of what this rank sends to the leaders of the hosts
    before and after its own, by its clock.
    """
    links = list[list[float]]()
    answer = torch.zeros(1, device=device)
    pairs = [
        pair for first, second in neighbours(leaders) for pair in ((first, second), (second, first))
    ]
    for sender, receiver in (pair for pair in pairs if rank in pair):
        speed = 0.0
        for size in PAIR_BYTES[device.type]:
            data = torch.empty(size, dtype=torch.uint8, device=device)
            began = time.perf_counter()
            if rank == sender:
                dist.send(data, receiver)
                dist.recv(answer, receiver)
            else:
                dist.recv(data, sender)
                dist.send(answer, sender)
            answer.item()
            speed = size / (time.perf_counter() - began)
        if rank == sender:
            links.append([sender, receiver, speed])
    return links


def neighbours(leaders: Sequence[int]) -> list[tuple[int, int]]:
    """The pairs of a ring: every second one, which are measured at once, then the others."""
    pairs = list(zip(leaders, [*leaders[1:], leaders[0]], strict=True))
    if len(leaders) <= 2:
        pairs = pairs[:1]
    last = pairs[-1:] if len(pairs) % 2 and len(pairs) > 1 else []  # beside the first
    return [*pairs[: len(pairs) - len(last) : 2], *pairs[1::2], *last]


def check_network(
    reports: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]
) -> Iterator[Finding]:
    """Findings about the collectives of all ranks, and about the links between hosts.

    `hosts` by rank.
    """
    timed = reports[0].get("collectives", {})
    world_size = len(hosts)
    for name, results in timed.items():
        # The bus bandwidth as in nccl-tests: what each link carries, independent of the number of
        # ranks.
        factor = (2 if name == "all-reduce" else 1) * (world_size - 1) / world_size
        rates = [(size, factor * size / seconds) for size, seconds in results]
        rates_text = ", ".join(f"{_rate(rate)} at {_size(size)}" for size, rate in rates)
        values: dict[str, Any] = {
            "bytes": [size for size, _ in results],
            "seconds": [seconds for _, seconds in results],
        }
        fastest = max(rate for _, rate in rates)
        is_slow = fastest < SLOW_BYTES_PER_SECOND and len(set(hosts.values())) > 1
        status: Status = "pass"
        todo = ""
        if is_slow:
            status = "warn"
            todo = "less than a gigabit link carries: see interface and link"
        yield Finding(name, status, f"bus bandwidth {rates_text}", todo, values=values)
    links = {
        (hosts[int(a)], hosts[int(b)]): speed
        for report in reports.values()
        for a, b, speed in report.get("links", ())
    }
    if not links:
        return
    middle = statistics.median_high(links.values())
    slow = {
        pair: speed
        for pair, speed in links.items()
        if speed < max(SLOW_LINK * middle, SLOW_BYTES_PER_SECOND)
    }
    values = {"bytes_per_second": {f"{a} → {b}": round(speed) for (a, b), speed in links.items()}}
    for (source, target), speed in sorted(slow.items(), key=lambda item: item[1]):
        text = f"{_rate(speed)} in this direction; the median of {len(links)} is {_rate(middle)}"
        todo = "check cable, switch port and the interface that is used, or leave the host out"
        yield Finding("link", "warn", text, todo, (f"{source} → {target}",), values)
    if not slow:
        text = (
            f"{len(links)} between hosts, {_rate(min(links.values()))} to"
            f" {_rate(max(links.values()))}"
        )
        yield Finding("link", "pass", text, values=values)


def _rate(bytes_per_second: float) -> str:
    large = bytes_per_second >= 1e9
    if large:
        return f"{bytes_per_second / 1e9:,.1f} GB/s"
    return f"{bytes_per_second / 1e6:,.3g} MB/s"


def _size(count: float) -> str:
    if count >= MIB:
        return f"{count / MIB:,.0f} MiB"
    return f"{count / KIB:,.0f} KiB"
