"""benchmarks/gpu.py runs end to end without a GPU, marks contenders that are missing, and writes
each row at once.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from lmforge.lab.bench.step_timing import ran_out_of_memory

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


HIDDEN = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
COMMAND = [sys.executable, ROOT / "benchmarks" / "gpu.py", "--seconds", "0.1", "--threads", "1"]


def held(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, words)], env=HIDDEN, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_without_a_gpu_every_contender_has_a_row_and_nothing_is_recorded() -> None:
    results = ROOT / "benchmarks" / "results"
    before = {path: path.stat().st_mtime_ns for path in results.iterdir()}
    ended = held()
    assert ended.returncode == 0, ended.stderr
    rows = {
        line.split("|")[1].strip(): line
        for line in ended.stdout.splitlines()
        if line.startswith("| ")
    }
    assert set(rows) == {"contender", "lmforge", "lmforge, float8", "plain loop", "Trainer"}
    assert "train.float8: needs a GPU" in rows["lmforge, float8"]
    losses = [float(rows[name].split("|")[-2]) for name in ("lmforge", "plain loop", "Trainer")]
    # The same weights, rows and steps, in micro-batches and recomputed.
    assert max(losses) - min(losses) < 0.005
    assert losses[0] < 6.238  # ln 512, where training begins
    assert re.search(
        r"nothing was recorded: results are of a GPU; --out FOLDER records them$", ended.stdout
    )
    assert {path: path.stat().st_mtime_ns for path in results.iterdir()} == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "contenders"),
    [
        ("tiny-olmoe", {"lmforge", "plain loop", "Trainer"}),
        ("tiny-hybrid", {"lmforge", "plain loop", "Trainer"}),
        ("tiny-qlora", {"lmforge", "lmforge, NF4 without bitsandbytes", "Trainer"}),
    ],
)
def test_a_mixture_a_hybrid_and_a_quantized_base_have_no_row_of_float8_and_all_learn_the_same(
    size: str, contenders: set[str], tmp_path: Path
) -> None:
    ended = held("--only", size, "--out", tmp_path)
    assert ended.returncode == 0, ended.stderr
    rows = json.loads((tmp_path / "gpu-no-gpu.json").read_text())["cells"][size]["contenders"]
    assert set(rows) == contenders
    losses = [row["loss_of_first_steps"] for row in rows.values()]
    assert max(losses) - min(losses) < 0.005


@pytest.mark.slow
def test_a_killed_call_keeps_its_rows_and_later_calls_add_theirs(tmp_path: Path) -> None:
    path = tmp_path / "gpu-no-gpu.json"

    def rows() -> dict[str, set[str]]:
        cells = json.loads(path.read_text())["cells"] if path.exists() else {}
        return {label: set(cell["contenders"]) for label, cell in cells.items()}

    with subprocess.Popen(
        [*COMMAND, "--out", str(tmp_path)], env=HIDDEN, start_new_session=True
    ) as process:
        while not rows() and process.poll() is None:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    assert rows() == {"tiny": {"lmforge"}}
    assert held("--only", "tiny-best", "--out", tmp_path).returncode == 0
    assert held("--only", "tiny", "--contender", "plain loop", "--out", tmp_path).returncode == 0
    assert rows() == {"tiny": {"lmforge", "plain loop"}, "tiny-best": {"lmforge, selective-ops"}}
    record = json.loads(path.read_text())["cells"]
    assert record["tiny"]["contenders"]["plain loop"]["lmforge_is_faster_by"]["median"] > 0
    assert (
        record["tiny-best"]["contenders"]["lmforge, selective-ops"]["of_the_published"]["median"]
        > 0
    )
    assert "published, on one H200" in path.with_suffix(".md").read_text()


@pytest.mark.slow
def test_a_trial_that_takes_too_long_and_those_after_it_are_marked(tmp_path: Path) -> None:
    assert held("--limit", 1, "--out", tmp_path).returncode == 0
    rows = json.loads((tmp_path / "gpu-no-gpu.json").read_text())["cells"]["tiny"]["contenders"]
    assert rows["lmforge"]["failed"] == "not done after 1 s"
    assert rows["Trainer"]["failed"] == "no time was left: run it alone with --contender"


def test_rows_are_written_one_by_one_and_read_again(gpu: ModuleType, tmp_path: Path) -> None:
    content = {"what": "", "machine": gpu.machine(), "published": None}
    trial = {"speed": 10.0, "memory_gib": 1.0, "loss": 2.0}
    for label, row, speed in (
        ("1b", "lmforge", 30.0),
        ("3b", "lmforge", 9.0),
        ("1b", "Trainer", 10.0),
    ):
        record = gpu.Record(tmp_path, "NVIDIA H100 80GB HBM3")
        rows = record.cell(label, **content)
        rows[row] = gpu.figures([{**trial, "speed": speed}], 1.0, None, None)
        gpu.compare(rows)
        record.write()
    kept = json.loads((tmp_path / "gpu-nvidia-h100-80gb-hbm3.json").read_text())["cells"]
    assert {label: list(cell["contenders"]) for label, cell in kept.items()} == {
        "1b": ["lmforge", "Trainer"],
        "3b": ["lmforge"],
    }
    assert kept["1b"]["contenders"]["Trainer"]["lmforge_is_faster_by"]["median"] == 3.0


@pytest.mark.slow
def test_rows_of_lmforge_have_a_plan_beside_them_where_the_gpu_is_known(
    gpu: ModuleType, tmp_path: Path
) -> None:
    contest = Namespace(threads=1)
    size = gpu.SIZES["8b-best"]
    of_8b = gpu.replace(
        gpu.contest_of(size, size.length, tmp_path, torch.device("cpu"), contest),
        dtype="bf16",
        compiled=True,
    )
    rows = gpu.trials_of(size, of_8b)
    for name, (contender, setting) in rows.items():
        planned = gpu.prediction_of(contender, setting, "NVIDIA H200")
        assert planned.step_config.tokens_per_step == size.step_tokens
        row = gpu.figures(
            [{"speed": 10_000.0, "memory_gib": 80.0, "loss": 2.0}], 1.0, None, None, planned
        )
        assert row["predicted_of_speed"]["median"] == planned.tokens_per_second / 10_000
        assert row["predicted_of_memory"]["median"] == planned.live_bytes / (80 * GIB)
        cell = {"what": "", "machine": gpu.machine(), "published": None, "contenders": {name: row}}
        heads, _, cells = gpu.table(
            {"device": "NVIDIA H200", "cells": {"8b-best": cell}}
        ).splitlines()[-3:]
        assert len(heads.split("|")) == len(cells.split("|"))
        assert cells.split(" | ")[-4:-2] == [
            f"{planned.tokens_per_second / 1e4:.2f}",
            f"{planned.live_bytes / (80 * GIB):.2f}",
        ]
    assert gpu.prediction_of("Trainer", of_8b, "NVIDIA H200") is None
    assert gpu.prediction_of("lmforge", of_8b, "no GPU") is None
    assert gpu.prediction_of("lmforge, float8", of_8b, "NVIDIA H200").step_config.float8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "9b"], "invalid choice: '9b'"),
        pytest.param(["--contender", "someone"], "someone: no such row", marks=pytest.mark.slow),
    ],
)
def test_what_is_no_size_or_row_is_refused(words: list[str], said: str) -> None:
    ended = held(*words)
    assert ended.returncode == 2
    assert said in ended.stderr


def test_what_makes_a_size_fit_is_chosen_by_its_bytes(gpu: ModuleType) -> None:
    chosen = {
        (size, gib): gpu.what_fits(gpu.SIZES[size], 2048, gib * GIB)
        for size in gpu.SIZES
        for gib in (79, 139)
    }
    assert (
        gpu.bytes_at_rest(gpu.SIZES["8b"].shape, 4)
        > 79 * GIB
        > gpu.bytes_at_rest(gpu.SIZES["8b"].shape, 2)
    )
    narrow = {
        size for (size, gib), what in chosen.items() if gib == 79 and what["master_dtype"] == "bf16"
    }
    assert narrow == {"7b-qlora", "8b", "8b-published", "8b-best", "olmoe", "olmoe-best"}
    assert chosen["8b", 79]["activation_checkpointing"] == "full"
    assert chosen["1b", 79]["activation_checkpointing"] == "none"
    assert chosen["3b", 139]["activation_checkpointing"] == "none"
    assert gpu.what_fits(gpu.SIZES["3b"], 8192, 79 * GIB)["activation_checkpointing"] == "full"


def test_sizes_are_what_they_are_called(gpu: ModuleType) -> None:
    millions = {size: gpu.parameter_count(of.shape).total / 1e6 for size, of in gpu.SIZES.items()}
    expected = {"124m": 124, "1b": 1236, "3b": 3213, "7b": 7242, "8b": 8030, "olmoe": 6919}
    expected["hybrid"] = 1017
    assert millions == pytest.approx(
        {size: expected[size.partition("-")[0]] for size in millions}, rel=0.01
    )
    assert {size.partition("-")[0] for size in millions} == expected.keys()
    for of in gpu.SIZES.values():
        for length in (of.length, 8192):
            contest = gpu.contest_of(of, length, Path(), torch.device("cpu"), Namespace(threads=1))
            assert contest.tokens_a_step == of.step_tokens
            assert contest.rows % contest.accumulation == 0


def test_the_published_setting_is_repeated(gpu: ModuleType) -> None:
    size = gpu.SIZES["8b-published"]
    contest = gpu.contest_of(size, size.length, Path(), torch.device("cpu"), Namespace(threads=1))
    ((_, (contender, setting)),) = gpu.trials_of(size, contest).items()
    assert (contender, setting.length, setting.rows, setting.accumulation) == (
        "lmforge",
        4096,
        8,
        2,
    )
    assert (setting.activation_checkpointing, setting.master_dtype) == ("full", "bf16")


def test_out_of_memory_is_distinguished_from_other_failures() -> None:
    assert ran_out_of_memory(
        1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    )
    assert ran_out_of_memory(-9, "")
    assert not ran_out_of_memory(1, "RuntimeError: sizes differ")
    assert not ran_out_of_memory(None, "no message for 420 s")
