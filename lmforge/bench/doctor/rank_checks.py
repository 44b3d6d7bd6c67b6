"""What ranks report, compared: versions and code, clocks, and the speed of matrix products on each rank's device."""

import importlib.metadata
import platform
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lmforge.bench.doctor.finding import Finding
from lmforge.cluster.distributed import code_digest

PACKAGES = ("lmforge", "torch", "numpy", "tokenizers", "safetensors", "triton", "datasets", "transformers")
MAX_CLOCK_DIFFERENCE_SECONDS = 1.0
# (rows and columns of a product, dtype, seconds) by kind of device. A GPU slows down only once it is warm.
PRODUCTS = {"cpu": (512, torch.float32, 0.2), "cuda": (8192, torch.bfloat16, 2.0)}
# Below this fraction of the median a rank is slow. Ranks on the cores of one machine disturb each other.
SLOW_BELOW = {"cpu": 0.5, "cuda": 0.85}


def describe_host() -> dict[str, Any]:
    """The host and versions of this rank, for comparison with the others'. No torch device is touched."""
    versions = {"python": platform.python_version(), "lmforge code": code_digest(), "CUDA": torch.version.cuda or "none"}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    with suppress(OSError):
        versions["NVIDIA driver"] = Path("/proc/driver/nvidia/version").read_text().split("Kernel Module")[-1].split()[0]
    if torch.cuda.is_available():
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {"host": platform.node(), "versions": versions}


def compare_versions(facts: Mapping[int, Mapping[str, Any]]) -> Iterator[Finding]:
    """For each version that differs between ranks the most frequent one beside the others, and the hosts that have these.
    `facts` by rank, of `describe_host`."""
    versions = {rank: each["versions"] for rank, each in facts.items()}
    differ = False
    for name in dict.fromkeys(name for each in versions.values() for name in each):
        of_ranks = {rank: each.get(name, "not there") for rank, each in versions.items()}
        counts = Counter(of_ranks.values())
        (usual, most), *others = counts.most_common(4)
        for other, count in others:
            differ = True
            where = tuple(dict.fromkeys(facts[rank]["host"] for rank in facts if of_ranks[rank] == other))
            text = f"{name} {other} on {count} of {len(facts)} ranks, {usual} on {most}"
            yield Finding("versions", "fail", text, "install the same on all hosts, or share one environment", where)
    if not differ:
        shown = ", ".join(f"{name} {value}" for name, value in next(iter(versions.values())).items())
        yield Finding("versions", "pass", f"{'the same on all ranks: ' if len(facts) > 1 else ''}{shown}")


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


def measure_device(device: torch.device) -> dict[str, float]:
    """TFLOP/s of matrix products on this rank's device."""
    size, dtype, seconds = PRODUCTS[device.type]
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    rates: list[float] = []
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(rates) < 3:
        began, repetitions = time.perf_counter(), 1 if device.type == "cpu" else 20
        for _ in range(repetitions):
            torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize()
        rates.append(2 * size**3 * repetitions / (time.perf_counter() - began) / 1e12)
    return {"tflops": statistics.median(rates[len(rates) // 2 :])}


def check_devices(reports: Mapping[int, Mapping[str, Any]], names: Mapping[int, str], kind: str) -> Iterator[Finding]:
    """Findings about the speed of each rank compared with the others. `names` are those of ranks."""
    rates = {rank: report["tflops"] for rank, report in reports.items() if "tflops" in report}
    if not rates:
        return
    middle = statistics.median_high(rates.values())
    slow = {rank: rate for rank, rate in rates.items() if rate < SLOW_BELOW[kind] * middle}
    size, dtype, _ = PRODUCTS[kind]
    values = {"tflops": {str(rank): round(rate, 4) for rank, rate in rates.items()}}
    span = f"{min(rates.values()):,.3g} to {max(rates.values()):,.3g}" if len(rates) > 1 else f"{middle:,.3g}"
    what = f"{span} TFLOP/s per rank, products of {size} × {size} in {str(dtype).removeprefix('torch.')}"
    if slow:
        rates_text = ", ".join(f"{names[rank]}: {rate:,.3g}" for rank, rate in slow.items())
        todo = "every step waits for the slowest rank: see what else runs there, its clocks and cooling, or leave the host out"
        where = tuple(names[rank] for rank in slow)
        yield Finding("device speed", "warn", f"{rates_text}; the median is {middle:,.3g} TFLOP/s", todo, where, values)
    else:
        yield Finding("device speed", "pass", what, values=values)
