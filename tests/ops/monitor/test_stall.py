"""Stuck ranks are determined from the files of all ranks, written by hand here for each kind of
stall.
"""

import json
import os
import platform
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.rank_info import RankInfo
from lmforge.ops.monitor import watchdog
from lmforge.ops.monitor.heartbeat import FILE_BYTES, Heartbeat
from lmforge.ops.monitor.stall import (
    PeerStatus,
    classify_ranks,
    compiling_line,
    compiling_peers,
    read_peer,
    report_lines,
    stall_file,
)
from tests.seeds import fresh_random

STACK = [
    ["/site-packages/torch/x.py", 3, "wait", "work.wait()"],
    ["/home/me/train.py", 88, "main", "save()"],
]


def write(folder: Path, rank: int, step: int, number: int, phase: str, **changed: Any) -> None:
    """A rank's heartbeat; `operation` and `sequence` for a collective that it waits in, after the
    one before.
    """
    written = time.time()
    beat = {
        "rank": rank,
        "host": platform.node(),
        "process": os.getpid(),
        "step": step,
        "number": number,
        "phase": phase,
    }
    beat |= {
        "since": written - 28,
        "written": written,
        "bytes": 0,
        "noticed": True,
        "reported": False,
    }
    operation, sequence = changed.pop("operation", None), changed.pop("sequence", 41)
    silent = changed.pop("silent", 0.0)
    path = folder / f"rank-{rank}.json"
    path.write_text(json.dumps(beat | changed))
    os.utime(path, (written - silent, written - silent))
    entries = [("all_reduce", sequence - 1, False)] + (
        [(operation, sequence, True)] if operation else []
    )
    collectives = [
        {"group": "default_pg", "operation": o, "sequence": s, "pending": p} for o, s, p in entries
    ]
    content = {"progress": [step, number], "stack": STACK, "collectives": collectives}
    stall_file(folder, rank).write_text(json.dumps(content))


def seen(folder: Path, ranks: int) -> list[PeerStatus]:
    return [
        read_peer(folder, rank, time.time(), silent_after_seconds=10.0) for rank in range(ranks)
    ]


def report_of(folder: Path, ranks: int) -> str:
    return "\n".join(report_lines(seen(folder, ranks), 28.0, 0.8, "logs/rank-*.stack.txt"))


def test_the_rank_without_a_collective_is_stuck_and_who_has_one_waits(tmp_path: Path) -> None:
    """Whatever phase each says it is in: of the same phase, one may wait and another sleep."""
    write(tmp_path, 0, 3, 4, "forward", operation="all_gather")
    write(tmp_path, 1, 3, 4, "forward")
    write(tmp_path, 2, 3, 4, "forward", operation="all_gather")
    assert classify_ranks(seen(tmp_path, 3)) == {0: "waits", 1: "stuck", 2: "waits"}
    lines = report_of(tmp_path, 3).splitlines()
    assert (
        lines[0]
        == "STALL: no progress for 28 s at step 3 (a step takes 0.8 s): rank 1 is stuck, ranks 0, 2"
        " wait for it"
    )
    assert lines[1].split() == [
        "rank",
        "1",
        platform.node(),
        "forward",
        "28",
        "s",
        "stuck",
        "train.py:88",
        "main",
    ]
    assert "waits  all_gather 41 of default_pg, from train.py:88 main" in lines[2]
    assert "stack of rank 1" in lines[3]


STRANGE = [
    None,
    True,
    "x",
    "",
    -1,
    1.5,
    2**63,
    10**30,
    1e308,
    [],
    {},
    [[1]],
    [["x", 1]],
    "\0",
    {"x": 1},
]


@pytest.mark.parametrize("damaged", ["rank-1.json", "rank-1.stall.json"])
def test_files_of_any_content_or_folders_in_their_place_do_not_stop_a_report(
    tmp_path: Path, damaged: str
) -> None:
    for rank in (0, 1):
        write(tmp_path, rank, 3, 4, "forward", operation="all_gather" if rank == 0 else None)
    path = tmp_path / damaged
    record = json.loads(path.read_text())
    contents = [
        b"",
        b"\xff\0" * 300,
        b"[" * 10_000,
        *(json.dumps(value).encode() for value in STRANGE),
    ]
    contents += [
        json.dumps(record | {name: value}).encode() for name in record for value in STRANGE
    ]
    contents += [
        json.dumps({key: record[key] for key in record if key != name}).encode() for name in record
    ]
    for content in contents:
        path.write_bytes(content)
        report = report_of(tmp_path, 2)
        assert report.startswith("STALL: no progress for 28 s at step "), content
        assert "rank 1" in report
    path.unlink()
    path.mkdir()
    assert "rank 1" in report_of(tmp_path, 2)


