"""Logs are read in pieces, from the end or as they grow, with any bytes in them."""

import os
import random
import time
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from lmforge.cli import run as command
from lmforge.core.distributed.rank_info import RankInfo
from lmforge.core.records.runs import Run
from lmforge.ops.monitor.failures import find_failures
from lmforge.ops.monitor.log_files import (
    CHUNK_BYTES,
    MAX_LINE_BYTES,
    LogFile,
    merged,
    printable,
    tail,
)
from lmforge.ops.monitor.rank_log import RankLog, StampedFile, stamp_lines
from tests.conftest import only_line
from tests.seeds import fresh_random

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)


def stamped(seconds: float, text: bytes, hours_east: int = 0) -> bytes:
    """A line as a rank writes it, `seconds` after noon, in a time zone."""
    when = (NOON + timedelta(seconds=seconds)).astimezone(timezone(timedelta(hours=hours_east)))
    return when.isoformat(timespec="milliseconds").encode() + b" " + text + b"\n"


def texts(file: LogFile) -> list[str]:
    return [line.text for line in file.lines()]


def test_the_lines_of_hosts_in_different_time_zones_are_merged_by_time(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_bytes(stamped(1, b"a") + stamped(3, b"c") + stamped(5, b"e"))
    (tmp_path / "rank-1.log").write_bytes(stamped(2, b"b", 8) + b"from C\n" + stamped(4, b"d", 8))
    lines = list(merged([LogFile(tmp_path / f"rank-{rank}.log", rank) for rank in (0, 1)]))
    assert [line.text for line in lines] == ["a", "b", "from C", "c", "d", "e"]
    assert [line.rank for line in lines] == [0, 1, 1, 0, 1, 0]


def test_what_follows_the_last_time_was_written_when_the_file_was_last_changed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rank-0.log"
    path.write_bytes(stamped(0, b"step 1") + b"terminate called\n")
    os.utime(path, (NOON.timestamp() + 60,) * 2)
    assert [line.time - NOON.timestamp() for line in LogFile(path, 0).lines()] == [0, 60]


@pytest.mark.parametrize("num_lines", [1, 7, 500, 100_000])
def test_the_tail_does_not_depend_on_where_pieces_are_cut(tmp_path: Path, num_lines: int) -> None:
    chance, path = fresh_random(), tmp_path / "rank-0.log"
    lines = [
        stamped(at, bytes(chance.choices(b"abc ", k=chance.choice((0, 5, 80, 9000)))))
        for at in range(900)
    ]
    path.write_bytes(b"".join(lines))
    assert path.stat().st_size > 3 * CHUNK_BYTES
    whole = texts(LogFile(path, 0))
    assert len(whole) == 900
    assert [line.text for line in tail([LogFile(path, 0)], num_lines)] == whole[-num_lines:]


def test_the_tail_of_a_file_of_fifty_gigabytes_is_read_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.touch()
    os.truncate(path, 50 * 2**30)  # takes no room on the disk
    with path.open("ab") as file:
        file.write(b"\n" + stamped(1, b"last but one") + stamped(2, b"last"))
    began = time.process_time()
    assert [line.text for line in tail([LogFile(path, 0)], 2)] == ["last but one", "last"]
    assert time.process_time() - began < 5  # all of it would be minutes


def test_half_a_line_is_left_until_its_end_is_written_unless_nothing_follows(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rank-0.log"
    path.write_bytes(stamped(0, b"one") + stamped(1, b"two")[:-3])
    file = LogFile(path, 0)
    assert [line.text for line in file.read(to_the_end=False) or []] == ["one"]
    assert not file.read(to_the_end=False)
    with path.open("ab") as appended:
        appended.write(b"wo\n" + stamped(2, b"three")[:-1])
    assert [line.text for line in file.read(to_the_end=False) or []] == ["two"]
    assert [line.text for line in file.read() or []] == ["three"]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"\xff\xfe caf\xc3\xa9", "\ufffd\ufffd café"),
        (b"\x1b[31mred\x1b[0m \x1b]0;title\x07and\x1b[2J clear", "red and clear"),
        (b" 10%|#  |\r 20%|## |\r 30%|###|", " 30%|###|"),
        (b"bell\x07 and \xe2\x80\xae bidi", "bell· and · bidi"),
        (b"tab\tstop\r", "tab stop"),
        (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),
    ],
)
def test_no_bytes_of_a_log_drive_the_terminal(line: bytes, text: str) -> None:
    assert printable(line) == text
    assert printable(line).isprintable()


