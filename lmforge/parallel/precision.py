"""Which dtype a model computes in, and whether its blocks are compiled: what `auto` means on this hardware."""

import shutil
import sys
import sysconfig
from pathlib import Path

import torch

from lmforge.errors import Mistake

# Compiling takes about half a minute on a CPU and wins about a tenth: a shorter run than this loses by it.
STEPS_WORTH_COMPILING = 200


def has_fast_bf16(device: torch.device) -> bool:
    """Whether the hardware multiplies bf16 itself; emulated, it is up to a hundred times slower than fp32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    if not hasattr(torch.cpu, "get_capabilities"):  # torch 2.11 has only this question
        return bool(torch.cpu._is_avx512_bf16_supported())
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16") or capabilities.get("bf16"))


def choose_dtype(wanted: str, device: torch.device) -> tuple[torch.dtype, str]:
    """The compute dtype, and the reason in a few words. bf16 on hardware without it is allowed, and said to be slow."""
    if wanted == "fp32":
        return torch.float32, "as asked"
    fast = has_fast_bf16(device)
    if wanted == "bf16":
        warning = "" if fast else ", but this hardware only emulates bf16: expect it to be far slower than fp32"
        return torch.bfloat16, f"as asked{warning}"
    return (torch.bfloat16, "the hardware multiplies it") if fast else (torch.float32, "this hardware has no bf16 arithmetic")


def find_compiler(device: torch.device) -> str | None:
    """None where `torch.compile` has what it needs here, else what is missing."""
    if device.type == "cuda":
        return None
    if not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        return "no C++ compiler (g++)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "no Python headers (python3-dev)"
    return None


def choose_compile(wanted: str, device: torch.device, steps: int) -> tuple[bool, str]:
    """Whether to compile the blocks, and the reason. Raises Mistake where it is asked for and cannot be done."""
    missing = find_compiler(device)
    if wanted == "on" and missing:
        raise Mistake(f"train.compile = on: {missing} on this machine; install it, or use --train.compile off")
    if wanted != "auto":
        return wanted == "on", "as asked"
    if missing:
        return False, missing
    if device.type == "cpu" and steps < STEPS_WORTH_COMPILING:
        return False, f"fewer than {STEPS_WORTH_COMPILING} steps would not repay it"
    return True, "each block by itself"


def compiled_graphs() -> int:
    """How many graphs this process has compiled so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # importing it takes a second, and who compiles has done so
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0
