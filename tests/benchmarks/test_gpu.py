"""benchmarks/gpu.py goes from end to end without a GPU, marks what cannot be had, and records nothing."""

import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from lmforge.bench.step_timing import ran_out_of_memory

ROOT = Path(__file__).parents[2]
GIB = 2**30


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import gpu
    finally:
        sys.path.pop(0)
    return gpu


@pytest.mark.slow
def test_without_a_gpu_every_contender_has_a_row_and_nothing_is_recorded() -> None:
    results = ROOT / "benchmarks" / "results"
    before = {path: path.stat().st_mtime_ns for path in results.iterdir()}
    command = [sys.executable, "benchmarks/gpu.py", "--quick", "--seconds", "0.1", "--threads", "1"]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = {line.split("|")[1].strip(): line for line in ended.stdout.splitlines() if line.startswith("| ")}
    assert set(rows) == {"contender", "lmforge", "lmforge, float8", "plain loop", "Trainer"}
    assert "train.float8: needs a GPU" in rows["lmforge, float8"]
    losses = [float(rows[name].split("|")[-2]) for name in ("lmforge", "plain loop", "Trainer")]
    assert max(losses) - min(losses) < 0.005  # the same weights, rows and steps, in micro-batches and recomputed
    assert losses[0] < 6.238  # ln 512, where training begins
    assert re.search(r"nothing was recorded: results are of a GPU$", ended.stdout)
    assert {path: path.stat().st_mtime_ns for path in results.iterdir()} == before


def test_what_makes_a_size_fit_is_chosen_by_its_bytes(gpu: ModuleType) -> None:
    chosen = {(size, gib): gpu.what_fits(gpu.SIZES[size], 2048, gib * GIB) for size in gpu.SIZES for gib in (79, 139)}
    assert gpu.bytes_at_rest(gpu.SIZES["8b"].shape, 4) > 79 * GIB > gpu.bytes_at_rest(gpu.SIZES["8b"].shape, 2)
    assert {size for (size, gib), what in chosen.items() if gib == 79 and what["master_dtype"] == "bf16"} == {"8b"}
    assert chosen["8b", 79]["activation_checkpointing"]
    assert not chosen["1b", 79]["activation_checkpointing"]
    assert not chosen["3b", 139]["activation_checkpointing"]
    assert gpu.what_fits(gpu.SIZES["3b"], 8192, 79 * GIB)["activation_checkpointing"]


def test_sizes_are_what_they_are_called(gpu: ModuleType) -> None:
    millions = {size: gpu.parameter_count(of.shape).total / 1e6 for size, of in gpu.SIZES.items()}
    assert millions == pytest.approx({"124m": 124, "1b": 1236, "3b": 3213, "8b": 8030}, rel=0.01)
    for of in gpu.SIZES.values():
        for length in gpu.LENGTHS:
            contest = gpu.contest_of(of, length, Path(), torch.device("cpu"), Namespace(threads=1))
            assert contest.tokens_a_step == of.step_tokens
            assert contest.rows % contest.accumulation == 0


def test_want_of_memory_is_told_from_other_failures() -> None:
    assert ran_out_of_memory(1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    assert ran_out_of_memory(-9, "")
    assert not ran_out_of_memory(1, "RuntimeError: sizes differ")
    assert not ran_out_of_memory(None, "no message for 420 s")
