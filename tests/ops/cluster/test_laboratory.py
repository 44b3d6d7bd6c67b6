"""The laboratory: hosts with their own names and addresses, Slurm and ssh between them, and no
leftovers.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ops.cluster.laboratory import HOSTS, LOGIN, Laboratory
from tests.support import tools

# A test process with a laboratory of its own, which is killed.
KILLED = """
import signal
from tests.ops.cluster.laboratory import Laboratory
with Laboratory() as lab:
    print(lab.folder, lab.name, lab.addresses["node1"], flush=True)
    signal.pause()
"""


def test_srun_and_ssh_reach_both_hosts_from_the_process_of_the_tests(
    laboratory: Laboratory,
) -> None:
    environment = {**os.environ, **laboratory.environment}
    srun = ["srun", "-N2", "--ntasks-per-node=2", "hostname"]
    done = subprocess.run(srun, env=environment, capture_output=True, text=True, timeout=60)
    assert sorted(done.stdout.split()) == ["node1", "node1", "node2", "node2"], done.stderr
    for host in (*HOSTS, LOGIN):
        ssh = ["ssh", "-F", laboratory.ssh_config, host, "hostname"]
        assert subprocess.run(ssh, capture_output=True, text=True, timeout=60).stdout == f"{host}\n"
        assert laboratory.run(host, "hostname").stdout == f"{host}\n"


@pytest.mark.slow
def test_a_host_that_is_cut_off_is_reached_again_when_it_is_healed(laboratory: Laboratory) -> None:
    reach = ["timeout", "2", "bash", "-c", "echo > /dev/tcp/node2/22"]
    assert laboratory.run("node1", reach).returncode == 0
    with laboratory.without_network("node2"):
        assert laboratory.run("node1", reach).returncode == 124
        assert laboratory.run("node2", "hostname").stdout == "node2\n"
    assert (
        laboratory.run(
            "node1", ["timeout", "30", "bash", "-c", "until echo > /dev/tcp/node2/22; do :; done"]
        ).returncode
        == 0
    )


def test_a_signal_reaches_the_process_on_the_host(laboratory: Laboratory) -> None:
    process = laboratory.start(
        "node1", "trap 'echo told; exit 7' USR1; echo up; while :; do sleep 0.05; done", stdout=-1
    )
    assert process.stdout
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGUSR1)
    assert (process.communicate(timeout=30)[0], process.returncode) == ("told\n", 7)


@pytest.mark.slow
def test_nothing_is_left_of_a_laboratory_whose_process_is_killed() -> None:
    for tool in ("network namespaces", "sshd", "Slurm"):
        tools.need(tool)
    process = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    folder, name, _ = process.stdout.readline().split()
    try:
        assert Path(f"/sys/class/net/{name}").exists()
        process.kill()
        process.wait()
        deadline = time.monotonic() + 60
        while Path(f"/sys/class/net/{name}").exists() or _mentions(folder):
            assert time.monotonic() < deadline, _mentions(folder)
            time.sleep(0.05)
    finally:
        subprocess.run(["rm", "-rf", folder], check=True)


def _mentions(folder: str) -> list[str]:
    """The command lines of running processes that name the folder."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(file.read_text().replace("\0", " "))
        except OSError:  # it has just ended
            continue
    return [line for line in lines if folder in line]
