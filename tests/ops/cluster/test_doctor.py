"""`lmforge doctor` on two hosts: one answer, in which the slow link, another clone and another disk
are named.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lmforge.core.distributed.rendezvous import free_port
from tests.conftest import Refusal
from tests.ops.cluster.laboratory import LOGIN, Laboratory
from tests.ops.cluster.launching import Desk, with_programs, write_executable
from tests.support import tools

THROTTLE = "tc qdisc add dev eth0 root tbf rate 80mbit burst 64kb latency 200ms"


@contextmanager
def throttled(laboratory: Laboratory, host: str) -> Iterator[None]:
    """A block in which a host sends slowly."""
    done = laboratory.run(host, THROTTLE)
    assert done.returncode == 0, done.stderr
    try:
        yield
    finally:
        laboratory.run(host, "tc qdisc del dev eth0 root")


def examined(
    laboratory: Laboratory, folder: Path, *words: object, status: int = 0
) -> dict[str, list[dict[str, Any]]]:
    """The findings by name, of a process of doctor on each host, with variables as a container hook
    exports them.
    """
    line = [
        sys.executable,
        "-m",
        "lmforge",
        "doctor",
        "--device",
        "cpu",
        "--output",
        "json",
        *words,
    ]
    common = {
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "node1",
        "MASTER_PORT": str(free_port()),
    }
    in_folder = ["sh", "-c", f'cd {folder} && exec "$@"', "-", *line]
    processes = [
        laboratory.start(host, in_folder, stdout=-1, stderr=-1, **common, RANK=str(rank))
        for rank, host in enumerate(laboratory.hosts)
    ]
    outputs = [process.communicate(timeout=280) for process in processes]
    printed = [stdout for stdout, _ in outputs if stdout.strip()]
    assert len(printed) == 1, outputs
    assert [process.returncode for process in processes] == [status] * 2, outputs
    findings: dict[str, list[dict[str, Any]]] = {}
    for finding in json.loads(printed[0]):
        findings.setdefault(finding["name"], []).append(finding)
    return findings


@pytest.mark.slow
def test_two_hosts_give_one_answer_and_the_slow_link_is_named(
    laboratory: Laboratory, tmp_path: Path
) -> None:
    tools.need("tc")
    findings = examined(laboratory, tmp_path)
    assert findings["ranks"][0]["description"].startswith("2 on 2 hosts met at ")
    for name in ("versions", "clocks", "checkpoints"):
        assert [finding["status"] for finding in findings[name]] == ["pass"], findings[name]
    assert set(findings["link"][0]["values"]["bytes_per_second"]) == {
        "node1 → node2",
        "node2 → node1",
    }
    assert "bus bandwidth" in findings["all-reduce"][0]["description"]
    with throttled(laboratory, "node2"):
        link = examined(laboratory, tmp_path)["link"][0]  # the slowest first
    assert (link["status"], link["where"]) == ("warn", ["node2 → node1"])
    assert link["values"]["bytes_per_second"]["node2 → node1"] < 12e6


# --- over the hosts of a job ----------------------------------------------------------------------

STANDIN = Path(__file__).with_name("pbs_standin.py")


@pytest.fixture
def login(laboratory: Laboratory, tmp_path: Path, tiny_options: list[str]) -> Desk:
    """A desk with a recipe, on which every launcher reaches both hosts."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (tmp_path / "hosts").write_text("node1\nnode2\n")
    write_executable(programs / "remote", f'#!/bin/sh\nexec ssh -F {laboratory.ssh_config} "$@"\n')
    options = (
        f"-launcher ssh -launcher-exec {programs}/remote -localhost {laboratory.addresses[LOGIN]}"
    )
    write_executable(
        programs / "mpiexec",
        f'#!/bin/sh\nexec mpiexec.mpich {options} ${{PBS_NODEFILE:+-f "$PBS_NODEFILE"}} "$@"\n',
    )
    for name in ("qsub", "qstat", "qsig", "qdel"):
        write_executable(
            programs / name, f'#!/bin/sh\nexec {sys.executable} {STANDIN} {name} "$@"\n'
        )
    (tmp_path / "pbs").mkdir()
    variables = {
        "STANDIN_FOLDER": str(tmp_path / "pbs"),
        "STANDIN_HOSTS": "node1 node2",
        "PATH": with_programs(programs),
    }
    return Desk(tmp_path, tiny_options, **laboratory.environment, **variables)


