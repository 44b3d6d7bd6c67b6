"""A rank that does not join is named by those that wait for it."""

import os
import socket
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from datetime import timedelta
import torch.distributed as dist
from lmforge.cluster.distributed import report_missing_ranks
rank = int(sys.argv[1])
with report_missing_ranks(rank, 3, 1, patience_seconds=0.5):
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
    waiting = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank)],
            env={**os.environ, **variables, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 2)
    ]
    try:
        errors = waiting[0].stderr
        assert errors is not None
        line = next(line for line in errors if line.startswith("lmforge: 1 of 3"))
        assert line.startswith("lmforge: 1 of 3 ranks has not joined yet (1): ")
    finally:
        for process in waiting:
            process.kill()
            process.wait()
    del store