def test_random_bytes_and_lines_without_end_are_read_to_the_end(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.write_bytes(
        random.Random(0).randbytes(300_000) + b"x" * 300_000 + b"\n" + stamped(1, b"end")
    )
    result = texts(LogFile(path, 0))
    assert result[-1] == "end"
    assert all(line.isprintable() and len(line) <= MAX_LINE_BYTES for line in result)


def test_a_file_that_was_replaced_by_a_shorter_one_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.write_bytes(stamped(0, b"of the first attempt"))
    file = LogFile(path, 0)
    assert texts(file) == ["of the first attempt"]
    path.write_bytes(stamped(1, b"new"))
    assert texts(file) == ["new"]


def test_every_line_has_its_time_however_it_is_printed(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    with StampedFile(path) as file:
        print("one", "line", file=file)
        print("a", end="", file=file)
        print("b\nc", file=file)
        print("\udcff", file=file)
    assert texts(LogFile(path, 0)) == ["one line", "ab", "c", "\\udcff"]
    assert all(line.time > NOON.timestamp() - 1e9 for line in LogFile(path, 0).lines())
    assert stamp_lines("a\nb").count("\n") == 2


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with the folder of an attempt, and no logs."""
    (tmp_path / "logs" / "attempt-1").mkdir(parents=True)
    return Run(tmp_path)


TIMED_OUT = (
    b"PEER FAILED at step 3, reduce: RuntimeError: Timed out waiting 1800000ms for recv operation"
    b" to complete"
)


def test_two_hundred_time_outs_do_not_hide_the_rank_that_failed_even_where_its_clock_is_ahead(
    run: Run,
) -> None:
    for rank in range(200):
        failure = b"FAILED at step 3, data: ValueError: bad" if rank == 137 else TIMED_OUT
        run.log_path(1, rank).write_bytes(stamped(60 if rank == 137 else rank / 1000, failure))
    failures = find_failures(run, 1)
    assert len(failures) == 200
    assert (failures[0].rank, failures[0].headline) == (137, "step 3, data: ValueError: bad")
    assert [failure.rank for failure in failures[1:4]] == [0, 1, 2]


def test_a_rank_that_nccl_ends_because_another_did_not_come_is_not_the_cause(run: Run) -> None:
    waited = (
        b"[rank0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)\nterminate"
        b" called after throwing\n"
    )
    run.log_path(1, 0).write_bytes(
        stamped(0, b"step 3") + waited + b"Fatal Python error: Aborted\n"
    )
    run.log_path(1, 1).write_bytes(
        stamped(5, b"step 3") + b"Fatal Python error: Segmentation fault\n"
    )
    failures = find_failures(run, 1)
    assert [(failure.rank, failure.kind) for failure in failures] == [
        (1, "failed"),
        (0, "lost another rank"),
    ]


def test_a_reported_stall_is_printed_where_no_rank_failed(run: Run) -> None:
    stall = stamp_lines(
        "STALL: no progress for 28 s at step 3: rank 1 is stuck, rank 0 waits for it\n  rank 1 vm"
        " data"
    )
    run.log_path(1, 0).write_text(stall + stamp_lines("no rank has made progress for 1800 s"))
    [failure] = find_failures(run, 1)
    assert failure.kind == "stalled"
    assert failure.lines[1:] == ["  rank 1 vm data"]


def test_rank_0_continues_printing_to_the_terminal_and_its_standard_error_is_in_its_log_too(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    log = RankLog(run.log_path(1, 0), RankInfo(), 1)
    print("a warning", file=sys.stderr)
    log.close()
    print("not in the log", file=sys.stderr)
    assert capsys.readouterr().err == "a warning\nnot in the log\n"
    assert texts(LogFile(run.log_path(1, 0), 0))[1:] == ["a warning"]


def test_a_folder_in_the_place_of_a_log_is_named(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    log = run.log_path(1, 0)
    log.mkdir()
    run.recipe_path.write_text('[run]\nstage = "pretrain"\n')
    for words in ([], ["--errors"], ["--lines", "3"]):
        assert command(["logs", str(run.path), *words]) == 2
        assert only_line(capfd.readouterr().err).startswith(f"{log}: Is a directory")
