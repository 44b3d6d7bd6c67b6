"""Joining the other ranks: who is missing, over which network interface, and with how many open
files.
"""

import fcntl
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist

from lmforge.core.distributed.environment import ENVIRONMENT_VARIABLE, TORCHRUN, RankInfo
from lmforge.core.distributed.rank_info import RESTARTS_VARIABLE
from lmforge.core.distributed.rendezvous import (
    answer_with_port,
    ask_rank0,
    hosts_to_ask,
    job_identity,
    listen,
    own_address,
)
from lmforge.core.distributed.waiting import REPORT_AFTER_SECONDS, print_line, wait_until
from lmforge.core.errors import PeerLost, name_some

# The number of gloo groups of all ranks: for host memory, decisions and checkpoints. Each connects
# every pair of ranks.
GLOO_GROUPS = 3
# Shards, logs, libraries, sockets of NCCL.
OTHER_OPEN_FILES = 1024
# Linux's request for the IPv4 address of an interface, and where the address is in the answer.
SIOCGIFADDR = 0x8915
ADDRESS_BYTES = slice(20, 24)
# An address that no host has (RFC 5737): the route to it is the default route.
OUTSIDE = "192.0.2.1"


JOIN_SECONDS = 1800.0

# Kept open between two initializations of one process.
_server: dist.TCPStore | None = None


def find_rank0(info: RankInfo) -> None:
    """Set torchrun's variables, including MASTER_ADDR and MASTER_PORT, where another launcher
    started this process.

    Rank 0 starts the store on a free port, which the others ask it for. Raises UserError where the
    address of rank 0 is unknown, and RunFailed where it does not answer.
    """
    if info.environment == TORCHRUN.name:
        return
    if not ("MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ):
        hosts = hosts_to_ask(info)
        if "MASTER_PORT" in os.environ:
            address = hosts[0]
            port = int(os.environ["MASTER_PORT"])
        elif info.is_rank0:
            address = own_address(hosts)
            port = _start_store(job_identity(info), info.world_size)
        else:
            address, port = ask_rank0(job_identity(info), info.rank, hosts)
        os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": f"{port}"}
    # From here on torchrun's variables are used instead of the launcher's.
    os.environ[ENVIRONMENT_VARIABLE] = TORCHRUN.name
    os.environ |= {
        "RANK": f"{info.rank}",
        "WORLD_SIZE": f"{info.world_size}",
        "GROUP_RANK": f"{info.node}",
    }
    os.environ |= {
        "LOCAL_RANK": f"{info.local_rank}",
        "LOCAL_WORLD_SIZE": f"{info.local_world_size}",
    }


def _start_store(identity: str, world_size: int) -> int:
    """Start the store of all ranks, which torch finds in this process, and tell its port to the
    ranks that ask. Returns it.
    """
    global _server
    listening = listen(0)
    port: int = listening.getsockname()[1]
    _server = dist.TCPStore(
        "localhost",
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listening.detach(),
    )
    answer_with_port(identity, world_size, port)
    return port


def connect_to_store(timeout: timedelta) -> dist.TCPStore:
    """The store of all ranks.

    Its keys are seen as they are, without the prefix that torch gives to each restart.
    """
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


def name_this_start(store: dist.Store, rank: int, world_size: int) -> str:
    """A name of this start of the ranks, the same on all of them.

    Raises PeerLost where some do not come.

    torchrun's store outlives a restart. torch distinguishes starts in it by the restart count of
    each torchrun, which differs between hosts: only that of the lost rank counts the restart, and
    the ranks of the others would read addresses of the earlier start. So each rank asks rank 0, by
    a name that nobody had before.
    """
    own = uuid4().hex
    asked = "lmforge/asked"
    if rank != 0:
        store.set(f"{asked}/{store.add(asked, 1)}", own)
        name = store.get(f"lmforge/answer/{own}").decode()
        store.add(f"{name}/read", 1)
        return name
    answered: set[int] = set()

    def have_all_read() -> bool:
        for number in set(range(1, store.add(asked, 0) + 1)) - answered:
            if store.check([f"{asked}/{number}"]):  # of an earlier start too, where nobody reads it
                store.set(f"lmforge/answer/{store.get(f'{asked}/{number}').decode()}", own)
                answered.add(number)
        return store.add(f"{own}/read", 0) >= world_size - 1

    if not wait_until(have_all_read, JOIN_SECONDS):
        raise PeerLost(
            f"after {JOIN_SECONDS:.0f} s {store.add(f'{own}/read', 0) + 1} of {world_size} ranks"
            " have joined"
        )
    return own


def allow_open_files(needed: int) -> int:
    """Raise this process's limit on open files to `needed`, as far as the system permits; how many
    of them it permits.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if limit > soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def allow_open_connections(world_size: int) -> None:
    """Allow the open files of gloo's connections to all ranks.

    The usual limit of 1,024 is too low for 512 ranks. Where even the hard limit is too low, gloo
    connects two ranks only when they first communicate. This is not the default, since such a rank
    waits without a time-out for one that has died.
    """
    needed = GLOO_GROUPS * world_size + OTHER_OPEN_FILES
    if allow_open_files(needed) < needed:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def choose_gloo_interface(several_hosts: bool) -> None:
    """Let gloo use the network interface that routes to the host of rank 0, unless
    GLOO_SOCKET_IFNAME says which.

    By default gloo uses the one that this host's name resolves to, which on many machines is the
    loopback.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ or not several_hosts:
        return
    # On the host of rank 0 its name may resolve to the loopback; then the interface of the default
    # route is used.
    if name := interface_towards(os.environ["MASTER_ADDR"]) or interface_towards(OUTSIDE):
        os.environ["GLOO_SOCKET_IFNAME"] = name


def interface_towards(host: str) -> str | None:
    """The network interface over which this machine reaches `host`; None for the loopback, or where
    it cannot be determined.
    """
    # There may be no route, an unknown name, only IPv6, or no Linux.
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # nothing is sent
        address = probe.getsockname()[0]
        if address.startswith("127."):
            return None
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(
                    probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15])
                )
                if socket.inet_ntoa(answer[ADDRESS_BYTES]) == address:
                    return name
    return None


