"""A rank that does not join is named by those that wait for it."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lmforge.cluster.joining import OUTSIDE, interface_towards
from tests.preloaded import preloaded

PROGRAM = """
import sys
from datetime import timedelta
import torch.distributed as dist
from lmforge.cluster.joining import report_missing_ranks
rank = int(sys.argv[1])
with report_missing_ranks(rank, 3, "test", patience_seconds=0.5):
    if rank != 1:
        store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=300)))
        store.wait(["never"])
"""


@pytest.mark.parametrize("agent", ["False", "True"], ids=["one task a rank", "torchrun's store"])
def test_a_rank_that_does_not_join_is_named_by_one_that_waits(agent: str) -> None:
    import torch.distributed as dist

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False) if agent == "True" else None
    variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "3", "TORCHELASTIC_USE_AGENT_STORE": agent}
    reading, writing = os.pipe()
    waiting = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank)],
            env={**os.environ, **variables, "RANK": str(rank)},
            stderr=writing,
        )
        for rank in (0, 2)
    ]
    os.close(writing)
    try:
        with os.fdopen(reading, encoding="utf-8") as errors:
            line = next(line for line in errors if line.startswith("lmforge: 1 of 3"))
        assert line.startswith("lmforge: 1 of 3 ranks has not joined yet (1): ")
    finally:
        for process in waiting:
            process.kill()
            process.wait()
    del store


@pytest.mark.parametrize("rank", [0, 2])
def test_one_rank_looks_however_many_wait(rank: int) -> None:
    """The keys of the ranks are looked up by the first that joined, once each time it reports."""
    import torch.distributed as dist

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    store.add("lmforge/joining--test/count", 1)  # another rank was first
    variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    program = PROGRAM.replace('store.wait(["never"])', "import time; time.sleep(3)")
    finished = subprocess.run(
        [sys.executable, "-c", program, str(rank)],
        env={**os.environ, **variables, "RANK": str(rank), "WORLD_SIZE": "3"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "not joined" not in finished.stderr
    assert store.add("lmforge/joining--test/count", 0) == 2


LIMITS = """
import os, resource, sys
from lmforge.cluster.joining import allow_open_connections
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
    soft: int, hard: int, ranks: int, expected: str
) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TORCH_GLOO_LAZY_INIT"}
    command = [sys.executable, "-c", LIMITS, *map(str, (soft, hard, ranks))]
    found = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() == expected


@pytest.mark.skipif(sys.platform != "linux", reason="reads the routes of Linux")
def test_the_interface_is_that_of_the_route_and_never_the_loopback() -> None:
    assert interface_towards("127.0.0.1") is None
    assert interface_towards("no-such-host.invalid") is None
    with open("/proc/net/route", encoding="ascii") as routes:
        defaults = [line.split()[0] for line in routes if line.split()[1] == "00000000"]
    assert interface_towards(OUTSIDE) in (defaults or [None])


def test_a_rank_that_cannot_open_its_log_ends_all_and_collectives_wait_longer_than_the_watchdog(tmp_path: Path) -> None:
    script = Path(__file__).parent / "ranks_without_logs.py"
    found = preloaded().run([str(tmp_path), "9000"], tmp_path, script=script, ranks=2, timeout=120)
    assert found.returncode == 0, found.stderr
    lines = sorted(found.stdout.splitlines())
    log = tmp_path / "a" / "logs" / "attempt-1" / "rank-1.log"
    refusal = f"refused {log}: cannot be opened (Too many open files); all hosts need the folder of the run"
    assert lines == [refusal, refusal, "time-out True", "time-out True"]
