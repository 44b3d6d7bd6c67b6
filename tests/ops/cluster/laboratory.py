"""A cluster of two hosts on this machine, for tests of launchers: with names, a network, sshd,
Slurm and munge of its own.

A host is a process tree in namespaces of its own (network, mounts, host name, process ids). All
hosts see the same files. Beside the hosts there is `LOGIN`, where the Slurm controller runs and the
network's switch is. The process of the tests has an address in the network too, so `srun` and `ssh
-F` work from it. Every process dies with the process of the tests, and with them namespaces and
network: nothing is left on the machine but a folder in the temporary folder if the tests are
killed.

    def test_two_hosts(laboratory: Laboratory) -> None:
        assert laboratory.run("node1", "hostname").stdout == "node1\n"
        subprocess.run(["srun", "-N2", "hostname"], env={**os.environ, **laboratory.environment})
        subprocess.run(["ssh", "-F", laboratory.ssh_config, "node2", "hostname"])
"""

import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Self

from tests.support import tools

ROOT = Path(__file__).parents[3]
HOSTS = "node1", "node2"
LOGIN = "login"
CPUS, GPUS = 4, 2
READY_SECONDS = 60
# The first process of a host. Its orphans are not kept as zombies.
FIRST_PROCESS = """
set -e
hostname "$1"
mount --bind "$2/hosts" /etc/hosts
mount --bind "$2/nsswitch.conf" /etc/nsswitch.conf
mount -t tmpfs tmpfs /run
mkdir /run/sshd
ip link set lo up
echo up
trap '' CHLD
exec sleep infinity
"""
SSHD_CONFIG = """
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
StrictModes no
UsePAM no
PidFile none
PrintMotd no
SetEnv {variables}
"""
SSH_CONFIG = """
Host *
    User root
    IdentityFile {folder}/user_key
    IdentitiesOnly yes
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
    BatchMode yes
    ConnectTimeout 5
"""
SLURM_CONFIG = """
ClusterName=laboratory
SlurmctldHost={login}({address})
SlurmctldPort={port}
CommunicationParameters=NoCtldInAddrAny
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=1,sched_min_interval=100000
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=5
GresTypes=gpu
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class HostProcess(subprocess.Popen[str]):
    """A process on a host of the laboratory.

    Signals reach it, and not only the `nsenter` that waits for it here.
    """

    def send_signal(self, sig: int) -> None:
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        while self.poll() is None:
            if inner := children.read_text().split():
                os.kill(int(inner[0]), sig)
                return
            time.sleep(0.005)  # it is only starting


class Laboratory:
    """Two hosts, in a `with` block.

    Tests take the fixture `laboratory`, which starts one for a whole test process.

    hosts: the names of the compute hosts.
    addresses: host name → its IPv4 address in the laboratory's network; `LOGIN` too.
    environment: the variables with which Slurm's commands find this cluster, for a process of the
    tests.
    ssh_config: a configuration with which `ssh -F` reaches every host by name.
    folder: for state and logs; all hosts and the tests see it. It is removed at the end.
    """

    def __init__(self) -> None:
        self.hosts = HOSTS
        self.folder = Path(tempfile.mkdtemp(prefix="lmforge-lab-"))
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self.ssh_config = self.folder / "ssh_config"
        self.name = ""
        self._first_processes: dict[str, subprocess.Popen[str]] = {}
        self._first_pids: dict[str, int] = {}

    def __enter__(self) -> Self:
        try:
            self._connect_hosts()
            self._start_services()
            self._await_services()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process of every host."""
        for process in self._first_processes.values():
            # its child is the first process of the host, which dies with it, and all others with
            # that one.
            process.kill()
            process.wait()
        # The kernel takes its time to notice that the other end has no process any more.
        if self.name:
            subprocess.run(["ip", "link", "del", self.name], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(
        self, host: str, command: str | Sequence[object], timeout: float = 120, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host and wait for it: a line for bash, or a list.

        The working folder is that of the tests.
        """
        process = self.start(
            host, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **variables
        )
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            process.wait()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def start(
        self,
        host: str,
        command: str | Sequence[object],
        *,
        stdout: int | IO[Any] = subprocess.DEVNULL,
        stderr: int | IO[Any] = subprocess.STDOUT,
        **variables: str,
    ) -> HostProcess:
        """Start a command on a host: a line for bash, or a list of words.

        Its variables are those of the tests, and these.
        """
        words = (
            ["bash", "-c", command] if isinstance(command, str) else [str(word) for word in command]
        )
        return HostProcess(
            # Without the second one the command would outlive an nsenter that is killed.
            [
                "setpriv",
                "--pdeathsig",
                "KILL",
                *self._enter(host),
                "setpriv",
                "--pdeathsig",
                "KILL",
                *words,
            ],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            env={**os.environ, **self.environment, **_session_variables(), **variables},
        )

    def cut(self, host: str) -> None:
        """Take the network cable out of a host: nothing arrives any more, and nobody is told.

        Its own processes live on.
        """
        self._on_switch("ip", "link", "set", host, "down")

    def heal(self, host: str) -> None:
        """Put the cable back in. A host that was not cut stays as it is."""
        self._on_switch("ip", "link", "set", host, "up")

    @contextmanager
    def without_network(self, host: str) -> Iterator[None]:
        """A block in which a host is cut off."""
        self.cut(host)
        try:
            yield
        finally:
            self.heal(host)

    # --- starting ---------------------------------------------------------------------------------

    def _connect_hosts(self) -> None:
        (self.folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
        (self.folder / "hosts").touch()
        for host in (LOGIN, *self.hosts):
            self._start_first_process(host)
        self._on_switch("ip", "link", "add", "lan", "type", "bridge")
        self.name, network = self._claim_network()
        self.addresses = {
            LOGIN: f"{network}.254",
            **{host: f"{network}.{at}" for at, host in enumerate(self.hosts, 1)},
        }
        # The same file, which the hosts have mounted already.
        (self.folder / "hosts").write_text(
            "127.0.0.1 localhost\n"
            + "".join(f"{address} {host}\n" for host, address in self.addresses.items())
        )
        for line in (
            f"addr add {self.addresses[LOGIN]}/24 dev lan",
            "link set lan up",
            "link set tests master lan up",
        ):
            self._on_switch("ip", *line.split())
        _check_output("ip", "addr", "add", f"{network}.253/24", "dev", self.name)
        _check_output("ip", "link", "set", self.name, "up")
        for host in self.hosts:
            inside = f"peer name eth0 netns /proc/{self._first_pids[host]}/ns/net"
            # Made here, where the process numbers are known, and put into the switch.
            _check_output(
                "ip",
                *f"link add {host} netns /proc/{self._first_pids[LOGIN]}/ns/net type veth {inside}".split(),
            )
            self._on_switch("ip", "link", "set", host, "master", "lan", "up")
            for line in (
                f"addr add {self.addresses[host]}/24 dev eth0",
                "link set eth0 up",
                f"route add default via {self.addresses[LOGIN]}",
            ):
                self._check(host, "ip", *line.split())

    def _start_first_process(self, host: str) -> None:
        namespaces = [
            "--net",
            "--mount",
            "--uts",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ]
        process = subprocess.Popen(
            [
                "setpriv",
                "--pdeathsig",
                "KILL",
                "unshare",
                *namespaces,
                "bash",
                "-c",
                FIRST_PROCESS,
                "-",
                host,
                self.folder,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._first_processes[host] = process
        assert process.stdout
        assert process.stdout.readline() == "up\n", f"{host} does not start"
        self._first_pids[host] = int(
            Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        )

    def _claim_network(self) -> tuple[str, str]:
        """Connect the tests' own network to the switch.

        The interface's name is the claim: no two laboratories have one.

        The addresses are for tests of networks (RFC 2544): no machine outside has them.
        """
        for _ in range(100):
            second, third = (
                random.SystemRandom().randint(18, 19),
                random.SystemRandom().randint(0, 255),
            )
            name = f"lab-{second}-{third}"
            switch = f"/proc/{self._first_pids[LOGIN]}/ns/net"
            made = subprocess.run(
                [
                    "ip",
                    "link",
                    "add",
                    name,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    "tests",
                    "netns",
                    switch,
                ],
                capture_output=True,
                text=True,
            )
            if made.returncode == 0:
                return name, f"198.{second}.{third}"
            assert "File exists" in made.stderr, made.stderr
        raise AssertionError("no network is free for a laboratory")

    def _start_services(self) -> None:
        self._write_configurations()
        munged = [
            "munged",
            "--foreground",
            "--force",
            f"--key-file={self.folder}/munge.key",
            f"--seed-file={self.folder}/seed",
        ]
        munged += [f"--socket={self.folder}/munge.socket", f"--pid-file={self.folder}/munged.pid"]
        self._start_service(LOGIN, "munged", [*munged, f"--log-file={self.folder}/munged.log"])
        while not (self.folder / "munge.socket").exists():
            time.sleep(0.01)
        self._start_service(
            LOGIN, "slurmctld", ["slurmctld", "-D", "-i", "-f", self.environment["SLURM_CONF"]]
        )
        for host in self.hosts:
            self._start_service(
                host, "slurmd", ["slurmd", "-D", "-N", host, "-f", self.environment["SLURM_CONF"]]
            )
        for host in (LOGIN, *self.hosts):
            self._start_service(
                host, "sshd", ["sshd", "-D", "-e", "-f", self.folder / "sshd_config"]
            )

    def _write_configurations(self) -> None:
        for key in ("host_key", "user_key"):
            _check_output("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / key)
        variables = " ".join(
            f'{name}="{value}"'
            for name, value in {**_session_variables(), **self.environment}.items()
        )
        (self.folder / "sshd_config").write_text(
            SSHD_CONFIG.format(folder=self.folder, variables=variables)
        )
        hosts = "".join(
            f"Host {host}\n    HostName {address}\n" for host, address in self.addresses.items()
        )
        self.ssh_config.write_text(hosts + SSH_CONFIG.format(folder=self.folder))
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o400)
        (self.folder / "state").mkdir()
        self._check(LOGIN, "chmod", "755", self.folder)
        with socket.socket() as free:
            free.bind((self.addresses[LOGIN].rsplit(".", 1)[0] + ".253", 0))
            port = free.getsockname()[1]
        slurm = SLURM_CONFIG.format(
            folder=self.folder, login=LOGIN, address=self.addresses[LOGIN], port=port
        )
        for host in self.hosts:
            (self.folder / f"spool-{host}").mkdir()
            slurm += (
                f"NodeName={host} NodeAddr={self.addresses[host]} CPUs={CPUS} RealMemory=4000"
                f" Gres=gpu:{GPUS} State=UNKNOWN\n"
            )
        (self.folder / "slurm.conf").write_text(slurm)
        for gpu in range(GPUS):
            (self.folder / f"gpu{gpu}").touch()
        gpus = (
            f"NodeName={','.join(self.hosts)} Name=gpu Count={GPUS}"
            f" File={self.folder}/gpu[0-{GPUS - 1}]\n"
        )
        (self.folder / "gres.conf").write_text(gpus)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def _start_service(self, host: str, name: str, command: Sequence[object]) -> None:
        program = tools.daemon(str(command[0]))
        assert program, f"{command[0]} is not installed"
        with (self.folder / f"{name}-{host}.out").open("w") as output:
            self.start(host, [program, *command[1:]], stdout=output)

    def _await_services(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        for host in self.hosts:
            while (
                self.run(LOGIN, ["sinfo", "--noheader", "--nodes", host, "--format", "%T"]).stdout
                != "idle\n"
            ):
                assert time.monotonic() < deadline, (
                    f"Slurm does not start on {host}:\n{self._logs()}"
                )
                time.sleep(0.05)
        for address in self.addresses.values():
            while True:
                try:
                    socket.create_connection((address, 22), timeout=1).close()
                    break
                except OSError:
                    assert time.monotonic() < deadline, f"sshd does not start:\n{self._logs()}"
                    time.sleep(0.05)

    def _logs(self) -> str:
        files = [*self.folder.glob("*.out"), *self.folder.glob("*.log")]
        return "\n".join(f"--- {file.name}\n{file.read_text()[-1500:]}" for file in sorted(files))

    def _enter(self, host: str) -> list[str]:
        return [
            "nsenter",
            f"--target={self._first_pids[host]}",
            "--net",
            "--mount",
            "--uts",
            "--pid",
            f"--wd={os.getcwd()}",
            "--",
        ]

    def _check(self, host: str, *command: object) -> str:
        done = self.run(host, command)
        assert done.returncode == 0, f"{host}: {shlex.join(map(str, command))}: {done.stderr}"
        return done.stdout

    def _on_switch(self, *command: object) -> str:
        return self._check(LOGIN, *command)


def _check_output(*command: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{shlex.join(map(str, command))}: {done.stderr}"
    return done.stdout


def _session_variables() -> dict[str, str]:
    """What a session on a host has in its environment: the Python and the lmforge of the tests; a
    tmux of its own.

    With SHLVL bash takes itself for a shell within a shell, and does not read this machine's
    .bashrc.
    """
    path = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath), "/usr/sbin"]
    )
    return {
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TMUX_TMPDIR": "/run",
        "SHLVL": "1",
    }


if __name__ == "__main__":  # to look around: `python -m tests.ops.cluster.laboratory`
    with Laboratory() as lab:
        print(
            f"export SLURM_CONF={lab.environment['SLURM_CONF']}; ssh -F {lab.ssh_config}"
            f" {lab.hosts[0]}; interrupt to end it"
        )
        try:
            signal.pause()
        except KeyboardInterrupt:
            print()