@contextmanager
def report_missing_ranks(
    rank: int, world_size: int, what: str, patience_seconds: float = REPORT_AFTER_SECONDS
) -> Iterator[None]:
    """A context for what waits for all ranks; it says which have not joined.

    `what` names the wait, of which the same processes may have several. torch waits for all ranks
    without a message, and after minutes fails with one that names no rank. Here each rank writes a
    key to the store over a connection of its own (the other one is busy waiting), and the first
    that joined prints who has not. Ranks that have not joined after `patience_seconds` are printed
    on stderr, and again each time the wait has doubled.
    """
    joined = threading.Event()
    registered = threading.Event()

    def report() -> None:
        began = time.monotonic()
        pause = patience_seconds
        prefix = f"lmforge/joining-{os.environ.get(RESTARTS_VARIABLE, '')}-{what}"
        try:
            # The rank that serves the store may itself be late.
            store = connect_to_store(timedelta(hours=1))
            store.set(f"{prefix}/{rank}", "here")
            number = store.add(f"{prefix}/count", 1)
            registered.set()
            if number > 1:
                return  # only one rank polls: thousands of ranks would overload the store
            while not joined.wait(pause):
                pause = time.monotonic() - began
                if store.add(f"{prefix}/count", 0) == world_size:
                    return
                missing = [
                    each for each in range(world_size) if not store.check([f"{prefix}/{each}"])
                ]
                print_line(f"{_missing_message(missing, world_size)} after {pause:.0f} s")
        except (RuntimeError, KeyError, ValueError):
            return  # the store does not answer, which the rank that waits for it reports
        finally:
            registered.set()

    threading.Thread(target=report, name="joining", daemon=True).start()
    try:
        yield
        # A rank that went on while its thread still connects could lose the store with rank 0, and
        # torch would print the error.
        registered.wait(patience_seconds)
    finally:
        joined.set()


def _missing_message(missing: list[int], world_size: int) -> str:
    have = "has" if len(missing) == 1 else "have"
    number = f"{len(missing)} of {world_size} ranks {have} not joined yet"
    return f"{number} ({name_some(missing)}): not started, still importing, or cut off"
