"""Whether this machine has what lmforge needs: Python, packages, torch, devices, compiler, memory, disk.

A check returns findings. torch is imported by the checks that need it, so that a broken one is a finding too.
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
from contextlib import suppress
from pathlib import Path

# huggingface_hub needs packaging too.
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lmforge.bench.doctor.finding import Finding
from lmforge.cluster.host_memory import available_host_memory, format_memory
from lmforge.cluster.rank_info import threads_per_rank
from lmforge.errors import format_bytes, format_count, how_to_install
from lmforge.runs import processor_name

PACKAGE = "lmforge"
# Versions that the tests were run with; the file exists in a clone, but not in an installed wheel.
CONSTRAINTS = Path(__file__).parents[3] / "constraints.txt"
COMPILE_SECONDS = 6.0
# A model of 100 million parameters trains in this much memory, and its checkpoints are a gigabyte each.
LOW_MEMORY_BYTES = 4 * 2**30
LOW_DISK_BYTES = 10 * 2**30
NETWORK_DISKS = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "lustre", "beegfs", "gpfs", "ceph")
# A program with the requirements of torch.compile on a CPU: the headers of Python, and OpenMP.
C_SOURCE = """
#include <Python.h>
#include <omp.h>
extern "C" int lmforge_probe() {
    int total = 0;
    #pragma omp parallel for reduction(+ : total)
    for (int number = 0; number < 4; ++number) total += number;
    return total;
}
"""


def examine_machine(device: str) -> Iterator[Finding]:
    """The findings about this machine. `device` is the device to train on: auto, cpu or cuda."""
    yield Finding("python", "pass", f"{platform.python_version()}, {sys.executable}")
    yield from _check_packages()
    yield from _check_torch(device)
    yield _check_compiler()
    yield _check_memory()
    yield _check_disk()
    yield _check_extras()
    yield _check_tools()


def _check_packages() -> Iterator[Finding]:
    """Whether the required packages are installed, in accepted versions, and in the tested ones."""
    try:
        needed = [Requirement(each) for each in importlib.metadata.requires(PACKAGE) or ()]
    except importlib.metadata.PackageNotFoundError:
        yield Finding("packages", "warn", "lmforge is not installed, only on the path", "make install")
        return
    versions, problems = dict[str, str](), []
    for requirement in needed:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            versions[requirement.name] = importlib.metadata.version(requirement.name).partition("+")[0]  # torch's 2.13.0+cpu
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(versions[requirement.name], prereleases=True):
            problems.append(f"{requirement.name} {versions[requirement.name]} is not {requirement.specifier}")
    if problems:
        yield Finding("packages", "fail", ", ".join(problems), "make install")
        return
    tested = _tested_versions()
    pinned = {name: tested.get(canonicalize_name(name), version) for name, version in versions.items()}
    others = [f"{name} {version} ({pinned[name]})" for name, version in versions.items() if pinned[name] != version]
    differing = f"; not those of constraints.txt: {', '.join(others)}" if others else ""
    yield Finding("packages", "pass", f"all {len(versions)} that are needed{differing}")


def _tested_versions() -> dict[str, str]:
    """Versions by package, as pip spells it, in constraints.txt; empty where there is none."""
    try:
        pins = [line.partition("==") for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines() if "==" in line]
    except OSError:
        return {}
    return {canonicalize_name(name.strip()): version.strip() for name, _, version in pins}


def _check_torch(device: str) -> Iterator[Finding]:
    """The build of torch, its threads, and the devices that it sees."""
    try:
        import torch

        from lmforge.parallel.precision import choose_dtype, dtype_name
    except (ImportError, OSError) as problem:  # OSError: a shared library that cannot be loaded
        reason = " ".join(str(problem).split())
        yield Finding("torch", "fail", f"cannot be imported ({reason})", "make clean install")
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    has_backend = torch.distributed.is_backend_available if torch.distributed.is_available() else lambda name: False
    backends = ", ".join(name for name in ("gloo", "nccl") if has_backend(name)) or "no backend for several ranks"
    yield Finding("torch", "pass", f"{torch.__version__} ({build}), threads: {torch.get_num_threads()}, {backends}")
    dtype, reason = choose_dtype("auto", torch.device("cpu"))
    cpu = f"{processor_name() or platform.machine()}, {format_count(threads_per_rank(1), 'core')}"
    yield Finding("cpu", "pass", f"{cpu}, {torch.backends.cpu.get_cpu_capability()}, trains in {dtype_name(dtype)} ({reason})")
    yield from _check_gpus(device)


def _check_gpus(device: str) -> Iterator[Finding]:
    import torch

    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        capability = f"compute capability {gpu.major}.{gpu.minor}"
        yield Finding(f"gpu {number}", "pass", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, {capability}")
    if torch.cuda.is_available() or device == "cpu":
        return
    has_driver = Path("/proc/driver/nvidia/version").exists()
    todo = "install a build of torch for CUDA: https://pytorch.org/get-started" if has_driver and not torch.version.cuda else ""
    if device == "cuda":
        yield Finding("gpu", "fail", "none that torch can use, and --device cuda needs one", todo or "train with cpu or auto")
    elif has_driver:
        yield Finding("gpu", "warn", "an NVIDIA driver, but no GPU that torch can use", todo or "see nvidia-smi")
    else:
        yield Finding("gpu", "pass", "none: training runs on the CPU")


def _check_compiler() -> Finding:
    """Whether a C++ compiler builds a function with Python's headers and OpenMP: torch.compile needs that on a CPU."""
    import ctypes

    name, uncompiled = "compiler", "without it training on a CPU is not compiled, and about a tenth slower"
    compiler = next(filter(None, map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++")))), None)
    if compiler is None:
        return Finding(name, "warn", f"no C++ compiler; {uncompiled}", "apt-get install g++")
    include = sysconfig.get_path("include")
    if not (Path(include) / "Python.h").exists():
        return Finding(name, "warn", f"{compiler}, but no Python.h in {include}; {uncompiled}", "apt-get install python3-dev")
    try:
        with tempfile.TemporaryDirectory(prefix="lmforge-") as folder:
            source, library = Path(folder) / "probe.cpp", Path(folder) / "probe.so"
            source.write_text(C_SOURCE)
            command = [compiler, "-shared", "-fPIC", "-fopenmp", f"-I{include}", str(source), "-o", str(library)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
            if done.returncode == 0 and ctypes.CDLL(str(library)).lmforge_probe() == 6:
                return Finding(name, "pass", f"{compiler} builds a function with Python's headers and OpenMP")
            lines = done.stderr.splitlines() or ["no error message"]
            reason = next((line for line in lines if "error" in line), lines[0])
    except (OSError, subprocess.TimeoutExpired) as problem:
        reason = str(problem)
    return Finding(name, "warn", f"{compiler} does not work ({reason[:200]}); {uncompiled}", "reinstall it")


def _check_memory() -> Finding:
    """What a training could allocate of the machine's memory, within the limits of this process and its container."""
    available = available_host_memory(1)
    if available is None:
        return Finding("memory", "pass", "unknown on this system")
    text = f"{format_memory(available.free_bytes)} free of {available.limited_by}"
    if available.free_bytes < LOW_MEMORY_BYTES:
        return Finding("memory", "warn", text, "enough for small models only; end other programs")
    return Finding("memory", "pass", text)


def _check_disk() -> Finding:
    """Room and kind of the disk of this folder, where `runs` would be."""
    folder = Path()
    try:
        folder = Path.cwd()
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as problem:
        reason = f"{folder} cannot be written ({problem.strerror})"
        return Finding("disk", "warn", reason, "work in another folder, or give --run.folder")
    kind = disk_kind(folder)
    text = f"{format_bytes(free)} free at {folder}{f' ({kind})' if kind else ''}"
    if free < LOW_DISK_BYTES:
        return Finding("disk", "warn", text, "checkpoints of larger models will not fit; free some space, or give --run.folder")
    if kind in ("tmpfs", "ramfs"):
        return Finding("disk", "warn", text, "it is kept in memory and lost at a restart; give --run.folder on a disk")
    if kind in NETWORK_DISKS:
        return Finding(
            "disk", "pass", f"{text}, a network disk: several hosts can share it; --data.folder is faster on a local one"
        )
    return Finding("disk", "pass", text)


def disk_kind(folder: Path) -> str:
    """The type of the file system of a folder, such as ext4; empty where it is not known."""
    best, kind = "", ""
    with suppress(OSError, IndexError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            before, _, after = line.partition(" - ")
            mount = before.split()[4].encode().decode("unicode_escape")
            if folder.resolve().is_relative_to(mount) and len(mount) >= len(best):
                best, kind = mount, after.split()[0]
    return kind


def _check_extras() -> Finding:
    """Which optional parts are installed, and which are not."""
    try:
        requirements = [Requirement(each) for each in importlib.metadata.requires(PACKAGE) or ()]
        extras = importlib.metadata.metadata(PACKAGE).get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:
        return Finding("extras", "pass", "unknown: lmforge is not installed")
    missing = set()
    for extra in extras:
        for requirement in requirements:
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                continue
            if requirement.marker.evaluate({"extra": extra}) and not _is_installed(requirement):
                missing.add(extra)
    installed = [extra for extra in extras if extra not in missing]
    todo = f"where you need them: {how_to_install(','.join(sorted(missing - {'dev'})))}" if missing - {"dev"} else ""
    text = f"installed: {', '.join(installed) or 'none'}; not: {', '.join(sorted(missing)) or 'none'}"
    return Finding("extras", "pass", text, todo)


def _check_tools() -> Finding:
    """Programs that lmforge can use."""
    uses = {"git": "the commit is noted in each run", "stockfish": "for the chess recipe"}
    path = f"{os.environ.get('PATH', '')}{os.pathsep}/usr/games"
    tools = [f"{name} {'found' if shutil.which(name, path=path) else 'not found'} ({use})" for name, use in uses.items()]
    return Finding("tools", "pass", ", ".join(tools))


def _is_installed(requirement: Requirement) -> bool:
    with suppress(importlib.metadata.PackageNotFoundError):
        return requirement.specifier.contains(importlib.metadata.version(requirement.name), prereleases=True)
    return False