def test_without_collectives_to_go_by_the_least_far_is_stuck(tmp_path: Path) -> None:
    write(tmp_path, 0, 3, 4, "backward")
    write(tmp_path, 1, 3, 1, "data")
    assert classify_ranks(seen(tmp_path, 2)) == {0: "waits", 1: "stuck"}


def test_all_in_the_same_place_nobody_is_stuck(tmp_path: Path) -> None:
    for rank in range(3):
        write(tmp_path, rank, 3, 0, "data")
    assert set(classify_ranks(seen(tmp_path, 3)).values()) == {""}
    assert "all 3 ranks are in data" in report_of(tmp_path, 3)


def test_another_operation_of_the_same_number_is_a_divergence(tmp_path: Path) -> None:
    write(tmp_path, 0, 4, 1, "reduce", operation="all_reduce")
    write(tmp_path, 1, 3, 9, "save", operation="barrier")
    assert classify_ranks(seen(tmp_path, 2)) == {0: "waits", 1: "waits"}
    text = report_of(tmp_path, 2)
    assert "the ranks wait for each other, each in another collective" in text
    assert "last in common: 40 of default_pg, all_reduce." in text


def test_ranks_that_wait_in_the_same_collective_have_not_diverged(tmp_path: Path) -> None:
    """A cable is out between two hosts whose processes live on."""
    write(tmp_path, 0, 4, 1, "reduce", operation="all_reduce")
    write(tmp_path, 1, 4, 1, "reduce", operation="all_reduce")
    text = report_of(tmp_path, 2)
    assert "the ranks wait for each other, all in the same collective" in text
    assert "Likely the network between these ranks, or a device" in text
    assert "branch" not in text


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"process": 2**22 + 1}, "is gone: killed, or the host ran out of memory"),
        ({"host": "elsewhere", "silent": 95.0}, "has no heartbeat: it or its host is dead"),
        ({"phase": "failed"}, "its run ended: failed"),
        (None, "never joined this run: it has no heartbeat"),
    ],
    ids=["gone", "silent", "ended", "missing"],
)
def test_a_rank_that_cannot_continue_is_stuck_however_far_it_came(
    tmp_path: Path, broken: dict[str, Any] | None, words: str
) -> None:
    write(tmp_path, 0, 3, 1, "data")
    write(tmp_path, 1, 3, 2, "reduce", operation="all_reduce")
    if broken is not None:
        write(tmp_path, 2, 3, 8, **{"phase": "optimizer", **broken})
    assert classify_ranks(seen(tmp_path, 3)) == {0: "waits", 1: "waits", 2: "stuck"}
    assert words in report_of(tmp_path, 3)


def test_evidence_of_an_earlier_stall_is_not_taken_for_this_one(tmp_path: Path) -> None:
    write(tmp_path, 0, 3, 4, "forward", operation="all_gather")
    beat = json.loads((tmp_path / "rank-0.json").read_text())
    (tmp_path / "rank-0.json").write_text(json.dumps({**beat, "number": 5}))
    [peer] = seen(tmp_path, 1)
    assert not peer.stack
    assert peer.pending_collective is None


def test_ranks_in_the_same_place_share_a_line(tmp_path: Path) -> None:
    for rank in range(200):
        write(tmp_path, rank, 3, 4, "forward", operation="all_gather", host=f"host{rank // 8}")
    write(tmp_path, 77, 3, 4, "forward", host="host9")
    text = report_of(tmp_path, 200)
    assert "rank 77 is stuck, ranks 0-76, 78-199 wait for it" in text
    assert len(text.splitlines()) < 10


def test_marks_are_counted_within_a_step_and_a_heartbeat_is_one_short_line(tmp_path: Path) -> None:
    heart = Heartbeat(tmp_path, 3)
    heart.set_phase("data", 5)
    heart.set_phase("forward", 5)
    with heart.barrier():
        assert heart.current.phase == "barrier"
    assert (heart.current.phase, heart.current.phase_number) == ("forward", 3)
    heart.write()
    content = (tmp_path / "rank-3.json").read_bytes()
    assert len(content) == FILE_BYTES
    beat = json.loads(content)
    assert (beat["rank"], beat["step"], beat["phase"]) == (3, 5, "forward")


