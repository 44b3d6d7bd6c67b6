"""Whether this machine has what lmforge needs: Python, packages, torch, devices, compiler, memory.

A check returns findings. torch is imported by the checks that need it, so that a broken one is a
finding too.
"""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

# huggingface_hub needs packaging too.
from packaging.requirements import Requirement

from lmforge.core.distributed.host_memory import available_host_memory, format_memory
from lmforge.core.distributed.rank_info import threads_per_rank
from lmforge.core.errors import format_count
from lmforge.core.records.runs import processor_name
from lmforge.ops.doctor import Finding

PACKAGE = "lmforge"
COMPILE_SECONDS = 6.0
# A model of 100 million parameters trains in this much memory.
LOW_MEMORY_BYTES = 4 * 2**30
# A program with the requirements of torch.compile on a CPU: the headers of Python, and OpenMP.
C_SOURCE = """
#include <Python.h>
#include <omp.h>
extern "C" int lmforge_probe() { return omp_get_max_threads(); }
"""


def examine_machine(device: str) -> Iterator[Finding]:
    """The findings about this machine. `device` is the device to train on: auto, cpu or cuda."""
    yield Finding("python", "pass", f"{platform.python_version()}, {sys.executable}")
    yield from _check_packages()
    yield from _check_torch(device)
    yield _check_compiler()
    yield _check_memory()


def _check_packages() -> Iterator[Finding]:
    """Whether the required packages are installed, in accepted versions."""
    try:
        needed = [
            Requirement(each)
            for each in importlib.metadata.requires(PACKAGE) or ()
            if "extra ==" not in each
        ]
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "packages", "warn", "lmforge is not installed, only on the path", "make install"
        )
        return
    problems = []
    for requirement in needed:
        try:
            # Torch's 2.13.0+cpu.
            version = importlib.metadata.version(requirement.name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{requirement.name} {version} is not {requirement.specifier}")
    if problems:
        yield Finding("packages", "fail", ", ".join(problems), "make install")
    else:
        yield Finding("packages", "pass", f"all {len(needed)} that are needed")


def _check_torch(device: str) -> Iterator[Finding]:
    """The build of torch, its threads, and the devices that it sees."""
    try:
        import torch

        from lmforge.core.parallel.precision import choose_dtype, dtype_name
    except (ImportError, OSError) as problem:  # OSError: a shared library that cannot be loaded
        reason = " ".join(str(problem).split())
        yield Finding("torch", "fail", f"cannot be imported ({reason})", "make clean install")
        return
    build = "CPU only"
    if torch.version.cuda:
        build = f"CUDA {torch.version.cuda}"
    backends = (
        ", ".join(
            name
            for name in ("gloo", "nccl")
            if torch.distributed.is_available() and torch.distributed.is_backend_available(name)
        )
        or "no backend for several ranks"
    )
    yield Finding(
        "torch",
        "pass",
        f"{torch.__version__} ({build}), threads: {torch.get_num_threads()}, {backends}",
    )
    dtype, reason = choose_dtype("auto", torch.device("cpu"))
    cpu = f"{processor_name() or platform.machine()}, {format_count(threads_per_rank(1), 'core')}"
    yield Finding(
        "cpu",
        "pass",
        f"{cpu}, {torch.backends.cpu.get_cpu_capability()}, trains in {dtype_name(dtype)}"
        f" ({reason})",
    )
    yield from _check_gpus(device)


def _check_gpus(device: str) -> Iterator[Finding]:
    import torch

    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        capability = f"compute capability {gpu.major}.{gpu.minor}"
        yield Finding(
            f"gpu {number}", "pass", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, {capability}"
        )
    if torch.cuda.is_available() or device == "cpu":
        return
    has_driver = Path("/proc/driver/nvidia/version").exists()
    todo = ""
    if has_driver and not torch.version.cuda:
        todo = "install a build of torch for CUDA: https://pytorch.org/get-started"
    if device == "cuda":
        yield Finding(
            "gpu",
            "fail",
            "none that torch can use, and --device cuda needs one",
            todo or "train with cpu or auto",
        )
    elif has_driver:
        yield Finding(
            "gpu",
            "warn",
            "an NVIDIA driver, but no GPU that torch can use",
            todo or "see nvidia-smi",
        )
    else:
        yield Finding("gpu", "pass", "none: training runs on the CPU")


def _check_compiler() -> Finding:
    """Whether a C++ compiler builds a function with Python's headers and OpenMP: torch.compile
    needs that on a CPU.
    """
    import ctypes

    name = "compiler"
    uncompiled = "without it training on a CPU is not compiled, and about a tenth slower"
    compiler = next(
        filter(
            None, map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++")))
        ),
        None,
    )
    if compiler is None:
        return Finding(name, "warn", f"no C++ compiler; {uncompiled}", "apt-get install g++")
    include = sysconfig.get_path("include")
    if not (Path(include) / "Python.h").exists():
        return Finding(
            name,
            "warn",
            f"{compiler}, but no Python.h in {include}; {uncompiled}",
            "apt-get install python3-dev",
        )
    try:
        with tempfile.TemporaryDirectory(prefix="lmforge-") as folder:
            source = Path(folder) / "probe.cpp"
            library = Path(folder) / "probe.so"
            source.write_text(C_SOURCE)
            command = [
                compiler,
                "-shared",
                "-fPIC",
                "-fopenmp",
                f"-I{include}",
                str(source),
                "-o",
                str(library),
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
            if done.returncode == 0 and ctypes.CDLL(str(library)).lmforge_probe() > 0:
                return Finding(
                    name, "pass", f"{compiler} builds a function with Python's headers and OpenMP"
                )
            lines = done.stderr.splitlines() or ["no error message"]
            reason = next((line for line in lines if "error" in line), lines[0])
    except (OSError, subprocess.TimeoutExpired) as problem:
        reason = str(problem)
    return Finding(
        name, "warn", f"{compiler} does not work ({reason[:200]}); {uncompiled}", "reinstall it"
    )


def _check_memory() -> Finding:
    """What a training could allocate of the machine's memory, within the limits of this process and
    its container.
    """
    available = available_host_memory(1)
    if available is None:
        return Finding("memory", "pass", "unknown on this system")
    text = f"{format_memory(available.free_bytes)} free of {available.limited_by}"
    if available.free_bytes < LOW_MEMORY_BYTES:
        return Finding("memory", "warn", text, "enough for small models only; end other programs")
    return Finding("memory", "pass", text)
