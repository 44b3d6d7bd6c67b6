"""The peak of this machine is measured once, and an invalid cache does not stop a run."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.rank_info import RankInfo, threads_per_rank
from lmforge.core.model.flops import FLOPS_CONVENTION
from lmforge.core.parallel import cpu_flops
from lmforge.core.parallel.cpu_flops import cpu_peak_flops, measure_peak_flops
from lmforge.core.parallel.peak_flops import rank_peak_flops

CPU = torch.device("cpu")
Measured = list[tuple[torch.dtype, int]]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "lmforge"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    """What is measured, in order; the n-th time the peak is n GFLOP/s, on free cores."""
    return measuring(monkeypatch, core_fraction=1.0)


def measuring(monkeypatch: pytest.MonkeyPatch, core_fraction: float) -> Measured:
    calls: Measured = []

    def measure(dtype: torch.dtype, threads: int) -> tuple[float, float]:
        calls.append((dtype, threads))
        return len(calls) * 1e9, core_fraction

    monkeypatch.setattr(cpu_flops, "measure_peak_flops", measure)
    return calls


def test_it_is_measured_once_for_each_dtype_and_number_of_threads(
    cache: Path, measured: Measured
) -> None:
    for _ in range(2):
        assert cpu_peak_flops(torch.float32, 2) == 1e9
        assert cpu_peak_flops(torch.bfloat16, 2) == 2e9
        assert cpu_peak_flops(torch.float32, 1) == 3e9
    assert measured == [(torch.float32, 2), (torch.bfloat16, 2), (torch.float32, 1)]
    assert len(list(cache.iterdir())) == 3


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[1, 2]",
        '{"machine": "another", "flops": 7e9}',
        "MACHINE -7",
        "MACHINE null",
        "MACHINE NaN",
        "[" * 5000,
    ],
)
def test_a_damaged_cache_is_measured_and_written_again(
    cache: Path, measured: Measured, content: str
) -> None:
    cpu_peak_flops(torch.float32, 2)
    [file] = cache.iterdir()
    machine, _, flops = content.partition(" ")
    described = json.dumps(json.loads(file.read_text())["machine"])
    file.write_text(
        f'{{"machine": {described}, "flops": {flops}}}' if machine == "MACHINE" else content
    )
    assert [cpu_peak_flops(torch.float32, 2) for _ in range(2)] == [2e9, 2e9]


def test_a_cache_that_cannot_be_written_costs_only_time(
    tmp_path: Path, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    for place in (str(tmp_path / "file"), "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", place)
        first = cpu_peak_flops(torch.float32, 2)
        assert cpu_peak_flops(torch.float32, 2) == first + 1e9
    assert not Path("relative").exists()


def test_a_folder_in_its_place_is_left_there(cache: Path, measured: Measured) -> None:
    cpu_peak_flops(torch.float32, 2)
    [file] = cache.iterdir()
    file.unlink()
    file.mkdir()
    assert cpu_peak_flops(torch.float32, 2) == 2e9
    assert file.is_dir()


def test_what_is_measured_while_others_use_the_cores_is_not_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring(monkeypatch, core_fraction=0.5)
    assert [cpu_peak_flops(torch.float32, 2) for _ in range(2)] == [1e9, 2e9]
    assert not cache.exists()


def test_concurrent_writers_leave_one_complete_file(cache: Path, measured: Measured) -> None:
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: cpu_peak_flops(torch.float32, 2), range(40)))
    [file] = cache.iterdir()
    assert json.loads(file.read_text())["flops"] == cpu_peak_flops(torch.float32, 2)
    assert cpu_peak_flops(torch.float32, 2) in results


def test_ranks_of_a_host_share_its_peak(cache: Path, measured: Measured) -> None:
    dist_ctx = DistributedContext(RankInfo(0, 2, 0, 2), CPU, None)
    assert rank_peak_flops(dist_ctx, torch.float32) == 0.5e9
    assert measured == [(torch.float32, min(2 * torch.get_num_threads(), threads_per_rank(1)))]


def test_a_measurement_is_plausible_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_flops, "SECONDS_PER_SIZE", 0.05)
    threads, rng = torch.get_num_threads(), torch.get_rng_state()
    flops, core_fraction = measure_peak_flops(torch.float32, 1)
    assert 1e8 < flops < 1e14
    assert 0 < core_fraction < 1.5
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), rng)


def test_a_run_prints_one_short_line_about_it(tiny_run: Path) -> None:
    log = (tiny_run / "logs" / "attempt-1" / "rank-0.log").read_text()
    [line] = [line for line in log.splitlines() if "MFU" in line and "step" not in line]
    assert line.endswith(" GFLOP/s per rank (measured on this machine)")
    assert FLOPS_CONVENTION not in log
