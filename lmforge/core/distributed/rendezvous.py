"""How the ranks of Slurm and MPI connect: the hosts of the job, and the free port that rank 0 sends
to the others.

torchrun sets MASTER_ADDR and MASTER_PORT. Elsewhere rank 0 takes a free port for the store, and
answers on one of a few ports that follow from the job's identity; the others ask there, on the
first hosts of the job. Answers for other jobs are ignored, so two jobs on one host do not mix.
Where a batch script has set both variables, they are used unchanged. This module does not import
torch.
"""

import hashlib
import os
import random
import re
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from lmforge.core.distributed.environment import LAUNCHERS, MPICH, RankInfo
from lmforge.core.distributed.processes import NOT_INSTALLED, read_process_stat, try_call
from lmforge.core.distributed.waiting import wait_until
from lmforge.core.errors import PeerLost, RunFailed, UserError, prefix_errors
from lmforge.core.files.untrusted import describe_os_error, quoted, read_bounded

NUM_CANDIDATE_PORTS = 8
# Below the ports that systems use for outgoing connections. docs/clusters.md lists them for
# firewalls.
PORTS = range(20_000, 32_000)
# The host of rank 0 is the first one, unless ranks were distributed in another order.
MAX_HOSTS_ASKED = 16
ANSWER_SECONDS = 5.0
MAX_WAIT_SECONDS = 1800.0
MAX_MESSAGE_BYTES = 1024
# The variables that name a job, or a step of it, the same on all its ranks.
JOB_VARIABLES = {
    "slurm": ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    "openmpi": ("PMIX_NAMESPACE",),
    "pals": ("PALS_APID",),
}


