"""Starts ranks on this machine with torch's elastic launcher, and turns how they ended into one
exit status.

How the nodes of a run on several do so together is in `node_group.py`.
"""

import logging
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from lmforge.core.distributed.environment import (
    CLOSED_VARIABLE,
    ENVIRONMENT_VARIABLE,
    JOB_VARIABLE,
    LAUNCHER_PID_VARIABLE,
    NODE_RANK_VARIABLE,
    TORCHRUN,
)
from lmforge.core.distributed.processes import (
    INTERRUPTED_STATUSES,
    SIGNAL_FILE_VARIABLE,
    STOP_SIGNALS,
    handle_signals,
    restore_signals,
    signal_name,
)
from lmforge.core.distributed.rank_info import threads_per_rank
from lmforge.core.distributed.waiting import print_line
from lmforge.core.errors import EXIT_PEER_LOST, UserError

# After SIGTERM a rank finishes its step and saves; after this time it is killed.
GRACE_SECONDS = 120
# This many are allowed even on a small machine. (A machine with sixteen GPUs has many cores.)
PROCESSES_PER_CORE = 4
MIN_PROCESSES_LIMIT = 16
# Signals that end the ranks.
LAUNCHER_SIGNALS = *STOP_SIGNALS, signal.SIGQUIT


@dataclass(frozen=True)
class Rendezvous:
    """Where the launchers of `num_nodes` nodes meet: `endpoint` is HOST:PORT of the first."""

    num_nodes: int
    node_rank: int
    endpoint: str
    run_id: str


def check_num_processes(number: int) -> None:
    """Raise UserError for many more processes than this machine can run: each takes a core or a
    GPU, and hundreds of MiB.
    """
    cores = threads_per_rank(1)
    most = max(MIN_PROCESSES_LIMIT, PROCESSES_PER_CORE * cores)
    if number > most:
        raise UserError(
            f"{number:,} processes: this machine has {cores} cores; start at most {most}, or use"
            " more nodes (lmforge launch)"
        )


def launch_local(
    num_processes: int,
    arguments: list[str],
    *,
    max_restarts: int = 0,
    restart_arguments: Sequence[str] = (),
    has_begun: Callable[[], bool] = lambda: True,
) -> int:
    """Run `python -m lmforge ARGUMENTS` as `num_processes` ranks and wait for them.

    Returns one exit status for all.

    It is 2 when a rank refused its input, 128 + signal when ranks were interrupted, 1 when a rank
    failed otherwise. Where a rank was lost and `has_begun()`, all ranks are started again, at most
    `max_restarts` times, with `restart_arguments` added. Raises UserError as `check_num_processes`
    does.
    """
    check_num_processes(num_processes)
    for number in range(max_restarts + 1):
        with launcher_environment() as interruption:
            status, reason = start_ranks(
                num_processes, [*arguments, *(restart_arguments if number else ())], interruption
            )
        if reason:
            print_line(reason)
        if status != EXIT_PEER_LOST:
            return status
        if not has_begun():
            break
        print_restart(number, max_restarts, reason, arguments)
    return 1


def print_restart(number: int, max_restarts: int, reason: str, arguments: list[str]) -> None:
    """Say that ranks which were started again `number` times are started once more, or not because
    of the limit; the last line names the rank that was lost, its `reason`, and the command that
    continues, in the terms of the launcher.
    """
    if number < max_restarts:
        print_line(f"all ranks are started again ({number + 1} of {max_restarts})")
        return
    lost = f"{reason}; " if reason else ""
    again = "the same command continues from the last checkpoint"
    if JOB_VARIABLE in os.environ:
        again = f"to continue: lmforge launch {shlex.join(arguments)}"
    print_line(f"{lost}launch.max_restarts = {max_restarts}: ranks are not started again; {again}")