def ways(laboratory: Laboratory) -> dict[str, list[str]]:
    """The options with which each launcher starts a rank on each of the two hosts."""
    return {
        "ssh": ["--hosts", "hosts", "--directives", f"F {laboratory.ssh_config}"],
        "slurm": ["--nodes", "2"],
        "pbs": ["--nodes", "2"],
        "mpi": ["--nodes", "2", "--hosts", "hosts"],
    }


def at_login(laboratory: Laboratory, desk: Desk, *words: str) -> subprocess.CompletedProcess[str]:
    """Type `lmforge doctor` on the login node, in the desk's folder."""
    line = [sys.executable, "-m", "lmforge", "doctor", *words]
    return laboratory.run(
        LOGIN,
        ["sh", "-c", f'cd {desk.folder} && exec "$@"', "-", *line],
        timeout=140,
        **desk.variables,
    )


@pytest.mark.slow
@pytest.mark.needs("MPICH")
@pytest.mark.parametrize("launcher", ["ssh", "slurm", "pbs", "mpi"])
def test_every_launcher_examines_both_hosts_and_leaves_nothing(
    launcher: str, laboratory: Laboratory, login: Desk
) -> None:
    words = [
        "recipe.toml",
        "--on",
        launcher,
        *ways(laboratory)[launcher],
        "--device",
        "cpu",
        "--output",
        "json",
    ]
    before = sorted(login.folder.iterdir())
    done = at_login(laboratory, login, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert findings["ranks"]["description"].startswith("2 on 2 hosts met at ")
    for name in ("versions", "equal data"):
        assert findings[name]["status"] == "pass", findings[name]
    assert set(findings["link"]["values"]["bytes_per_second"]) == {"node1 → node2", "node2 → node1"}
    assert sorted(login.folder.iterdir()) == before
    Path(login.recipe).write_text(login.recipe.read_text().replace("tokens", "absent"))
    failed = at_login(laboratory, login, *words[:-2])
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "absent" in failed.stdout
    assert failed.stdout.splitlines()[-1].startswith("1 of ")


@pytest.mark.slow
def test_a_host_that_cannot_reach_the_first_is_named_and_the_status_is_1(
    laboratory: Laboratory, login: Desk
) -> None:
    route = f"unreachable {laboratory.addresses['node2']}"
    assert laboratory.run("node1", f"ip route add {route}").returncode == 0
    try:
        done = at_login(
            laboratory,
            login,
            "--on",
            "ssh",
            *ways(laboratory)["ssh"],
            "--device",
            "cpu",
            "--timeout_seconds",
            "5",
        )
    finally:
        laboratory.run("node1", f"ip route del {route}")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "rank 1 (node2) of 2 did not answer at " in done.stdout


@pytest.mark.slow
def test_an_interrupted_doctor_ends_its_job(laboratory: Laboratory, login: Desk) -> None:
    environment = {**os.environ, **login.variables}
    line = [
        sys.executable,
        "-m",
        "lmforge",
        "doctor",
        "--on",
        "slurm",
        "--device",
        "cpu",
        "--directives",
        "begin=now+1hour",
    ]
    with subprocess.Popen(
        line, cwd=login.folder, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr
        assert re.match(r"lmforge: job \d+ is pending \(BeginTime\)", process.stderr.readline())
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT
    deadline = time.monotonic() + 30
    while subprocess.run(
        ["squeue", "--noheader"], env=environment, capture_output=True, text=True
    ).stdout:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert not list(login.folder.glob(".lmforge-doctor-*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--nodes 2",
            (
                "--nodes: applies to --on ssh, slurm, pbs and mpi only; add one of them, or leave"
                " it out"
            ),
        ),
        (
            "--on local --hosts hosts",
            (
                "--hosts: applies to --on ssh, slurm, pbs and mpi only; add one of them, or leave"
                " it out"
            ),
        ),
        (
            "--on ssh",
            "launch.hosts: missing; with ssh give a file of hosts, one per line: --hosts hosts.txt",
        ),
        (
            "--on slurm",
            "sbatch refuses the job: sbatch is not installed here; use a login node of the cluster",
        ),
        (
            "--on pbs",
            "qsub refuses the job: qsub is not installed here; use a login node of the cluster",
        ),
        ("--on mpi", "mpiexec is not installed here; load the cluster's module for MPI first"),
    ],
)
def test_hosts_that_cannot_be_examined_are_refused_in_one_line_and_nothing_is_left(
    refused: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    assert refused("doctor", *words.split()) == message
    assert not list(tmp_path.iterdir())
