"""The resolution of `auto` on this hardware, and the messages where a dtype is impossible."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lmforge.core.checkpoint import read_manifest
from lmforge.core.distributed import distributed as cluster
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.rank_info import RankInfo
from lmforge.core.errors import UserError
from lmforge.core.losses.language import NextTokenObjective
from lmforge.core.model.build import build_model
from lmforge.core.model.init_weights import init_weights
from lmforge.core.options.load import parse_config
from lmforge.core.options.sections import ParallelOptions
from lmforge.core.options.stage import PretrainConfig
from lmforge.core.parallel import cpu_flops, precision
from lmforge.core.parallel.parallelize import parallelize
from lmforge.core.parallel.precision import (
    MIN_STEPS_TO_COMPILE,
    choose_compile,
    choose_dtype,
    has_native_bf16,
    missing_for_compile,
)
from lmforge.core.parallel.validate import why_not_compiled
from lmforge.core.records.runs import Run
from lmforge.lab.bench.parity import SMALL_MODEL, ParityData
from tests.conftest import Command
from tests.support.grids import parametrize

CPU = torch.device("cpu")
CPUINFO = Path("/proc/cpuinfo")


@pytest.fixture
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No program can be found: as on a machine without a compiler."""
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.skipif(
    not CPUINFO.exists() or "\nflags" not in CPUINFO.read_text(),
    reason="needs the flags of an x86 /proc/cpuinfo",
)
def test_a_cpu_has_fast_bf16_where_its_flags_say_so() -> None:
    flags = next(
        line for line in CPUINFO.read_text().splitlines() if line.startswith("flags")
    ).split()
    assert has_native_bf16(CPU) == ("amx_bf16" in flags or "avx512_bf16" in flags)


FASTER, SLOWER = (
    {"torch.bfloat16": 120e9, "torch.float32": 100e9},
    {"torch.bfloat16": 119e9, "torch.float32": 100e9},
)
# `lmforge` on a CPU with bf16 arithmetic, whose products a measurement finds so fast: a table for
# each rank.
ON_CPU = """
import json, os, sys
from lmforge.cli import main
from lmforge.core.parallel import cpu_flops, precision
if __name__ == "__main__":
    flops = json.loads(sys.argv.pop(1))[int(os.environ.get("RANK", 0))]
    os.environ["XDG_CACHE_HOME"] = sys.argv.pop(1)
    cpu_flops.measure_peak_flops = lambda dtype, threads: (flops[str(dtype)], 0.0)
    precision.has_native_bf16 = lambda device: True
    main()
"""


