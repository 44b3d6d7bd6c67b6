"""A rank that does not join is named by those that wait for it."""

import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from lmforge.core.distributed.joining import OUTSIDE, interface_towards
from lmforge.core.distributed.rendezvous import free_port
from tests.conftest import Command
from tests.support.preloaded import preloaded

# A rank of three, of which rank 1 never comes.
WAITING = """
import os
from datetime import timedelta
import torch.distributed as dist
from lmforge.core.distributed.joining import report_missing_ranks
with report_missing_ranks(int(os.environ["RANK"]), 3, "test", patience_seconds=0.5):
    store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=300)))
    store.wait(["never"])
"""
# A rank of three, which joins a store of torchrun, and waits for its own report to be over.
LATER = """
import os, sys, threading
from lmforge.core.distributed.joining import report_missing_ranks
os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": sys.argv[2]}
with report_missing_ranks(int(sys.argv[1]), 3, "test", patience_seconds=0.5):
    for thread in threading.enumerate():
        if thread.name == "joining":
            thread.join(timeout=10)
"""
# One of two ranks, of which rank 1 is slow to connect for its report. Rank 0, which has the store,
# ends once rank 1 went on.
SLOW = """
import os, threading, time
import torch.distributed as dist
from lmforge.core.distributed.joining import report_missing_ranks
connect = dist.TCPStore
def slowly(*args, **options):
    if threading.current_thread().name == "joining" and os.environ["RANK"] == "1":
        time.sleep(0.5)
    return connect(*args, **options)
dist.TCPStore = slowly
with report_missing_ranks(int(os.environ["RANK"]), 2, "test"):
    store, rank, _ = next(dist.rendezvous("env://"))
if rank == 1:
    store.set("through", "")
else:
    store.wait(["through"])
    print("registered", store.add("lmforge/joining--test/count", 0))
"""


@pytest.mark.parametrize("agent", ["False", "True"], ids=["one task a rank", "torchrun's store"])
def test_a_rank_that_does_not_join_is_named_by_one_that_waits(agent: str, tmp_path: Path) -> None:
    port, script = free_port(), tmp_path / "waiting.py"
    script.write_text(WAITING)
    variables = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "3",
        "TORCHELASTIC_USE_AGENT_STORE": agent,
    }
    store = (
        dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
        if agent == "True"
        else None
    )
    waiting = [
        preloaded().start([], tmp_path, script=script, variables={**variables, "RANK": rank})
        for rank in ("0", "2")
    ]
    lines: list[str] = []
    try:
        while not lines:
            assert all(rank.poll() is None for rank in waiting), [
                rank.errors.read_text() for rank in waiting
            ]
            time.sleep(0.02)
            errors = "".join(rank.errors.read_text() for rank in waiting)
            lines = [line for line in errors.splitlines() if line.startswith("lmforge: 1 of 3")]
    finally:
        for rank in waiting:
            rank.kill()
    del store
    assert lines[0].startswith("lmforge: 1 of 3 ranks has not joined yet (1): ")


@pytest.mark.parametrize("rank", [0, 2])
def test_one_rank_looks_however_many_wait(rank: int, program: Command) -> None:
    """The keys of the ranks are looked up by the first that joined, once each time it reports."""
    port = free_port()
    store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    store.add("lmforge/joining--test/count", 1)  # another rank was first
    finished = program(LATER, rank, port)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert store.add("lmforge/joining--test/count", 0) == 2


def test_a_rank_continues_once_its_thread_has_connected(tmp_path: Path) -> None:
    """A thread that connects while rank 0 ends, and the store with it, makes torch print the lost
    connection.
    """
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    finished = preloaded().run([], tmp_path, script=script, ranks=2, timeout=60)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "registered 2\n", "")


LIMITS = """
import os, resource, sys
from lmforge.core.distributed.joining import allow_open_connections
soft, hard, ranks = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
allow_open_connections(ranks)
print(*resource.getrlimit(resource.RLIMIT_NOFILE), os.environ.get("TORCH_GLOO_LAZY_INIT"))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "ranks", "expected"),
    [
        (1024, 8192, 8, "1048 8192 None"),
        (1024, 8192, 1024, "4096 8192 None"),
        (1024, 2048, 1024, "2048 2048 1"),
        (8000, 8192, 1024, "8000 8192 None"),
    ],
)
def test_the_limit_on_open_files_is_raised_to_what_all_ranks_need_or_connections_wait(
    soft: int,
    hard: int,
    ranks: int,
    expected: str,
    program: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    result = program(LIMITS, soft, hard, ranks)
    assert result.stdout.strip() == expected, result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads the routes of Linux")
def test_the_interface_is_that_of_the_route_and_never_the_loopback() -> None:
    assert interface_towards("127.0.0.1") is None
    assert interface_towards("no-such-host.invalid") is None
    with open("/proc/net/route", encoding="ascii") as routes:
        defaults = [line.split()[0] for line in routes if line.split()[1] == "00000000"]
    assert interface_towards(OUTSIDE) in (defaults or [None])


def test_a_rank_that_cannot_open_its_log_ends_all_and_collectives_wait_longer_than_the_watchdog(
    tmp_path: Path,
) -> None:
    script = Path(__file__).parent / "ranks_without_logs.py"
    result = preloaded().run([str(tmp_path), "9000"], tmp_path, script=script, ranks=2, timeout=120)
    assert result.returncode == 0, result.stderr
    lines = sorted(result.stdout.splitlines())
    log = tmp_path / "a" / "logs" / "attempt-1" / "rank-1.log"
    refusal = (
        f"refused {log}: cannot be opened (Too many open files); all hosts need the folder of"
        " the run"
    )
    assert lines == [refusal, refusal, "time-out True", "time-out True"]