def start_ranks(
    num_processes: int,
    arguments: list[str],
    interruption: "Interruption",
    rendezvous: Rendezvous | None = None,
) -> tuple[int, str]:
    """Start the ranks of this node once.

    Returns the exit status, EXIT_PEER_LOST where a rank was killed or gave up on another, and which
    rank was killed, in a line. Call it within `launcher_environment`.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    rendezvous_options: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "run_id": f"lmforge-{os.getpid()}",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "local_addr": "localhost",
    }
    if rendezvous is not None:
        rendezvous_options = {
            "min_nodes": rendezvous.num_nodes,
            "max_nodes": rendezvous.num_nodes,
            "run_id": rendezvous.run_id,
            # The nodes and the order of their ranks are fixed.
            "rdzv_backend": "static",
            "rdzv_endpoint": rendezvous.endpoint,
            "rdzv_configs": {"rank": rendezvous.node_rank},
        }
    kills_before = _count_memory_kills()
    try:
        config = LaunchConfig(
            nproc_per_node=num_processes,
            # torch would restart after every failure, including invalid input.
            max_restarts=0,
            shutdown_timeout=GRACE_SECONDS,
            # Its own handlers would raise again at a second signal, while ranks still save;
            # `launcher_environment` has ours.
            signals_to_handle="",
            **rendezvous_options,
        )
        elastic_launch(config, sys.executable)("-m", "lmforge", *arguments)
    except ChildFailedError as failed:
        statuses = {rank: failure.exitcode for rank, failure in failed.failures.items()}
        if 2 in statuses.values():
            return 2, ""
        for status in statuses.values():
            if status in INTERRUPTED_STATUSES:
                return interruption.status or status, ""
        # The launcher ends ranks with SIGTERM when another has failed.
        by_launcher = -signal.SIGTERM
        for rank, status in statuses.items():
            # The remaining ranks only know that a peer is lost.
            if status < 0 and status != by_launcher:
                where = f" on {os.uname().nodename}" if rendezvous else ""
                memory = "; the kernel ended a process because host memory was used up"
                why = (
                    memory
                    if status == -signal.SIGKILL and _count_memory_kills() > kills_before
                    else ""
                )
                return (
                    EXIT_PEER_LOST,
                    f"rank {rank}{where} was killed by {signal_name(-status)}{why}",
                )
        return (
            EXIT_PEER_LOST
            if {EXIT_PEER_LOST} <= set(statuses.values()) <= {EXIT_PEER_LOST, by_launcher}
            else 1
        ), ""
    except SignalException as stopped:
        return interruption.status or 128 + int(stopped.sigval), ""
    return 0, ""


def _count_memory_kills() -> int:
    """How many processes the kernel of this host has killed for lack of memory; 0 where it does not
    say.
    """
    with suppress(OSError):
        if match := re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.M):
            return int(match[1])
    return 0


def launch_plainly(
    num_processes: int, arguments: list[str], node: int, num_nodes: int, address: str, port: int
) -> int:
    """Run `python -m lmforge ARGUMENTS` as the ranks of one node of several, and wait for them.

    Returns one status for all.

    A launcher neither waits for other nodes nor ends its ranks when another node fails: the ranks
    themselves detect which node is missing.
    """
    common: dict[str, object] = {
        "WORLD_SIZE": num_nodes * num_processes,
        "LOCAL_WORLD_SIZE": num_processes,
        "GROUP_RANK": node,
    }
    common |= {"MASTER_ADDR": address, "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "lmforge"}
    processes = []
    for local_rank in range(num_processes):
        variables = common | {"RANK": node * num_processes + local_rank, "LOCAL_RANK": local_rank}
        environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
        environment.pop(NODE_RANK_VARIABLE, None)
        processes.append(
            subprocess.Popen([sys.executable, "-m", "lmforge", *arguments], env=environment)
        )

    def end(number: int, frame: FrameType | None) -> None:
        for process in processes:
            process.kill()

    handle_signals(LAUNCHER_SIGNALS, end)
    statuses = [process.wait() for process in processes]
    return 2 if 2 in statuses else max((abs(status) for status in statuses), default=0)


class Interruption:
    """The first signal that a launcher got; `status` is 128 + its number, or 0.

    Ranks read the number in a file of memory.
    """

    def __init__(self) -> None:
        self.status = 0
        self.file = os.memfd_create("signal") if sys.platform == "linux" else None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Make the ranks end.

        All but Ctrl-C and Ctrl-\\ are passed on as SIGTERM: others would kill processes that a rank
        has started. A signal may arrive twice, from the scheduler and from a script; the ranks are
        saving by then.
        """
        from torch.distributed.elastic.multiprocessing.api import SignalException

        if self.status and number != signal.SIGINT:
            return
        self.status = 128 + number
        sent = (
            signal.Signals(number) if number in (signal.SIGINT, signal.SIGQUIT) else signal.SIGTERM
        )
        if self.file is not None:
            os.pwrite(self.file, f"{number:02d}".encode(), 0)
        if sent != number:
            with suppress(OSError):  # not `print`, which this may have interrupted
                os.write(
                    2,
                    f"lmforge: {signal_name(number)} came: all ranks are asked to save and end\n".encode(),
                )
        raise SignalException(f"signal {number}", sigval=sent)


@contextmanager
def launcher_environment() -> Iterator[Interruption]:
    """Signal handlers, environment variables and logging of this process while it launches;
    restored afterwards.
    """
    import torch.distributed.elastic.multiprocessing.api  # noqa: F401 - seconds, in which a signal ends this process as usual

    interruption = Interruption()
    handlers = handle_signals(LAUNCHER_SIGNALS, interruption.handle)
    environment = dict(os.environ)
    # The launcher's own reports (a table of exit codes, "no error file defined") are less useful
    # than those of our ranks.
    logging.disable(logging.CRITICAL)
    # Without it torch prints a warning. Each rank sets its threads in `init_distributed`.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ[LAUNCHER_PID_VARIABLE] = str(os.getpid())
    os.environ[SIGNAL_FILE_VARIABLE] = f"/proc/{os.getpid()}/fd/{interruption.file}"
    os.environ[ENVIRONMENT_VARIABLE] = TORCHRUN.name  # whatever else started this process
    streams = {"stdout": sys.__stdout__, "stderr": sys.__stderr__}
    os.environ[CLOSED_VARIABLE] = " ".join(name for name in streams if streams[name] is None)
    try:
        yield interruption
    finally:
        logging.disable(logging.NOTSET)
        restore_signals(handlers)
        if interruption.file is not None:
            os.close(interruption.file)
        for name in (
            LAUNCHER_PID_VARIABLE,
            SIGNAL_FILE_VARIABLE,
            ENVIRONMENT_VARIABLE,
            CLOSED_VARIABLE,
            "OMP_NUM_THREADS",
        ):
            os.environ.pop(name)
        os.environ.update(environment)
