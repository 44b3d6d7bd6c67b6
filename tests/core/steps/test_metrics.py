"""The metrics of a run: exact means, a file that survives being killed, and readable lines."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.rank_info import RankInfo
from lmforge.core.errors import format_duration
from lmforge.core.stages.run_files import MetricsFile
from lmforge.core.steps.metrics import MetricsAccumulator, peak_memory_gib
from lmforge.ops.monitor.console import ConsoleLogger
from tests.seeds import fresh_seed

CPU = torch.device("cpu")
ALONE = DistributedContext(RankInfo(), CPU, None)
RECORD: dict[str, Any] = {
    "step": 30,
    "loss": 2.34567,
    "lr": 3e-4,
    "grad_norm": 0.5,
    "tokens_per_second": 12345.6,
    "mfu": 0.518,
    "memory_gib": 1.25,
    "seconds_left": 185.0,
}


def test_the_mean_is_of_all_counts_and_not_of_means() -> None:
    meter = MetricsAccumulator(ALONE)
    seed = fresh_seed()
    generator = torch.Generator().manual_seed(seed)
    sums, counts = (
        torch.rand(50, generator=generator),
        torch.randint(0, 9, (50,), generator=generator).float(),
    )
    for total, count in zip(sums, counts, strict=True):
        meter.add({"loss": (total, count), "twice": (2 * total, count)})
    expected = float(sums.double().sum() / counts.double().sum())
    assert meter.reduce_and_reset() == pytest.approx(
        {"loss": expected, "twice": 2 * expected}, rel=1e-12
    )


def test_a_maximum_is_of_all_that_were_counted() -> None:
    meter = MetricsAccumulator(ALONE)
    for value in (0.25, 3.0, 0.5):
        meter.add(
            {
                "gap/max": (torch.tensor(value), torch.tensor(4.0)),
                "loss": (torch.tensor(value), torch.tensor(1.0)),
            }
        )
    meter.add({"gap/max": (torch.tensor(9.0), torch.tensor(4.0))}, skip_if=torch.tensor(True))
    assert meter.reduce_and_reset() == {"gap/max": 3.0, "loss": 1.25}


def test_reading_resets_sums_and_metrics_that_were_never_counted_are_omitted() -> None:
    meter = MetricsAccumulator(ALONE)
    assert meter.reduce_and_reset() == {}
    meter.add({"loss": (torch.tensor(3.0), torch.tensor(2.0))})
    assert meter.reduce_and_reset() == {"loss": 1.5}
    meter.add({"loss": (torch.tensor(0.0), torch.tensor(0.0))})
    assert meter.reduce_and_reset() == {}


def test_what_a_bad_step_tells_is_not_counted() -> None:
    meter = MetricsAccumulator(ALONE)
    meter.add({"loss": (torch.tensor(torch.nan), torch.tensor(2.0))}, skip_if=torch.tensor(True))
    assert meter.reduce_and_reset() == {}
    meter.add({"loss": (torch.tensor(torch.inf), torch.tensor(2.0))}, skip_if=torch.tensor(True))
    meter.add({"loss": (torch.tensor(3.0), torch.tensor(2.0))}, skip_if=torch.tensor(False))
    assert meter.reduce_and_reset() == {"loss": 1.5}


def test_what_is_added_is_a_copy_without_a_graph() -> None:
    meter = MetricsAccumulator(ALONE)
    total = torch.tensor(3.0, requires_grad=True)
    meter.add({"loss": (total, torch.tensor(1.0))})
    with torch.no_grad():
        total.mul_(100)
    assert meter.reduce_and_reset() == {"loss": 3.0}


def test_small_sums_do_not_vanish_beside_a_large_one() -> None:
    meter = MetricsAccumulator(ALONE)
    meter.add({"loss": (torch.tensor(2.0**30), torch.tensor(1.0))})
    for _ in range(1000):
        meter.add({"loss": (torch.tensor(1.0), torch.tensor(0.0))})
    assert meter.reduce_and_reset() == {"loss": 2.0**30 + 1000}


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_each_record_is_a_line_of_json_that_is_there_at_once(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        file.write({"step": step, "loss": 0.1, "mfu": None})
        assert json.loads(lines(tmp_path / "metrics.jsonl")[-1]) == {
            "step": step,
            "loss": 0.1,
            "mfu": None,
        }
    file.close()


def test_what_is_not_finite_is_null_because_json_has_no_word_for_it(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"step": 1, "loss": float("nan"), "grad_norm": float("inf")})
    file.close()
    assert json.loads(lines(tmp_path / "metrics.jsonl")[0], parse_constant=pytest.fail) == {
        "step": 1,
        "loss": None,
        "grad_norm": None,
    }


@pytest.mark.parametrize("left", ["", '{"step": 1}\n', '{"step": 1}\n{"step": 2, "lo'])
def test_a_file_is_continued_after_whatever_a_killed_process_left(
    tmp_path: Path, left: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(left)
    file = MetricsFile(path)
    file.write({"step": 3})
    file.close()
    assert path.read_text().startswith(left)
    assert lines(path)[-1] == '{"step": 3}'
    assert len(lines(path)) == len(left.splitlines()) + 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (-3, "0s"),
        (59.4, "59s"),
        (59.5, "1m00s"),
        (185, "3m05s"),
        (3599.6, "1h00m"),
        (7620, "2h07m"),
        (86_399, "23h59m"),
        (360_000, "4d04h"),
    ],
)
def test_durations_have_two_units_at_most(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.floats(0, 1e7))
def test_time_never_shows_sixty_of_anything(seconds: float) -> None:
    assert "60" not in format_duration(seconds).removesuffix("s")[-2:]


def test_a_record_is_one_readable_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    teller = ConsoleLogger(ALONE, 1000, tmp_path / "rank-0.log")
    teller.log_metrics(RECORD)
    teller.log_metrics(
        {**RECORD, "step": 1000, "val/loss": 2.5, "val/bits_per_byte": 1.75, "mfu": None}
    )
    teller.close()
    first, last = capsys.readouterr().out.splitlines()
    assert (
        first
        == "step   30/1000  loss 2.3457  lr 3.00e-04  grad 0.50  12,346 tok/s  MFU 52%  1.2 GiB "
        " 3m05s left"
    )
    assert last.startswith("step 1000/1000  loss 2.3457  val 2.5000 (1.750 bits/byte)  lr ")
    assert "MFU" not in last
    assert [line.split(" ", 1)[1] for line in lines(tmp_path / "rank-0.log")] == [first, last]


def test_a_validation_without_a_log_step_is_logged_too(capsys: pytest.CaptureFixture[str]) -> None:
    ConsoleLogger(ALONE, 10, None).log_metrics(
        {"step": 5, "tokens": 99, "val/loss": 2.5, "val/bits_per_byte": 1.75}
    )
    assert capsys.readouterr().out == "step  5/10  val 2.5000 (1.750 bits/byte)\n"


def test_only_the_first_rank_tells(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    teller = ConsoleLogger(
        DistributedContext(RankInfo(1, 2, 1, 2), CPU, None), 10, tmp_path / "rank-1.log"
    )
    teller.start_progress(0)
    teller.info("hello")
    teller.log_metrics(RECORD)
    teller.close()
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "rank-1.log").exists()


def test_memory_is_measured_in_plausible_numbers() -> None:
    before = peak_memory_gib(CPU)
    held = torch.ones(2**26)  # 256 MiB
    assert 0 < before <= peak_memory_gib(CPU)
    assert peak_memory_gib(CPU) >= held.nbytes / 2**30
