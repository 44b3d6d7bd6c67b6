"""Starts ranks on this machine with torch's elastic launcher, and turns how they ended into one exit status."""

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from lmforge.cluster.rank_info import LAUNCHER_PID_VARIABLE, threads_per_rank
from lmforge.errors import EXIT_PEER_LOST, UserError

# After SIGTERM a rank finishes its step and saves; after this time it is killed.
GRACE_SECONDS = 120
# So many can be tried out even on a small machine; a machine with sixteen GPUs has many cores.
PROCESSES_PER_CORE, MIN_PROCESSES_LIMIT = 4, 16
INTERRUPTED_STATUSES = [128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
# Signals that torch's launcher handles.
LAUNCHER_SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT


def check_num_processes(number: int) -> None:
    """Raise UserError for many more processes than this machine can run: each takes a core or a GPU, and hundreds of MiB."""
    cores = threads_per_rank(1)
    most = max(MIN_PROCESSES_LIMIT, PROCESSES_PER_CORE * cores)
    if number > most:
        raise UserError(
            f"{number:,} processes: this machine has {cores} cores; start at most {most}, or use torchrun on several"
        )


def launch_local(
    num_processes: int,
    arguments: list[str],
    *,
    max_restarts: int = 0,
    restart_arguments: Sequence[str] = (),
    has_begun: Callable[[], bool] = lambda: True,
) -> int:
    """Run `python -m lmforge ARGUMENTS` as `num_processes` ranks and wait for them. Returns one exit status for all.

    It is 2 when a rank refused its input, 128 + signal when ranks were interrupted, 1 when a rank failed otherwise. Where a
    rank was lost and `has_begun()`, all ranks are started again, at most `max_restarts` times, with `restart_arguments`
    added. Raises UserError as `check_num_processes` does.
    """
    check_num_processes(num_processes)
    for number in range(max_restarts + 1):
        status = _launch_once(num_processes, [*arguments, *(restart_arguments if number else ())])
        if status != EXIT_PEER_LOST or number == max_restarts or not has_begun():
            break
        print(f"lmforge: all ranks are started again ({number + 1} of {max_restarts})", file=sys.stderr, flush=True)
    return 1 if status == EXIT_PEER_LOST else status


def _launch_once(num_processes: int, arguments: list[str]) -> int:
    """Start the ranks once. Returns the exit status: EXIT_PEER_LOST where a rank was killed or gave up on another."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=f"lmforge-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        # torch would restart after every failure, bad input included.
        max_restarts=0,
        shutdown_timeout=GRACE_SECONDS,
    )
    try:
        with _launcher_environment():
            elastic_launch(config, sys.executable)("-m", "lmforge", *arguments)
    except ChildFailedError as failed:
        statuses = {rank: failure.exitcode for rank, failure in failed.failures.items()}
        if 2 in statuses.values():
            return 2
        for status in statuses.values():
            if status in INTERRUPTED_STATUSES:
                return status
        # The launcher ends ranks with SIGTERM when another has failed.
        by_launcher = -signal.SIGTERM
        for rank, status in statuses.items():
            if status < 0 and status != by_launcher:  # the ranks that are left only know that a peer is gone
                print(f"lmforge: rank {rank} was killed by {signal.Signals(-status).name}", file=sys.stderr, flush=True)
                return EXIT_PEER_LOST
        return EXIT_PEER_LOST if {EXIT_PEER_LOST} <= set(statuses.values()) <= {EXIT_PEER_LOST, by_launcher} else 1
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


@contextmanager
def _launcher_environment() -> Iterator[None]:
    """Signal handlers, environment variables and logging of this process while it launches; restored afterwards."""
    handlers = {number: signal.getsignal(number) for number in (*LAUNCHER_SIGNALS, signal.SIGUSR1)}
    environment = dict(os.environ)
    # Schedulers send SIGUSR1 when the time is nearly up; torch's launcher handles only signals that end the job at once.
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    # The launcher's own reports (a table of exit codes, "no error file defined") say less than our ranks do.
    logging.disable(logging.CRITICAL)
    # Without it torch prints a warning. Each rank sets its threads in `init_distributed`.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ[LAUNCHER_PID_VARIABLE] = str(os.getpid())
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for name in (LAUNCHER_PID_VARIABLE, "OMP_NUM_THREADS"):
            os.environ.pop(name)
        os.environ.update(environment)
