"""FLOP/s of a CPU's fastest matrix products, for the MFU and for what dtype `auto` is: measured
once and cached.

The measurement is kept in the user's cache folder, one file for each processor, number of threads,
dtype and version of torch. A file that is missing or damaged is measured again.
"""

import os
import platform
import time
from contextlib import suppress
from pathlib import Path

import torch
import xxhash
from pydantic import BaseModel, Field

from lmforge.core.errors import UserError
from lmforge.core.files.atomic_files import atomic_write_json
from lmforge.core.files.untrusted import read_json
from lmforge.core.records.runs import processor_name

# Sizes of the square matrices, and the time for each size. The best size differs: caches, and how
# many threads share a product.
SIZES = (512, 1024, 2048)
SECONDS_PER_SIZE = 0.4
# The minimum fraction of the cores for the fastest product. With less, other processes were using
# them, and the result is not cached.
MIN_CORE_FRACTION = 0.85


class StoredPeak(BaseModel):
    """The content of a cache file: on what it was measured, and FLOP/s."""

    machine: str
    flops: float = Field(gt=0, allow_inf_nan=False)


def cpu_peak_flops(dtype: torch.dtype, threads: int) -> float:
    """FLOP/s of this machine's CPU with `threads` threads: kept from an earlier measurement, or
    measured now.
    """
    name = str(dtype).removeprefix("torch.")
    cores = os.cpu_count()
    machine = (
        f"{processor_name() or platform.machine()}, {cores} cores, {threads} threads, {name}, torch"
        f" {torch.__version__}"
    )
    path = _cache_file(machine)
    if path is not None and (kept := _read(path, machine)) is not None:
        return kept
    flops, core_fraction = measure_peak_flops(dtype, threads)
    if path is not None and core_fraction >= MIN_CORE_FRACTION:
        # Such as a read-only home: it is measured again next time.
        with suppress(OSError, UserError):
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write_json(path, StoredPeak(machine=machine, flops=flops).model_dump())
    return flops


def measure_peak_flops(dtype: torch.dtype, threads: int) -> tuple[float, float]:
    """FLOP/s of the fastest of many large matrix products, and the part of `threads` cores that
    this process had in it.

    Takes about a second. The first product of each size, which prepares its kernel, counts only if
    it is the fastest.
    """
    generator = torch.Generator().manual_seed(0)
    before = torch.get_num_threads()
    best = 0.0
    core_fraction = 0.0
    torch.set_num_threads(threads)
    try:
        for size in SIZES:
            left, right = (
                torch.randn(size, size, dtype=dtype, generator=generator) for _ in range(2)
            )
            began = time.perf_counter()
            fastest = float("inf")
            while time.perf_counter() - began < SECONDS_PER_SIZE:
                start = time.perf_counter()
                cpu_start = time.process_time()
                left @ right
                seconds = time.perf_counter() - start
                cpu_seconds = time.process_time() - cpu_start
                fastest = min(fastest, seconds)
                if 2 * size**3 / seconds > best:
                    best = 2 * size**3 / seconds
                    core_fraction = cpu_seconds / seconds / threads
            if 8 * fastest > SECONDS_PER_SIZE:  # the next size would take longer than it may
                break
    finally:
        torch.set_num_threads(before)
    return best, core_fraction


def _cache_file(machine: str) -> Path | None:
    """The cache file for the peak of a machine; None where this user has no home."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return (
        folder / "lmforge" / f"peak-flops-{xxhash.xxh3_64_hexdigest(machine.encode())}.json"
        if folder.is_absolute()
        else None
    )


def _read(path: Path, machine: str) -> float | None:
    with suppress(OSError, UserError):
        stored = read_json(path, StoredPeak)
        if stored.machine == machine:
            return stored.flops
    return None
