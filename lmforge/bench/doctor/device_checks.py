"""The speed of matrix products on each rank's device, and its health according to the driver."""

import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lmforge.bench.doctor.finding import Finding
from lmforge.errors import format_count

# (rows and columns of a product, dtype, seconds) by kind of device. A GPU slows down only once it is warm.
PRODUCTS = {"cpu": (512, torch.float32, 0.2), "cuda": (8192, torch.bfloat16, 2.0)}
# Below this fraction of the median a rank is slow. Ranks on the cores of one machine disturb each other.
SLOW_BELOW = {"cpu": 0.5, "cuda": 0.85}
NVIDIA_FIELDS = "index,temperature.gpu,clocks_throttle_reasons.active,ecc.errors.uncorrected.volatile.total"
NVIDIA_SECONDS = 20.0
# Bits of the driver's reasons for low clocks that indicate a problem, unlike a power limit or an idle GPU.
THROTTLE_REASONS = {0x08: "slowed by hardware", 0x20: "too hot", 0x40: "too hot", 0x80: "power brake"}


def measure_device(device: torch.device, asks_driver: bool) -> dict[str, Any]:
    """TFLOP/s of matrix products on this rank's device, and with `asks_driver` what the driver reports about this host's
    GPUs."""
    size, dtype, seconds = PRODUCTS[device.type]
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    rates: list[float] = []
    deadline = time.perf_counter() + seconds
    notes: list[dict[str, Any]] = []
    while time.perf_counter() < deadline or len(rates) < 3:
        began, repetitions = time.perf_counter(), 1 if device.type == "cpu" else 20
        for _ in range(repetitions):
            torch.mm(a, b)
        if asks_driver and not notes and len(rates) > 2 and device.type == "cuda":
            notes = read_gpu_health()  # while it computes
        if device.type == "cuda":
            torch.cuda.synchronize()
        rates.append(2 * size**3 * repetitions / (time.perf_counter() - began) / 1e12)
    return {"tflops": statistics.median(rates[len(rates) // 2 :]), "gpus": notes}


def read_gpu_health() -> list[dict[str, Any]]:
    """The output of nvidia-smi for each GPU of this host; empty without nvidia-smi."""
    if (program := shutil.which("nvidia-smi")) is None:
        return []
    command = [program, f"--query-gpu={NVIDIA_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as problem:
        return [{"gpu": "all", "problem": f"nvidia-smi does not answer ({type(problem).__name__})"}]
    if done.returncode:
        reason = " ".join((done.stdout + done.stderr).split())[:200]
        return [{"gpu": "all", "problem": f"nvidia-smi failed ({reason})"}]
    return [_parse_gpu(line) for line in done.stdout.splitlines() if line.count(",") == NVIDIA_FIELDS.count(",")]


def _parse_gpu(line: str) -> dict[str, Any]:
    """A line of nvidia-smi. A value that the GPU does not support is [N/A], and one that cannot be read another word in
    brackets."""
    index, temperature, reasons, ecc_errors = (word.strip() for word in line.split(","))
    bits = int(reasons, 16) if reasons.startswith("0x") else 0
    problems = [words for bit, words in THROTTLE_REASONS.items() if bits & bit]
    if ecc_errors.isdecimal() and int(ecc_errors):
        problems.append(f"{format_count(int(ecc_errors), 'uncorrected ECC error')} since the driver was loaded")
    if temperature.isdecimal() and "too hot" in problems:
        problems.append(f"{temperature} °C")
    return {"gpu": index, "problem": ", ".join(dict.fromkeys(problems))}


def check_devices(reports: Mapping[int, Mapping[str, Any]], names: Mapping[int, str], kind: str) -> Iterator[Finding]:
    """Findings about the speed of each rank compared with the others, and the health of GPUs. `names` are those of ranks."""
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
    sick = [(rank, gpu) for rank, report in reports.items() for gpu in report.get("gpus", ()) if gpu["problem"]]
    num_gpus = sum(len(report.get("gpus", ())) for report in reports.values())
    for rank, gpu in sick:
        host = names[rank].rpartition(" on ")[2]
        has_ecc = "ECC" in gpu["problem"]
        todo = "drain the host and reset the GPU" if has_ecc else "check cooling and power of the host"
        yield Finding("gpu health", "fail" if has_ecc else "warn", f"GPU {gpu['gpu']}: {gpu['problem']}", todo, (host,))
    if num_gpus and not sick:
        yield Finding("gpu health", "pass", f"{format_count(num_gpus, 'GPU')}: no uncorrected ECC error, none slowed down")
