"""The speed of communication between ranks: collectives of all ranks by size, and each host and the next in both directions."""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lmforge.bench.doctor.finding import Finding

KIB, MIB = 2**10, 2**20
# Bytes of each collective's result on a rank. The next is left out where one would take longer than BUDGET_SECONDS.
SIZES = {"cpu": (64 * KIB, 4 * MIB, 32 * MIB), "cuda": (64 * KIB, 16 * MIB, 512 * MIB)}
REPETITIONS = 3
BUDGET_SECONDS = 3.0
# The first connects. A link of 10 Mbit/s takes 6 s for the second on a CPU.
PAIR_BYTES = {"cpu": (256 * KIB, 8 * MIB), "cuda": (4 * MIB, 256 * MIB)}
SLOW_BELOW = 0.5  # of the median
# Gigabit Ethernet. Gradients of a small model take seconds over less.
SLOW_BYTES_PER_SECOND = 100e6

Collectives = dict[str, list[list[float]]]


def measure_network(
    store: dist.Store, rank: int, world_size: int, device: torch.device, leaders: Sequence[int], timeout_seconds: float
) -> dict[str, Any]:
    """Connect all ranks and measure the network. Every rank calls it; raises torch's exception where a rank does not answer.

    leaders: the first rank of each host. Returns {"collectives": …} on every rank, and on leaders {"links": …}.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
    backend, device_id = ("cpu:gloo,cuda:nccl", device) if device.type == "cuda" else ("gloo", None)
    timeout = timedelta(seconds=timeout_seconds)
    began = time.perf_counter()
    groups = dist.PrefixStore("groups", store)
    dist.init_process_group(backend, store=groups, rank=rank, world_size=world_size, device_id=device_id, timeout=timeout)
    dist.barrier()
    connected = time.perf_counter() - began
    result = {
        "connect_seconds": connected,
        "collectives": time_collectives(world_size, device, SIZES[device.type], ("all-reduce", "all-gather")),
        "links": _time_links(leaders, rank, device) if rank in leaders and len(leaders) > 1 else [],
    }
    dist.barrier()
    return result


def time_collectives(world_size: int, device: torch.device, sizes: Sequence[int], names: Sequence[str]) -> Collectives:
    """(bytes, seconds) of each size, by the name of the collective; the seconds of the slowest rank, median of repetitions.

    `sizes` are bytes of all that a rank gathers, reduces or scatters. Every rank of the default group calls it.
    """
    timed: Collectives = {name: [] for name in names}
    # Their names since torch 2.13; the old ones print a warning there.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    for name, results in timed.items():
        for size in sizes:
            if results and results[-1][1] * size / results[-1][0] > BUDGET_SECONDS:
                break
            part = torch.zeros(size // 4 // world_size, device=device)
            buffer = torch.zeros(part.numel() * world_size, device=device)
            seconds = []
            for _ in range(REPETITIONS + 1):
                began = time.perf_counter()
                if name == "all-reduce":
                    dist.all_reduce(buffer)
                elif name == "all-gather":
                    gather(buffer, part)
                else:
                    scatter(part, buffer)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - began)
            # The first one connects. All ranks must agree on whether to go on.
            slowest = torch.tensor([statistics.median(seconds[1:])], device=device, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            results.append([float(buffer.numel() * 4), slowest.item()])
    return timed


def _time_links(leaders: Sequence[int], rank: int, device: torch.device) -> list[list[float]]:
    """[sender, receiver, bytes per second] of what this rank sends to the leaders of the hosts before and after its own."""
    links = []
    for first, second in neighbours(leaders):
        for sender, receiver in ((first, second), (second, first)):
            if rank in (first, second):
                speed = _time_link(sender, receiver, rank, device)
                links += [[float(sender), float(receiver), speed]] if rank == sender else []
    return links


def neighbours(leaders: Sequence[int]) -> list[tuple[int, int]]:
    """The pairs of a ring: every second one, which are measured at once, then the others."""
    pairs = list(zip(leaders, [*leaders[1:], leaders[0]], strict=True))[: None if len(leaders) > 2 else 1]
    last = pairs[-1:] if len(pairs) % 2 and len(pairs) > 1 else []  # beside the first
    return [*pairs[: len(pairs) - len(last) : 2], *pairs[1::2], *last]


def _time_link(sender: int, receiver: int, rank: int, device: torch.device) -> float:
    """Bytes per second from one rank to another, by the sender's clock; both call it."""
    speed, answer = 0.0, torch.zeros(1, device=device)
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
    return speed


def check_network(reports: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]) -> Iterator[Finding]:
    """Findings about the collectives of all ranks, and about the links between hosts. `hosts` by rank."""
    timed, world_size = reports[0].get("collectives", {}), len(hosts)
    for name, results in timed.items():
        # The bus bandwidth as in nccl-tests: what each link carries, independent of the number of ranks.
        factor = (2 if name == "all-reduce" else 1) * (world_size - 1) / world_size
        rates = [(size, factor * size / seconds) for size, seconds in results]
        rates_text = ", ".join(f"{_rate(rate)} at {_size(size)}" for size, rate in rates)
        values: dict[str, Any] = {"bytes": [size for size, _ in results], "seconds": [seconds for _, seconds in results]}
        fastest = max(rate for _, rate in rates)
        if fastest < SLOW_BYTES_PER_SECOND and len(set(hosts.values())) > 1:
            todo = "less than a gigabit link carries: see interface and link"
            yield Finding(name, "warn", f"bus bandwidth {rates_text}", todo, values=values)
        else:
            yield Finding(name, "pass", f"bus bandwidth {rates_text}", values=values)
    links = {(hosts[int(a)], hosts[int(b)]): speed for report in reports.values() for a, b, speed in report.get("links", ())}
    if not links:
        return
    middle = statistics.median_high(links.values())
    slow = {pair: speed for pair, speed in links.items() if speed < max(SLOW_BELOW * middle, SLOW_BYTES_PER_SECOND)}
    values = {"bytes_per_second": {f"{a} → {b}": round(speed) for (a, b), speed in links.items()}}
    for (source, target), speed in sorted(slow.items(), key=lambda item: item[1]):
        text = f"{_rate(speed)} in this direction; the median of {len(links)} is {_rate(middle)}"
        todo = "check cable, switch port and the interface that is used, or leave the host out"
        yield Finding("link", "warn", text, todo, (f"{source} → {target}",), values)
    if not slow:
        text = f"{len(links)} between hosts, {_rate(min(links.values()))} to {_rate(max(links.values()))}"
        yield Finding("link", "pass", text, values=values)


def _rate(bytes_per_second: float) -> str:
    large = bytes_per_second >= 1e9
    return f"{bytes_per_second / 1e9:,.1f} GB/s" if large else f"{bytes_per_second / 1e6:,.3g} MB/s"


def _size(count: float) -> str:
    return f"{count / MIB:,.0f} MiB" if count >= MIB else f"{count / KIB:,.0f} KiB"
