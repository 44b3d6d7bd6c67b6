"""The dtype in which a model computes (float8 too), and whether its blocks are compiled: what
`auto` means on this hardware.
"""

import shutil
import sysconfig
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.errors import UserError, how_to_install
from lmforge.core.model.layers import LanguageModel
from lmforge.core.options.stage import StageConfig
from lmforge.core.parallel.cpu_flops import cpu_peak_flops
from lmforge.core.parallel.validate import (
    check_compiled,
    check_float8_dtype,
    check_float8_layers,
    why_not_compiled,
)

ConfigT = TypeVar("ConfigT", bound=StageConfig)
# The dtypes by their option names.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# On a CPU `auto` is bf16 where its products are this many times as fast: what is not a product
# gains nothing, and bf16 rounds.
MIN_BF16_SPEEDUP = 1.2
# Compilation takes about half a minute on a CPU and saves about a tenth of a step: shorter runs
# lose by it.
MIN_STEPS_TO_COMPILE = 200
# The first compute capability whose tensor cores multiply float8: Ada (8.9), then Hopper (9.0).
FLOAT8_MIN_CAPABILITY = (8, 9)


def dtype_name(dtype: torch.dtype) -> str:
    """The option name of a dtype."""
    return next(name for name, each in DTYPES.items() if each == dtype)


def has_native_bf16(device: torch.device) -> bool:
    """Whether the hardware has bf16 arithmetic.

    Emulated bf16 is up to a hundred times slower than fp32.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    if not hasattr(torch.cpu, "get_capabilities"):  # torch 2.11 has only this function
        return bool(torch.cpu._is_avx512_bf16_supported())
    capabilities = torch.cpu.get_capabilities()
    return bool(
        capabilities.get("amx_bf16") or capabilities.get("avx512_bf16") or capabilities.get("bf16")
    )


def choose_dtype(requested: str, device: torch.device) -> tuple[torch.dtype, str]:
    """The compute dtype, and the reason in a few words. bf16 is allowed on hardware without it,
    with a warning. Ranks call `decide_dtype`.
    """
    if requested == "fp32":
        return torch.float32, "as requested"
    fast = has_native_bf16(device)
    if requested == "bf16":
        warning = (
            ""
            if fast
            else ", but this hardware only emulates bf16: expect it to be far slower than fp32"
        )
        return torch.bfloat16, f"as requested{warning}"
    if not fast:
        return torch.float32, "this hardware has no bf16 arithmetic"
    if device.type != "cpu":
        return torch.bfloat16, "the hardware supports it"
    # Of one thread: threads of one product wait for each other, and other programs would decide.
    bf16, fp32 = (cpu_peak_flops(dtype, threads=1) for dtype in (torch.bfloat16, torch.float32))
    chosen = torch.bfloat16 if is_bf16_faster(bf16, fp32) else torch.float32
    return (
        chosen,
        f"products of a core: {bf16 / 1e9:,.0f} GFLOP/s in bf16, {fp32 / 1e9:,.0f} in fp32",
    )


def is_bf16_faster(bf16_flops: float, fp32_flops: float) -> bool:
    """Whether products in bf16 are so much faster on a CPU that `auto` is bf16.

    Some CPUs have its arithmetic, at half the speed of fp32.
    """
    return bf16_flops >= MIN_BF16_SPEEDUP * fp32_flops


def with_dtype(
    config: ConfigT, dist_ctx: DistributedContext, began_in: str | None = None
) -> tuple[ConfigT, str]:
    """The recipe with the dtype that `auto` is, and the reason.

    A run that continues keeps that in which it began, whatever is faster here. Every rank calls it.
    """
    continues = config.train.dtype == "auto" and began_in is not None
    dtype, reason = decide_dtype(str(began_in) if continues else config.train.dtype, dist_ctx)
    train = config.train.model_copy(update={"dtype": dtype_name(dtype)})
    return config.model_copy(update={"train": train}), (
        reason.replace("requested", "the run began") if continues else reason
    )


def decide_dtype(requested: str, dist_ctx: DistributedContext) -> tuple[torch.dtype, str]:
    """`choose_dtype` on rank 0, for all ranks. Every rank calls it."""
    return dist_ctx.decide_on_rank0(partial(choose_dtype, requested, dist_ctx.device))


def check_float8(device: torch.device, dtype: torch.dtype) -> None:
    """Raise UserError where float8 is impossible: on this device, with this compute dtype, or
    without torchao.
    """
    needed = "needs a GPU of compute capability 8.9 or newer"
    way = "leave train.float8 out"
    if device.type != "cuda":
        raise UserError(f"train.float8: {needed}, and this is a {device.type}; {way}")
    capability = torch.cuda.get_device_capability(device)
    if capability < FLOAT8_MIN_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise UserError(
            f"train.float8: {needed}, and {name} has {capability[0]}.{capability[1]}; {way}"
        )
    check_float8_dtype(dtype_name(dtype))
    if find_spec("torchao") is None:
        raise UserError(
            f"train.float8: torchao is not installed; {how_to_install('fp8')}, or {way}"
        )


def convert_to_float8(model: LanguageModel, *, emulate: bool = False) -> None:
    """Let the linear layers of `model`'s blocks multiply in float8, in place, before they are
    compiled or sharded.

    One scale per tensor, computed for every product (torchao's tensorwise recipe); inputs and
    weights as e4m3, gradients as e5m2. Embedding and head are not converted. Weights keep their
    dtype and names, so checkpoints do not change. With `emulate` the products are of fp32 numbers
    that were rounded to float8, which works on any device, slowly. Raises UserError for layers that
    do not fit.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    layers = [
        (name, layer)
        for name, layer in model.blocks.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    sizes = {
        name.partition(".")[2]: (layer.in_features, layer.out_features) for name, layer in layers
    }
    check_float8_layers(model.config, sizes)
    # The number of tokens, which may be any, is the inner dimension of a weight's gradient: it is
    # padded.
    convert_to_float8_training(
        model.blocks, config=Float8LinearConfig(pad_inner_dim=True, emulate=emulate)
    )


def missing_for_compile(device: torch.device) -> str | None:
    """What `torch.compile` lacks on this machine; None if nothing."""
    if device.type == "cuda":
        return None
    if not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        return "no C++ compiler (g++)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "no Python headers (python3-dev)"
    return None


def choose_compile(config: StageConfig, device: torch.device, steps: int) -> tuple[bool, str]:
    """Whether to compile the blocks for this number of steps, and why.

    Raises UserError where it is requested and impossible.
    """
    requested = config.train.compile
    missing = missing_for_compile(device)
    if requested == "on":
        if missing:
            raise UserError(
                f"train.compile = on: {missing} on this machine; install it, or use"
                " --train.compile off"
            )
        check_compiled(config.parallel, device.type)
    if requested != "auto":
        return requested == "on", "as requested"
    if reason := missing or why_not_compiled(config.parallel, device.type):
        return False, reason
    if device.type == "cpu" and steps < MIN_STEPS_TO_COMPILE:
        return False, f"fewer than {MIN_STEPS_TO_COMPILE} steps would not repay the compilation"
    return True, "one graph per block"
