"""The page of `lmforge top`, drawn for runs and hosts of any size and in any state."""

import re
from dataclasses import replace

import pytest
from rich.console import Console

from lmforge.ops.monitor.run_status import RankStatus, RunStatus, run_state
from lmforge.ops.monitor.usage.devices import DeviceUsage
from lmforge.ops.monitor.usage.host import HostUsage, ProcessUsage
from lmforge.ops.monitor.usage.remote_hosts import HostAnswer
from lmforge.ops.verbs.running.top_screen import Snapshot, render_screen

GPU = DeviceUsage(
    0, "NVIDIA H100 80GB HBM3", 98.0, 70 * 2**30, 80 * 2**30, 650.0, 700.0, 65.0, "", [4711]
)
HOST = HostUsage(
    "node1",
    1e9,
    64,
    12.0,
    8.0,
    2**37,
    2**40,
    1e9,
    2e9,
    [GPU],
    [ProcessUsage(1, "python", 99.0, 2**33)],
    [],
)
RANK = RankStatus(0, "node1", 4711, "running", 120, "forward", 0.4, 1e9, 0.5, "", False, "")
METRICS = {
    "loss": 2.5,
    "val/loss": 2.6,
    "tokens_per_second": 1e6,
    "mfu": 0.43,
    "step_seconds": 0.5,
    "data_seconds": 0.05,
}


def run_of(ranks: list[RankStatus]) -> RunStatus:
    return RunStatus(
        "runs/a",
        run_state(ranks),
        2,
        1000,
        121,
        {**METRICS, "seconds_left": 3725.0},
        3.0,
        ranks,
        [],
    )


def drawn(
    hosts: list[HostAnswer], runs: list[RunStatus], columns: int = 80, lines: int | None = None
) -> list[str]:
    """The page as lines; none is wider than the screen."""
    console = Console(width=columns, height=lines, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(render_screen(Snapshot(1e9, hosts, runs), columns, lines))
    result = capture.get().splitlines()
    assert max(map(len, result)) <= columns
    return [line.rstrip() for line in result]


def row_of(lines: list[str], first_word: str) -> str:
    return next(line for line in lines if line.split()[:1] == [first_word])


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (160, 50)])
def test_a_run_of_a_thousand_ranks_fits_and_its_worst_ranks_come_first(
    columns: int, lines: int
) -> None:
    ranks = [
        replace(RANK, rank=rank, host=f"node{rank // 8}.cluster.example.org")
        for rank in range(1024)
    ]
    ranks[700] = replace(ranks[700], state="silent", heartbeat_age_seconds=95.0)
    ranks[33] = replace(ranks[33], slow="data", phase="data")
    ranks[512] = replace(ranks[512], step=118)
    hosts = [HostAnswer(f"node{at}", replace(HOST, host=f"node{at}"), 1.0) for at in range(128)]
    page = drawn(hosts, [run_of(ranks)], columns, lines)
    assert "runs/a  attempt 2, 1,024 ranks on 128 hosts: DEGRADED" in page
    table = next(at for at, line in enumerate(page) if line.split()[:2] == ["rank", "host"])
    assert [line.split()[0] for line in page[table + 1 : table + 4]] == ["700", "33", "512"]
    assert "no heartbeat for 95 s" in " ".join(" ".join(page[table + 1 : table + 5]).split())
    strips = [line.split()[1] for line in page if re.match(r" *\d+  [a-zD!]+$", line)]
    assert len("".join(strips)) == 1024
    assert "".join(strips)[700] == "!"
    assert "".join(strips)[33] == "D"
    assert any("ranks more, none in a worse state" in line for line in page)


def test_what_does_not_answer_is_in_no_mean_and_comes_first() -> None:
    dead = replace(HOST, host="node2", devices=[GPU, DeviceUsage(1, error="GPU is lost")])
    hosts = [
        HostAnswer("node1", HOST, 1.0),
        HostAnswer("node2", dead, 1.0),
        HostAnswer("node3", replace(HOST, host="node3", cpu_percent=0.0), 125.0),
        HostAnswer("node4", None, None, "ssh: connect to host node4 port 22: No route to host"),
    ]
    page = drawn(hosts, [], 120)
    assert (
        "2 of 4 hosts answer   CPU 12 % (least 12 %)   2 of 3 GPUs answer   use 98 % (least 98 %)  "
        " 1.3 kW" in page
    )
    table = next(at for at, line in enumerate(page) if line.startswith("host") and "CPU" in line)
    assert [line.split()[0] for line in page[table + 1 : table + 3]] == ["node3", "node4"]
    assert page[table + 1].endswith("as it was 2m05s ago")
    assert "no answer: ssh: connect to host node4" in " ".join(page)
    gpus = next(at for at, line in enumerate(page) if "GPU  name" in line)
    assert page[gpus + 1].startswith("node2")
    assert page[gpus + 1].endswith("LOST: GPU is lost")


def test_a_gpu_that_is_busy_at_little_power_is_said_to_wait_and_its_rank_is_named() -> None:
    waiting = replace(HOST, devices=[replace(GPU, power_watts=77.0, utilization_percent=100.0)])
    page = drawn([HostAnswer("node1", waiting, 0.0)], [run_of([RANK])], 160)
    row = next(line for line in page if "H100" in line)
    assert row.endswith("rank 0     busy at 11% of its power: waiting?")


def test_unknown_values_are_question_marks() -> None:
    unknown = replace(
        HOST,
        cpu_percent=None,
        received_bytes_per_second=None,
        sent_bytes_per_second=None,
        processes=[],
    )
    page = drawn([HostAnswer("node1", replace(unknown, devices=[DeviceUsage(0)]), 0.0)], [])
    assert row_of(page, "node1").split() == ["node1", "?", "8.0/64", "128/1,024", "?/?"]
    assert page[-1].split() == ["node1", "0", "?", "?/?", "?/?", "?"]


@pytest.mark.parametrize(
    ("changed", "state", "note"),
    [
        ({"state": "gone"}, "lost", "process 4711 is gone; last heartbeat 0.5 s ago"),
        ({"state": "stopped"}, "degraded", "process 4711 is stopped (SIGSTOP)"),
        (
            {"state": "missing", "phase": "", "host": ""},
            "not started",
            "no heartbeat: it never joined",
        ),
        ({"state": "ended", "phase": "failed"}, "failed", ""),
        ({"state": "ended", "phase": "done"}, "done", ""),
        ({"stalled": True, "verdict": "stuck"}, "stalled", "stuck"),
        ({"stalled": True, "verdict": "waits"}, "stalled", "waits for others"),
        ({"slow": "data, forward"}, "running", "slow: data, forward"),
    ],
)
def test_each_state_of_a_rank_is_said_in_words(
    changed: dict[str, object], state: str, note: str
) -> None:
    rank = replace(RANK, **changed)  # type: ignore[arg-type]
    assert run_state([rank]) == state
    page = drawn([], [run_of([rank])])
    assert note in " ".join(" ".join(page).split())
    assert f": {state}" in page[2].lower()


def test_what_a_host_calls_itself_and_its_processes_does_not_drive_the_terminal() -> None:
    bad = replace(
        HOST,
        host="\x1b[2Jnode",
        notes=["\x1b]0;x\x07"],
        processes=[ProcessUsage(1, "\x1b[31mevil", 5.0, 0)],
    )
    page = drawn(
        [HostAnswer("\x1b[2Jnode", bad, 0.0)],
        [run_of([replace(RANK, host="\x1b[2J", phase="\x1b[1m")])],
    )
    assert not any("\x1b" in line for line in page)
