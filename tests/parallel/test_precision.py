"""The resolution of `auto` on this hardware, and the messages where a dtype is impossible."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lmforge.bench.parity import SMALL_MODEL, ParityData
from lmforge.cluster import distributed as cluster
from lmforge.cluster.distributed import DistributedContext
from lmforge.cluster.rank_info import RankInfo
from lmforge.config.load import parse_config
from lmforge.config.sections import ParallelOptions
from lmforge.config.stage import PretrainConfig
from lmforge.errors import UserError
from lmforge.model import build_model
from lmforge.model.init_weights import init_weights
from lmforge.objectives.language import NextTokenObjective
from lmforge.parallel.parallelize import parallelize
from lmforge.parallel.precision import MIN_STEPS_TO_COMPILE, choose_compile, choose_dtype, has_native_bf16, missing_for_compile
from lmforge.parallel.validate import why_not_compiled

CPU = torch.device("cpu")
CPUINFO = Path("/proc/cpuinfo")


@pytest.fixture
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No program can be found: as on a machine without a compiler."""
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.skipif(
    not CPUINFO.exists() or "\nflags" not in CPUINFO.read_text(), reason="needs the flags of an x86 /proc/cpuinfo"
)
def test_a_cpu_has_fast_bf16_where_its_flags_say_so() -> None:
    flags = next(line for line in CPUINFO.read_text().splitlines() if line.startswith("flags")).split()
    assert has_native_bf16(CPU) == ("amx_bf16" in flags or "avx512_bf16" in flags)


def test_auto_is_bf16_exactly_where_the_hardware_multiplies_it() -> None:
    dtype, reason = choose_dtype("auto", CPU)
    assert dtype == (torch.bfloat16 if has_native_bf16(CPU) else torch.float32)
    assert reason == ("the hardware supports it" if has_native_bf16(CPU) else "this hardware has no bf16 arithmetic")


def test_what_is_asked_for_is_given_with_a_warning_where_it_is_slow() -> None:
    assert choose_dtype("fp32", CPU) == (torch.float32, "as requested")
    dtype, reason = choose_dtype("bf16", CPU)
    assert dtype == torch.bfloat16
    assert ("far slower" in reason) == (not has_native_bf16(CPU))


def compiled(requested: str, device: torch.device, steps: int, **parallel: Any) -> tuple[bool, str]:
    """What is chosen for a recipe with these options of [parallel]."""
    words = [word for name, value in parallel.items() for word in (f"--parallel.{name}", str(value))]
    return choose_compile(parse_config(PretrainConfig, ["--train.compile", requested, *words]), device, steps)


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
        assert compiled("auto", CPU, 10**6, activation_checkpointing=mode, **split) == (False, reason)
        assert compiled("off", CPU, 10**6, activation_checkpointing=mode, **split) == (False, "as requested")
        with pytest.raises(UserError, match=f"train.compile = on: {reason}; use parallel.activation_"):
            compiled("on", CPU, 10**6, activation_checkpointing=mode, **split)
        assert why_not_compiled(ParallelOptions(activation_checkpointing=mode, **split), "cuda") is None
    assert compiled("on", CPU, 1, activation_checkpointing="selective-ops", **split) == (True, "as requested")
    assert compiled("on", CPU, 1, activation_checkpointing="full", context_parallel_degree=2) == (True, "as requested")


@pytest.mark.usefixtures("bare_machine")
def test_without_a_compiler_auto_does_without_and_on_is_a_mistake() -> None:
    assert missing_for_compile(CPU) == "no C++ compiler (g++)"
    assert compiled("auto", CPU, 10**6) == (False, "no C++ compiler (g++)")
    assert compiled("off", CPU, 10**6) == (False, "as requested")
    with pytest.raises(
        UserError,
        match=r"train\.compile = on: no C\+\+ compiler \(g\+\+\) on this machine; install it, or use --train\.compile off",
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
        block.self_attn.register_forward_pre_hook(lambda _, given: seen.append((given[0].dtype, given[1].cos.dtype)))
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
