"""`lmforge bench --calibrate` and `lmforge plan --calibration`: what is measured, what a plan uses,
and what it refuses.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lmforge.cli import run
from lmforge.core.options.stage import PretrainConfig
from lmforge.lab.options.plan import MachineOptions
from lmforge.lab.plan.calibration import (
    COLLECTIVES,
    REQUIRED,
    Calibration,
    RateTable,
    read_calibration,
)
from lmforge.lab.plan.hardware import data_sheets
from lmforge.lab.plan.planning import choose_dtypes, find_machine
from lmforge.lab.plan.prediction.rates import Group, Rates
from tests.conftest import Command, Refusal
from tests.support.calibrations import EXPERTS, calibration, write_calibration

CPU_PLAN = ["--gpu_type", "cpu", "--train.global_batch_size", "8"]


def planned(capfd: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert run(["plan", *map(str, words), "--output", "json"]) == 0
    return dict(json.loads(capfd.readouterr().out))


# --- measuring ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_ranks_measure_themselves_and_a_plan_of_two_takes_it(
    lmforge: Command, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "measured" / "two.json"
    words = [
        "bench",
        "--calibrate",
        "--out",
        out,
        "--bench.calibrate_seconds",
        0.5,
        "--launch.processes",
        2,
    ]
    done = lmforge(*words, "--run.folder", tmp_path)
    assert done.returncode == 0, done.stderr
    measured = read_calibration(out)
    assert (
        f"{len(measured.measurements)} measurements of {measured.device}, 2 ranks, " in done.stdout
    )
    assert (measured.kind, measured.ranks, measured.hosts) == ("cpu", 2, 1)
    assert measured.packages["torch"]
    names = {each.what for each in measured.measurements}
    assert names == {*REQUIRED, *EXPERTS, *COLLECTIVES, "disk write", "disk read"}
    # Nothing is left of what was written to measure the disk.
    assert [*tmp_path.iterdir()] == [out.parent]
    common = [*CPU_PLAN, "--gpus", 2, "--train.dtype", "fp32"]
    result, before = planned(capfd, *common, "--calibration", out), planned(capfd, *common)
    every = ["matrix products", "products of experts", "attention", "memory", "collectives", "disk"]
    assert result["constants"] == {"measured": every, "data sheets": []}
    assert before["constants"]["measured"] == []
    spans = []
    for each in (result, before):
        low, high = each["tokens_per_second_per_gpu_interval"]
        spans.append((high - low) / each["tokens_per_second_per_gpu"])
    assert spans[0] == pytest.approx(0.30)
    assert spans[1] == pytest.approx(0.50)
    assert result["live_bytes"] == before["live_bytes"]
    assert "exists already; name another file" in lmforge(*words).stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "a.json"], "--bench.out: only with --calibrate"),
        (["--calibrate", "--sweep", "train.seed=1,2"], "--sweep: not with --calibrate"),
        (
            ["--calibrate", "--bench.calibrate_seconds", "0"],
            "bench.calibrate_seconds: expected a number above 0",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    refused: Refusal, words: list[str], message: str
) -> None:
    assert message in refused("bench", *words)


# --- the file -------------------------------------------------------------------------------------


def test_values_between_measured_sizes_are_between_theirs_and_beyond_the_grid_those_of_its_edge() -> (
    None
):
    table = RateTable({(10, 10): 1.0, (10, 1000): 3.0, (1000, 10): 5.0, (1000, 1000): 7.0})
    assert table.at(10, 1000) == 3.0
    assert table.at(100, 10) == pytest.approx(3.0)
    assert table.at(100, 100) == pytest.approx(4.0)
    assert table.at(1, 1e9) == 3.0
    with pytest.raises(ValueError, match="missing in another"):
        RateTable({(10, 10): 1.0, (10, 1000): 3.0, (1000, 10): 5.0})


def damage(change: Callable[[dict[str, Any]], object]) -> str:
    table = calibration()
    change(table)
    return json.dumps(table)


def without_attention_in_bf16() -> dict[str, Any]:
    table = calibration(dtypes=("fp32", "bf16"))
    kept = [
        each
        for each in table["measurements"]
        if (each["what"], each["dtype"]) != ("attention", "bf16")
    ]
    return table | {"measurements": kept}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps(calibration())[:-9], "not valid JSON"),
        (
            damage(lambda table: table.update(version=2)),
            "of version 2, and this lmforge reads version 1",
        ),
        ("{}", "without a version"),
        ("[]", "expected an object"),
        (
            damage(lambda table: table["measurements"].pop(0)),
            "measured in one row is missing in another",
        ),
        (damage(lambda table: table["measurements"].clear()), "product: not measured"),
        (
            damage(lambda table: table["measurements"][0].update(value=-1.0)),
            "measurements[0].value: expected a number of at least 1e-09",
        ),
        (
            damage(lambda table: table["measurements"][0].update(unit="s")),
            "product: expected sizes rows, inner, columns in FLOP/s",
        ),
        (
            damage(lambda table: table["measurements"][0].update(what="luck")),
            "measurements[0]: an unknown measurement",
        ),
        (
            damage(lambda table: table["measurements"][0].update(value=1e-300)),
            "expected a number of at least 1e-09",
        ),
        (damage(lambda table: table.update(device="H100\x1b[31m")), "device: "),
        (json.dumps(calibration(ranks=2) | {"ranks": 1}), "all-reduce: measured with one rank"),
        (damage(lambda table: table.update(hosts=2)), "2 hosts with 1 ranks"),
        (json.dumps(without_attention_in_bf16()), "attention: not measured in bf16"),
        (
            damage(lambda table: table.update(ranks=2)),
            "ranks on a CPU share its cores: 2 measured, 1 planned per host",
        ),
        (
            damage(lambda table: table.update(kind="cuda", device="NVIDIA H100 80GB HBM3")),
            "give --gpu_type h100-80",
        ),
        (
            damage(lambda table: table.update(kind="cuda", device="GeForce 256")),
            "of GeForce 256, and the plan is for cpu",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_one_line(
    tmp_path: Path, refused: Refusal, text: str, message: str
) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text)
    line = refused("plan", *CPU_PLAN, "--calibration", path)
    assert message in line
    assert str(path) in line


def test_products_above_the_peak_of_the_data_sheet_are_refused(
    tmp_path: Path, refused: Refusal
) -> None:
    table = calibration(kind="cuda", device="NVIDIA H100 80GB HBM3", dtypes=("fp32", "bf16"))
    words = ["plan", "--gpus", 1, "--calibration", write_calibration(tmp_path, table)]
    assert run([str(word) for word in words]) == 0
    for each in table["measurements"]:
        if (each["what"], each["dtype"]) == ("product", "bf16"):
            each["value"] = 1.3e15
    write_calibration(tmp_path, table)
    assert refused(*words).endswith(
        "calibration.json: products in bf16 at 1,300 TFLOP/s, and the data sheet of h100-80 has"
        " 989; run lmforge bench --calibrate again"
    )


def test_a_file_that_is_not_there_is_one_line(refused: Refusal) -> None:
    assert "--calibration: none.json: no such file" in refused(
        "plan", *CPU_PLAN, "--calibration", "none.json"
    )


# --- what a plan takes of it ----------------------------------------------------------------------


def test_each_measured_rate_takes_the_place_of_its_constant(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*CPU_PLAN, "--train.dtype", "fp32", "--calibration"]
    before = planned(capfd, *words, write_calibration(tmp_path, calibration()))["seconds"]
    of_kind = {
        "product": "matrix products",
        "attention": "attention",
        "element-wise": "element-wise",
        "memory": "optimizer",
    }
    for name, kind in of_kind.items():
        table = calibration()
        for each in table["measurements"]:
            if each["what"] in (name, f"{name} backward"):
                each["value"] /= 2
        after = planned(capfd, *words, write_calibration(tmp_path, table))["seconds"]
        assert after[kind] == pytest.approx(2 * before[kind], rel=1e-6)
        others = (
            set(of_kind.values()) - {kind} - ({"matrix products"} if name == "memory" else set())
        )
        assert all(after[other] == before[other] for other in others)


def test_products_of_experts_take_the_time_that_was_measured_beside_dense_ones(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*CPU_PLAN, "--train.dtype", "fp32", "--model.preset", "nano-moe", "--calibration"]
    before = planned(capfd, *words, write_calibration(tmp_path, calibration()))["seconds"]
    table = calibration()
    for each in table["measurements"]:
        if each["what"] in EXPERTS:
            each["value"] /= 2
    after = planned(capfd, *words, write_calibration(tmp_path, table))["seconds"]
    assert after["products of experts"] == pytest.approx(2 * before["products of experts"])
    assert after["matrix products"] == before["matrix products"]
    table["measurements"] = [each for each in table["measurements"] if each["what"] not in EXPERTS]
    of_file = planned(capfd, *words, write_calibration(tmp_path, table))
    assert of_file["constants"]["data sheets"] == ["products of experts", "collectives"]


def test_the_disk_and_the_memory_are_those_that_were_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*CPU_PLAN, "--calibration", write_calibration(tmp_path, calibration())]
    result = planned(capfd, *words)
    assert result["capacity_bytes"] == 2**34
    assert result["run"]["checkpoint_seconds"] == pytest.approx(
        result["run"]["checkpoint_bytes"] / 1e10
    )


@pytest.mark.slow
def test_a_plan_says_what_was_measured_and_what_is_of_a_data_sheet(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gpu = calibration(kind="cuda", device="NVIDIA H100 80GB HBM3", dtypes=("fp32", "bf16"))
    words = [
        "--gpus",
        16,
        "--train.global_batch_size",
        16,
        "--calibration",
        write_calibration(tmp_path, gpu),
    ]
    assert run(["plan", *map(str, words)]) == 0
    first = capfd.readouterr().out.splitlines()[0]
    assert (
        "constants measured (NVIDIA H100 80GB HBM3, 1 rank, 2026-11-23): matrix products, products"
        " of experts, " in first
    )
    assert "products of experts, attention, memory, disk; from data sheets" in first
    assert (
        "from data sheets (NVIDIA H100 data sheet (SXM)): collectives, host copies, network"
        in first
    )
    assert run(["plan", *map(str, words), "--search", "--configurations", "3"]) == 0
    assert "constants measured (NVIDIA H100 80GB HBM3" in capfd.readouterr().out
    only_fp32 = write_calibration(
        tmp_path, calibration(kind="cuda", device="NVIDIA H100 80GB HBM3")
    )
    result = planned(
        capfd, "--train.global_batch_size", 8, "--train.dtype", "bf16", "--calibration", only_fp32
    )
    assert result["constants"]["measured"] == ["memory", "disk"]


@pytest.mark.parametrize(("speedup", "dtype"), [(1.25, "bf16"), (1.15, "fp32"), (0.5, "fp32")])
def test_auto_is_bf16_on_a_cpu_where_its_products_were_measured_faster_by_a_fifth(
    tmp_path: Path, speedup: float, dtype: str
) -> None:
    table = calibration(dtypes=("fp32", "bf16"))
    for each in table["measurements"]:
        if (each["what"], each["dtype"]) == ("product", "bf16"):
            each["value"] *= speedup
    machine = find_machine(
        MachineOptions(gpu_type="cpu", calibration=write_calibration(tmp_path, table))
    )
    assert choose_dtypes(PretrainConfig(), machine.gpu, machine.calibration)[0] == dtype


def test_measured_collectives_count_for_the_group_that_was_measured() -> None:
    """Two ranks of one host: other groups on one host by what each link carries, and groups on
    several hosts not at all.
    """
    table = calibration(ranks=2)
    for each in table["measurements"]:
        if each["what"] in COLLECTIVES:
            each["value"] = each["sizes"]["bytes"] / 1e9
    sheets = Rates.of_data_sheets(
        data_sheets().gpu("cpu"), data_sheets().network("ethernet-10"), 2, "fp32"
    )
    rates = sheets.calibrate(Calibration(**table), "fp32")
    two, across = Group(2, 1, 2), Group(4, 2, 2)
    assert rates.all_reduce_seconds(2**20, two) == pytest.approx(2**20 / 1e9)
    assert rates.gather_seconds(2**30, two, "reduce-scatter") == pytest.approx(2**30 / 1e9)
    assert rates.gather_seconds(1, two) == pytest.approx(2**16 / 1e9)
    assert rates.gather_seconds(2**20, Group(4, 1, 4)) == pytest.approx(1.5 * 2**20 / 1e9)
    assert rates.gather_seconds(2**20, across) == sheets.gather_seconds(2**20, across)


# --- compared with a step -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "engine", "ranks", "checkpointing"),
    [
        ("nano", "single", 1, "none"),
        ("nano", "single", 1, "full"),
        ("nano", "single", 1, "selective-ops"),
        ("nano", "ddp", 2, "none"),
        ("nano", "fsdp2", 2, "full"),
        ("nano-moe", "single", 1, "selective-ops"),
        ("nano-moe", "fsdp2", 2, "none"),
    ],
)
def test_live_tensors_at_the_peak_of_a_step_are_those_that_bench_measures(
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    preset: str,
    engine: str,
    ranks: int,
    checkpointing: str,
) -> None:
    # A tensor that vmap handed out, as another test of this process may have left one, has no bytes
    # of its own.
    left: list[torch.Tensor] = []
    torch.vmap(lambda row: (left.append(row), row)[1])(torch.zeros(3, 2))
    words = [
        "--parallel.activation_checkpointing",
        checkpointing,
        "--train.compile",
        "off",
        "--train.dtype",
        "fp32",
    ]
    # On a CPU, which of two collectives of FSDP ends first moves the peak by up to 4 MiB: of a
    # smaller batch by over 5 %.
    words += [
        "--train.micro_batch_size",
        "6",
        "--train.global_batch_size",
        str(6 * ranks),
        "--data.sequence_length",
        "256",
    ]
    words += [
        "--model.preset",
        preset,
        "--model.num_hidden_layers",
        "3",
        "--parallel.engine",
        engine,
    ]
    timed = ["--launch.processes", str(ranks)] if ranks > 1 else []
    timed += [
        "--bench.steps",
        "1",
        "--bench.warmup_steps",
        "1",
        "--data.folder",
        str(tmp_path / "none"),
    ]
    assert run(["bench", *words, *timed, "--bench.output", "json"]) == 0
    [row] = json.loads(capfd.readouterr().out)
    predicted = planned(capfd, *words, "--gpus", ranks, "--gpu_type", "cpu")["live_bytes"] / 2**30
    assert predicted == pytest.approx(row["live_gib"], rel=0.05)
    assert row["live_gib"] < row["memory_gib"]