@pytest.fixture
def measures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """`measures(flops)`: what this machine's CPU measures."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def set_flops(flops: dict[str, float], *, native: bool = True) -> None:
        monkeypatch.setattr(
            cpu_flops, "measure_peak_flops", lambda dtype, threads: (flops[str(dtype)], 0.0)
        )
        monkeypatch.setattr(precision, "has_native_bf16", lambda device: native)

    return set_flops


def test_auto_is_bf16_where_its_products_are_faster_by_a_fifth_and_says_both_figures(
    measures: Callable[..., None],
) -> None:
    measures(FASTER)
    assert choose_dtype("auto", CPU) == (
        torch.bfloat16,
        "products of a core: 120 GFLOP/s in bf16, 100 in fp32",
    )
    measures(SLOWER)
    assert choose_dtype("auto", CPU) == (
        torch.float32,
        "products of a core: 119 GFLOP/s in bf16, 100 in fp32",
    )
    measures({}, native=False)  # nothing is measured, as emulated products take long
    assert choose_dtype("auto", CPU) == (torch.float32, "this hardware has no bf16 arithmetic")


def test_auto_follows_what_is_measured_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_flops, "SECONDS_PER_SIZE", 0.02)
    monkeypatch.setattr(cpu_flops, "MIN_CORE_FRACTION", 0.0)  # kept, whatever else runs here
    dtype, reason = choose_dtype("auto", CPU)
    fast = has_native_bf16(CPU)
    if fast:
        bf16, fp32 = (cpu_flops.cpu_peak_flops(each, 1) for each in (torch.bfloat16, torch.float32))
        fast = bf16 >= 1.2 * fp32
        assert (
            reason
            == f"products of a core: {bf16 / 1e9:,.0f} GFLOP/s in bf16, {fp32 / 1e9:,.0f} in fp32"
        )
    assert dtype == (torch.bfloat16 if fast else torch.float32)


@parametrize(
    ("begins", "chosen", "says", "resumes"),
    [
        (
            [FASTER, SLOWER],
            "bf16",
            "bfloat16 (products of a core: 120 GFLOP/s in bf16, 100 in fp32)",
            SLOWER,
        ),
        (
            [SLOWER],
            "fp32",
            "float32 (products of a core: 119 GFLOP/s in bf16, 100 in fp32)",
            FASTER,
        ),
    ],
    fast=(1,),
)
def test_rank_0_decides_for_all_and_a_resume_on_another_processor_keeps_it(
    tmp_path: Path,
    tiny_options: list[str],
    program: Command,
    begins: list[dict[str, float]],
    chosen: str,
    says: str,
    resumes: dict[str, float],
) -> None:
    words = [
        "pretrain",
        *tiny_options,
        "--train.dtype",
        "auto",
        "--run.folder",
        tmp_path,
        "--run.name",
        "run",
    ]
    words += ["--schedule.warmup_steps", 0]
    done = program(
        ON_CPU, json.dumps(begins), tmp_path, *words, "--train.steps", 1, ranks=len(begins)
    )
    assert done.returncode == 0, done.stderr
    assert f"compute    {says}, " in done.stdout
    run = Run(tmp_path / "run")
    assert run.load_config().train.dtype == chosen
    again = program(ON_CPU, json.dumps([resumes]), tmp_path, *words, "--train.steps", 2)
    assert again.returncode == 0, again.stderr
    assert f"compute    {says.split()[0]} (as the run began), " in again.stdout
    assert "train.dtype" not in again.stdout  # nothing has changed
    assert {
        read_manifest(run.checkpoint_path(step)).recipe["train"]["dtype"] for step in (1, 2)
    } == {chosen}
    assert {read_manifest(run.checkpoint_path(step)).written_by["dtype"] for step in (1, 2)} == {
        f"torch.{says.split()[0]}"
    }


def test_what_is_asked_for_is_given_with_a_warning_where_it_is_slow() -> None:
    assert choose_dtype("fp32", CPU) == (torch.float32, "as requested")
    dtype, reason = choose_dtype("bf16", CPU)
    assert dtype == torch.bfloat16
    assert ("far slower" in reason) == (not has_native_bf16(CPU))


def compiled(requested: str, device: torch.device, steps: int, **parallel: Any) -> tuple[bool, str]:
    """What is chosen for a recipe with these options of [parallel]."""
    words = [
        word for name, value in parallel.items() for word in (f"--parallel.{name}", str(value))
    ]
    return choose_compile(
        parse_config(PretrainConfig, ["--train.compile", requested, *words]), device, steps
    )


@pytest.mark.needs("a C++ compiler")
def test_compiling_is_chosen_where_a_long_run_repays_it() -> None:
    assert compiled("auto", CPU, MIN_STEPS_TO_COMPILE)[0]
    assert compiled("auto", CPU, MIN_STEPS_TO_COMPILE - 1) == (
        False,
        "fewer than 200 steps would not repay the compilation",
    )
    assert compiled("on", CPU, 1) == (True, "as requested")
    assert compiled("off", CPU, 10**6) == (False, "as requested")


@pytest.mark.needs("a C++ compiler")
def test_tensor_parallelism_on_a_cpu_is_not_compiled_with_full_activation_checkpointing() -> None:
    split = {"tensor_parallel_degree": 2}
    reason = "tensor parallelism with full activation checkpointing cannot be compiled on a CPU"
    for mode in ("full", "selective-blocks"):
        assert compiled("auto", CPU, 10**6, activation_checkpointing=mode, **split) == (
            False,
            reason,
        )
        assert compiled("off", CPU, 10**6, activation_checkpointing=mode, **split) == (
            False,
            "as requested",
        )
        with pytest.raises(
            UserError, match=f"train.compile = on: {reason}; use parallel.activation_"
        ):
            compiled("on", CPU, 10**6, activation_checkpointing=mode, **split)
        assert (
            why_not_compiled(ParallelOptions(activation_checkpointing=mode, **split), "cuda")
            is None
        )
    assert compiled("on", CPU, 1, activation_checkpointing="selective-ops", **split) == (
        True,
        "as requested",
    )
    assert compiled("on", CPU, 1, activation_checkpointing="full", context_parallel_degree=2) == (
        True,
        "as requested",
    )


@pytest.mark.usefixtures("bare_machine")
def test_without_a_compiler_auto_does_without_and_on_is_a_mistake() -> None:
    assert missing_for_compile(CPU) == "no C++ compiler (g++)"
    assert compiled("auto", CPU, 10**6) == (False, "no C++ compiler (g++)")
    assert compiled("off", CPU, 10**6) == (False, "as requested")
    with pytest.raises(
        UserError,
        match=(
            r"train\.compile = on: no C\+\+ compiler \(g\+\+\) on this machine; install it, or use"
            r" --train\.compile off"
        ),
    ):
        compiled("on", CPU, 10**6)


def test_angles_of_positions_stay_fp32_where_sharding_casts_what_blocks_are_given_to_bf16() -> None:
    trained = parallelize(
        init_weights(build_model(SMALL_MODEL), 0),
        NextTokenObjective().loss,
        dist_ctx=DistributedContext(RankInfo(), CPU, None),
        dtype=torch.bfloat16,
        options=ParallelOptions(engine="fsdp2"),
    )
    seen = []
    for block in trained.model.blocks:
        block.self_attn.register_forward_pre_hook(
            lambda _, given: seen.append((given[0].dtype, given[1].cos.dtype))
        )
    try:
        trained.model_with_loss(ParityData(sequences=2).batch(0, SMALL_MODEL.vocab_size))
    finally:
        cluster.destroy_distributed()
    assert seen == [(torch.bfloat16, torch.float32)] * SMALL_MODEL.num_hidden_layers


@pytest.mark.gpu
def test_a_gpu_compiles_and_multiplies_bf16_from_ampere_on() -> None:
    device = torch.device("cuda", 0)
    assert has_native_bf16(device) == (torch.cuda.get_device_capability(device) >= (8, 0))
    assert compiled("auto", device, 1) == (True, "one graph per block")