def test_what_happened_once_does_not_make_a_phase_patient(tmp_path: Path) -> None:
    heart = Heartbeat(tmp_path, 0)
    chance = fresh_random()
    seconds = [chance.uniform(0.0, 1.0) for _ in range(20)]
    for number, took in enumerate([*seconds, 500.0]):
        heart.set_phase("data", number)
        heart.current = heart.current._replace(started=heart.current.started - took)
    heart.set_phase("forward", 30)
    assert heart.usual_seconds("data") == pytest.approx(max(seconds), abs=0.1)


def test_a_rank_that_compiles_is_not_stuck_for_a_while(tmp_path: Path) -> None:
    write(tmp_path, 0, 0, 4, "reduce", operation="all_reduce")
    write(tmp_path, 1, 0, 3, "compiling")
    peers = seen(tmp_path, 2)
    assert [peer.rank for peer in compiling_peers(peers, patience_seconds=30.0)] == [1]
    assert (
        compiling_line(peers[1:], 2)
        == "rank 1: still compiling after 28 s (a long first step is normal)"
    )
    assert not compiling_peers(peers, patience_seconds=20.0)
    text = report_of(tmp_path, 2)
    assert "rank 1 is stuck, rank 0 waits for it" in text
    assert re.search(r"rank 1 +\S+ +compiling +28 s +stuck", text)
    assert "most recent call last" not in text


def test_a_rank_that_is_gone_is_not_excused_by_one_that_compiles(tmp_path: Path) -> None:
    write(tmp_path, 0, 0, 3, "compiling")
    write(tmp_path, 1, 0, 3, "forward", process=2**22 + 1)
    assert not compiling_peers(seen(tmp_path, 2), patience_seconds=30.0)


def test_a_watchdog_whose_folder_is_another_runs_writes_nothing_there_in_a_stall_either(
    tmp_path: Path,
) -> None:
    asked = Counter[str]()

    def may_write() -> bool:
        asked[threading.current_thread().name] += 1
        return False

    dist_ctx = DistributedContext(RankInfo(), torch.device("cpu"), None)
    watch = watchdog.Watchdog(
        dist_ctx, tmp_path, tmp_path / "rank-0.log", stall_seconds=0.1, may_write=may_write
    )
    deadline = time.monotonic() + 60
    while asked["watch"] < 60 or not asked["host usage"]:  # in 0.3 s of one phase
        assert time.monotonic() < deadline, asked
        time.sleep(0.01)
    watch.stop("failed")
    assert list(tmp_path.iterdir()) == []


def reporting_backend(log: Path, words: str) -> Callable[..., Any]:
    """A compiler that takes until the log has these words."""

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Any:
        deadline = time.monotonic() + 60
        while not log.exists() or words not in log.read_text():
            assert time.monotonic() < deadline, f"{words} was not reported"
            time.sleep(0.01)
        return graph.forward

    return backend


@pytest.mark.parametrize("patience", [10.0, 1.0])
def test_a_long_compilation_is_reported_as_one_and_a_longer_one_as_a_stall_without_its_stack(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    patience: float,
) -> None:
    # Imports the compiler, which takes long on a busy machine.
    torch.compile(lambda x: x + 2, backend="eager")(torch.ones(3))
    torch.compiler.reset()
    monkeypatch.setattr(watchdog, "COMPILE_PATIENCE_FACTOR", patience)
    log, dist_ctx = (
        tmp_path / "rank-0.log",
        DistributedContext(RankInfo(), torch.device("cpu"), None),
    )
    watch = watchdog.Watchdog(dist_ctx, tmp_path, log, stall_seconds=1.5)
    try:
        watch.follow_compilation()
        watch.set_phase("forward", 0)
        words = "still compiling after" if patience > 1 else "STALL: "
        torch.compile(lambda x: x + 1, backend=reporting_backend(log, words))(torch.ones(3))
        assert watch.describe_progress() == "step 0, forward"
    finally:
        watch.stop("done")
        torch.compiler.reset()
    errors = capfd.readouterr().err
    assert "most recent call last" not in errors
    if patience > 1:
        assert "STALL" not in errors
    else:
        assert re.search(
            r"^lmforge: STALL: no progress for .* at step 0: in compiling$", errors, re.M
        )
        assert "in backend" in (tmp_path / "rank-0.stack.txt").read_text()