def list_hosts(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The hosts of this job as Slurm or PBS names them, the first one first, each once; empty
    outside of a job.

    Raises UserError where the list cannot be read.
    """
    if (
        nodes := environ.get("SLURM_STEP_NODELIST")
        or environ.get("SLURM_JOB_NODELIST")
        or environ.get("SLURM_NODELIST")
    ):
        return _expand_slurm_hosts(nodes)
    if file := environ.get("PBS_NODEFILE"):
        return _read_hosts("PBS_NODEFILE", file)
    return []


def _expand_slurm_hosts(nodes: str) -> list[str]:
    if not re.search(r"[\[,]", nodes):
        return [nodes]
    status, printed, message = try_call(["scontrol", "show", "hostnames", nodes])
    if status == NOT_INSTALLED:
        raise UserError(
            f"environment: the hosts of this job, {quoted(nodes)}: scontrol is not here (in a"
            " container?); set MASTER_ADDR in the batch script: export MASTER_ADDR=$(scontrol show"
            ' hostnames "$SLURM_JOB_NODELIST" | head -n1)'
        )
    if status or not printed.split():
        raise UserError(
            f"environment: scontrol show hostnames {quoted(nodes)} failed ({quoted(message)}); set"
            " MASTER_ADDR"
        )
    return printed.split()


def _read_hosts(variable: str, file: str) -> list[str]:
    try:
        with prefix_errors(f"environment: {variable}"):
            hosts = list(dict.fromkeys(read_bounded(Path(file)).decode().split()))
    except (OSError, UnicodeDecodeError) as problem:
        reason = (
            describe_os_error(problem, file)
            if isinstance(problem, OSError)
            else f"{file}: not text"
        )
        raise UserError(f"environment: {variable}: {reason}") from None
    if not hosts:
        raise UserError(f"environment: {variable} = {quoted(file)}: this file names no host")
    return hosts


def job_identity(info: RankInfo, environ: Mapping[str, str] = os.environ) -> str:
    """A name of this job that all its ranks know and no other job has.

    Raises UserError where the launcher gives none.
    """
    if info.environment == MPICH.name:
        return _identity_from_hydra()
    names = JOB_VARIABLES[info.environment]
    if missing := [name for name in names if not environ.get(name)]:
        raise UserError(
            _set_both_hint(f"{LAUNCHERS[info.environment].command} sets no {missing[0]}")
        )
    return "-".join([info.environment, *(environ[name] for name in names)])


def _identity_from_hydra() -> str:
    """MPICH's mpiexec has no variable for it.

    On each host a proxy process starts the ranks, and its arguments contain the address of mpiexec.
    The socket that ranks inherit would tell too, but then mpiexec takes the end of a rank for a
    crash, and kills the others.
    """
    process = os.getpid()
    while process > 1 and (stat := read_process_stat(process)):
        try:
            words = Path(f"/proc/{process}/cmdline").read_text(errors="replace").split("\0")
        except OSError:  # another user's
            break
        if "--control-port" in words[:-1]:
            return f"mpich-{words[words.index('--control-port') + 1]}"
        process = stat.parent
    raise UserError(_set_both_hint("mpiexec does not say which job this is"))


def _set_both_hint(reason: str) -> str:
    flags = (
        "-x MASTER_ADDR=HOST -x MASTER_PORT=PORT with Open MPI, -genv MASTER_ADDR HOST -genv"
        " MASTER_PORT PORT with MPICH"
    )
    return f"environment: {reason}; set MASTER_ADDR, the host of rank 0, and MASTER_PORT ({flags})"


def hosts_to_ask(info: RankInfo, environ: Mapping[str, str] = os.environ) -> list[str]:
    """The hosts where rank 0 may be. Raises UserError where they are unknown."""
    if address := environ.get("MASTER_ADDR"):
        return [address]
    if info.local_world_size == info.world_size:
        return ["127.0.0.1"]
    if hosts := list_hosts(environ):
        return hosts[:MAX_HOSTS_ASKED]
    raise UserError(
        "environment: ranks on several hosts, and nothing says where rank 0 is; set MASTER_ADDR"
        " (-x MASTER_ADDR=HOST with Open MPI, -genv MASTER_ADDR HOST with MPICH)"
    )


def candidate_ports(identity: str) -> list[int]:
    """The ports on which rank 0 of a job may answer, in order."""
    digest = hashlib.sha256(identity.encode()).digest()
    numbers = [
        int.from_bytes(digest[at : at + 4], "big") for at in range(0, 4 * NUM_CANDIDATE_PORTS, 4)
    ]
    return [PORTS[number % len(PORTS)] for number in numbers]


def listen(port: int) -> socket.socket:
    """A socket that listens on a port of all interfaces; 0 for any free one.

    Raises OSError where it is taken.
    """
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096
        )
    return socket.create_server(("", port), backlog=4096)


def free_port() -> int:
    """A free port for a process that will listen on it later.

    It is not one that systems use for outgoing connections, which could take it until then. Raises
    RunFailed.
    """
    for port in random.SystemRandom().sample(PORTS, 100):
        with suppress(OSError), listen(port):
            return port
    raise RunFailed(
        f"none of a hundred ports between {PORTS.start:,} and {PORTS.stop:,} is free on this host"
    )


def answer_with_port(identity: str, world_size: int, port: int) -> None:
    """On rank 0, send the port of the store to every other rank, in a thread that ends when all
    have it.

    Raises UserError where none of the job's ports is free.
    """
    ports = candidate_ports(identity)
    for candidate in ports:
        with suppress(OSError):
            listening = listen(candidate)
            break
    else:
        tried = ", ".join(map(str, ports))
        raise UserError(
            f"environment: rank 0 can listen on none of the ports {tried}; set MASTER_ADDR and"
            " MASTER_PORT"
        )
    waiting = set(range(1, world_size))

    def answer() -> None:
        with listening:
            while waiting:
                connection, _ = listening.accept()
                # An unrelated program closes, sends nothing, or sends no number.
                with connection, suppress(OSError, ValueError):
                    connection.settimeout(ANSWER_SECONDS)
                    connection.sendall(f"lmforge {identity}\n".encode())
                    rank = int(_read_line(connection))
                    connection.sendall(f"{port}\n".encode())
                    if _read_line(connection) == "received":
                        waiting.discard(rank)

    threading.Thread(target=answer, name="rendezvous", daemon=True).start()


def _read_line(connection: socket.socket) -> str:
    received = b""
    while not received.endswith(b"\n"):
        part = connection.recv(1)
        if not part or len(received) > MAX_MESSAGE_BYTES:
            raise OSError("the connection ended within a line")
        received += part
    return received.decode(errors="replace").strip()


def ask_rank0(
    identity: str, rank: int, hosts: list[str], name: str = "", seconds: float = MAX_WAIT_SECONDS
) -> tuple[str, int]:
    """Ask rank 0 for the port of its store, repeatedly until it answers.

    Returns its host too. `name` of this rank is for messages.

    Raises PeerLost after so many seconds.
    """
    answers: list[tuple[str, int]] = []

    def has_answered() -> bool:
        for host in hosts:
            for port in candidate_ports(identity):
                if (answer := _ask_port(host, port, identity, rank)) is not None:
                    answers.append((host, answer))
                    return True
        return False

    others = f" and {len(hosts) - 1} other hosts" if len(hosts) > 1 else ""

    def silence(waited: float) -> str:
        asker, asked = (
            (f"rank {rank}", f"rank 0 on {hosts[0]}{others}") if not name else (name, hosts[0])
        )
        return f"{asker}: {asked} does not answer after {waited:.0f} s"

    if not wait_until(has_answered, seconds, silence):
        raise PeerLost(
            f"{silence(seconds)}; was it started, and may it be reached over the network?"
        )
    return answers[0]


def own_address(hosts: list[str]) -> str:
    """This machine's name in `hosts`, by which the others know it; its own name if it is not in
    `hosts`.
    """
    for host in hosts:
        with suppress(OSError):
            family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as probe:
                probe.bind(address)  # only an address of this machine can be bound
                return host
    return socket.gethostname()


def _ask_port(host: str, port: int, identity: str, rank: int) -> int | None:
    """The port of the store of rank 0, if it answers here for this job."""
    try:
        with socket.create_connection((host, port), timeout=ANSWER_SECONDS) as connection:
            if _read_line(connection) != f"lmforge {identity}":
                return None
            connection.sendall(f"{rank}\n".encode())
            answer = int(_read_line(connection))
            connection.sendall(b"received\n")
            return answer
    except (OSError, ValueError):
        return None
