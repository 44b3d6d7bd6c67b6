"""The panel of a training: what it shows, what is printed above it, and that the terminal is left
as it was.
"""

import faulthandler
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.cells import cell_len

from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.rank_info import RankInfo
from lmforge.ops.monitor.console import MAX_TEXT_LINES, ConsoleLogger, ProgressPanel
from lmforge.ops.monitor.rank_log import RankLog, write_to_terminal
from lmforge.ops.terminal.cells import sparkline
from tests.support.terminal import Terminal, terminal, wait_for_screen  # noqa: F401 - a fixture

ALONE = DistributedContext(RankInfo(), torch.device("cpu"), None)
RECORD: dict[str, Any] = {
    "step": 30,
    "loss": 2.34567,
    "lr": 3e-4,
    "grad_norm": 0.5,
    "step_seconds": 1.0,
    "tokens_per_second": 12345.6,
    "mfu": 0.518,
    "memory_gib": 1.25,
    "seconds_left": 185.0,
}


def panel_lines(panel: ProgressPanel, columns: int) -> list[str]:
    return [line.plain for line in panel.draw(columns, 20)]


def test_the_panel_shows_what_was_logged_last() -> None:
    panel = ProgressPanel(0, 60)
    assert panel_lines(panel, 79) == [f"step 0 of 60  {'─' * 29}  0%"]
    panel.add_record({"step": 10, "val/loss": 2.5, "val/bits_per_byte": 1.75})
    for loss in (4.0, 3.0, 2.0):
        panel.add_record({**RECORD, "loss": loss})
    panel.add_sample(20, "'a\x1b[2J'")
    panel.step = 31
    first, *others = panel_lines(panel, 79)
    assert re.fullmatch(r"step 31 of 60  ━{14}─{15}  52%  3m0[45]s left", first)
    assert others == [
        "loss 2.0000  █▅▁",
        "lr 3.00e-04  grad 0.50  12,346 tok/s  MFU 52%  1.2 GiB",
        "validation at step 10: val 2.5000 (1.750 bits/byte)",
        "sample at step 20: 'a·[2J'",
    ]


def test_the_curve_is_of_the_reward_where_there_is_one_and_a_loss_that_is_not_finite_is_said() -> (
    None
):
    panel = ProgressPanel(0, 60)
    for reward in (0.0, 1.0):
        panel.add_record({**RECORD, "reward": reward})
    assert "reward 1.00  ▁█" in panel_lines(panel, 79)
    assert any("loss 2.3457" in line for line in panel_lines(panel, 79))
    panel = ProgressPanel(0, 60)
    for loss in (3.0, 2.0, None):
        panel.add_record({**RECORD, "loss": loss})
    assert "loss not finite  █▁×" in panel_lines(panel, 79)


@pytest.mark.parametrize("columns", [1, 7, 50])
def test_a_long_curve_is_made_of_means_and_fits(columns: int) -> None:
    curve = sparkline([float(value) for value in range(400)], columns)
    assert len(curve) == columns
    assert list(curve) == sorted(curve)
    assert sparkline([1.0] * 3, 10) == "▁▁▁"
    assert sparkline([], 10) == ""


def shown_on_a_terminal(write: Callable[[], None], kind: str = "xterm", status: int = 0) -> str:
    """What a terminal receives while `write` runs in a forked process whose output it is, and which
    ends with `status`.
    """
    process, ours = pty.fork()
    if process == 0:
        try:
            sys.stdout, sys.stderr = (
                os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2)
            )
            faulthandler.disable()  # of pytest
            os.environ["TERM"] = kind
            for variable in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE"):
                os.environ.pop(variable, None)
            stdout = sys.stdout
            write()
            assert sys.stdout is stdout
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    received = b""
    with suppress(OSError):  # the other end is closed
        while some := os.read(ours, 65_536):
            received += some
    os.close(ours)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == status, received.decode()
    return received.decode()


def on_screen(received: str) -> list[str]:
    """The lines that a terminal shows in the end: it moves up, returns, erases a line and writes
    over it.
    """
    lines, row, column = [""], 0, 0
    for escape, text in re.findall(r"\x1b\[([\d;?]*[A-Za-z])|([^\x1b])", received):
        if escape.endswith("A"):
            row = max(0, row - int(escape[:-1] or 1))
        elif escape == "2K":
            lines[row] = ""
        elif text == "\r":
            column = 0
        elif text == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif text:
            lines[row] = lines[row].ljust(column)[:column] + text + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines if line.strip()]


def test_everything_that_is_printed_is_above_the_panel_and_in_the_end_the_panel_is_gone(
    tmp_path: Path,
) -> None:
    def write() -> None:
        log = RankLog(tmp_path / "rank-0.log", RankInfo(), 1)
        console = ConsoleLogger(ALONE, 60, log.path)
        console.start_progress(0)
        console.log_metrics(RECORD)
        console.info("[bold]not markup[/bold] é")
        print("from a", end=" ")
        print("library")
        print("a warning", file=sys.stderr)
        write_to_terminal("lmforge: STALL: no progress\n  rank 0\n")
        console.log_sample(20, "text")
        console.update_progress(30)
        assert console._area is not None
        console._area.refresh()
        print("unfinished", end="", file=sys.stderr)
        console.stop_progress()
        console.info("trained 60 steps")
        console.close()
        log.close()

    received = shown_on_a_terminal(write)
    assert "step 30 of 60" in received
    assert "sample at step 20: " in received
    before, _, after = received.partition("step 0 of 60")
    assert before.endswith("\x1b[?25l\x1b[?25h"), "the cursor is hidden, and would be after a crash"
    assert "\x1b[?25l" not in after
    assert on_screen(received) == [
        "[bold]not markup[/bold] é",
        "from a library",
        "a warning",
        "lmforge: STALL: no progress",
        "  rank 0",
        "unfinished",
        (
            "step 30/60  loss 2.3457  lr 3.00e-04  grad 0.50  12,346 tok/s  MFU 52%  1.2 GiB  3m05s"
            " left"
        ),
        "trained 60 steps",
    ]
    logged = [
        line.split(" ", 1)[1] for line in (tmp_path / "rank-0.log").read_text().splitlines()[1:]
    ]
    assert [
        line
        for line in logged
        if line.startswith(("step 30/60", "[bold]", "a warning", "  sample"))
    ] == [
        (
            "step 30/60  loss 2.3457  lr 3.00e-04  grad 0.50  12,346 tok/s  MFU 52%  1.2 GiB  3m05s"
            " left"
        ),
        "[bold]not markup[/bold] é",
        "a warning",
        "  sample: 'text'",
    ]


def test_what_is_written_past_python_is_above_the_panel_too_and_in_the_log(tmp_path: Path) -> None:
    def write() -> None:
        log = RankLog(tmp_path / "rank-0.log", RankInfo(), 1)
        console = ConsoleLogger(ALONE, 60, log.path)
        os.write(1, b"before\n")
        console.start_progress(0)
        console.log_metrics(RECORD)
        os.write(2, b"from \x1b[31mC\x1b[0m\n")
        subprocess.run(["echo", "from a child"])
        console._area.refresh()  # type: ignore[union-attr]
        print("from Python")
        print("a warning", file=sys.stderr)
        os.write(2, b"never ended")
        console.stop_progress()
        console.close()
        log.close()
        os.write(1, b"after\n")
        print("after that", file=sys.stderr, flush=True)

    received = shown_on_a_terminal(write)
    assert "step 0 of 60" in received
    shown = on_screen(received)
    last_step = shown.pop(-3)
    assert shown == [
        "before",
        "from C",
        "from a child",
        "from Python",
        "a warning",
        "never ended",
        "after",
        "after that",
    ]
    assert last_step.startswith("step 30/60  loss 2.3457")
    logged = (tmp_path / "rank-0.log").read_text()
    assert logged.count("from a child\n") == 1
    assert logged.count("a warning") == 1
    assert "from Python" not in logged


def test_the_last_words_of_a_process_that_aborts_are_in_its_log(tmp_path: Path) -> None:
    def write() -> None:
        log = RankLog(tmp_path / "rank-0.log", RankInfo(), 1)
        ConsoleLogger(ALONE, 60, log.path).start_progress(0)
        os.write(2, b"terminate called after throwing an instance of 'c10::Error'\n")
        os.abort()

    shown_on_a_terminal(write, status=-signal.SIGABRT)
    assert "\nterminate called after throwing" in (tmp_path / "rank-0.log").read_text()


def test_a_dumb_terminal_gets_a_line_per_log_step() -> None:
    def write() -> None:
        console = ConsoleLogger(ALONE, 60, None)
        console.start_progress(0)
        console.log_metrics(RECORD)
        console.log_sample(30, "text")
        console.close()

    received = shown_on_a_terminal(write, "dumb")
    assert "\x1b" not in received
    assert received.splitlines()[0].startswith("step 30/60  loss 2.3457  lr")
    assert received.splitlines()[1:] == ["  sample: 'text'"]


def start_training(terminal: Terminal, tiny_options: list[str], folder: Path) -> None:  # noqa: F811 - its fixture
    words = [
        sys.executable,
        "-m",
        "lmforge",
        "pretrain",
        *tiny_options,
        "--run.folder",
        str(folder),
        "--run.name",
        "a",
    ]
    words += [
        "--train.steps",
        "100000",
        "--schedule.name",
        "constant",
        "--checkpoint.every_steps",
        "50000",
    ]
    words += [
        "--sample.every_steps",
        "20",
        "--sample.max_tokens",
        "4",
        "--sample.prompts",
        "def " + "x" * 120,
    ]
    words[words.index("--data.sequence_length") + 1] = "256"
    command = f"env TERM=screen {shlex.join(words)}; echo status $?; exec cat"
    assert terminal("new-session", "-d", "-x", 160, "-y", 24, command).returncode == 0


def is_whole(page: list[str]) -> None:
    """The panel is there once, below the lines that were printed before, and no line is wider than
    79 columns.
    """
    results = [at for at, line in enumerate(page) if line.startswith("step ")]
    assert len(results) == 1, "\n".join(page)
    panel, before = page[results[0] :], page[results[0] - 1]
    assert max(map(cell_len, panel)) <= 79
    starts = ["step ", "loss ", "lr ", "validation at step ", "sample at step ", "x"]
    assert [line.startswith(start) for line, start in zip(panel, starts, strict=False)] == [
        True
    ] * 6
    # What was sampled may take a third line.
    assert not panel[6] or panel[6].endswith("'")
    assert not any(panel[4 + MAX_TEXT_LINES :])
    assert before.startswith(("MFU", "predicted")) or before.endswith("on this machine)")


@pytest.mark.slow
@pytest.mark.needs("tmux")
def test_the_panel_survives_other_widths_and_ctrl_c(
    tiny_options: list[str],
    tmp_path: Path,
    terminal: Terminal,  # noqa: F811 - its fixture
) -> None:
    start_training(terminal, tiny_options, tmp_path)
    for columns in (160, 80, 160):
        assert terminal("resize-window", "-x", columns, "-y", 24).returncode == 0
        terminal("clear-history")
        before = wait_for_screen(
            terminal, r"(?m)^step [\d,]+ of 100,000 .*\n(.*\n)+sample at step "
        )
        number = next(line.split()[1] for line in before if line.startswith("step "))
        is_whole(
            wait_for_screen(
                terminal, rf"(?m)^step (?!{number} )[\d,]+ of 100,000 .*\n(.*\n)+sample at step "
            )
        )
    terminal("send-keys", "C-c")
    page = wait_for_screen(terminal, "(?m)^status")
    assert "status 130" in page
    assert sum(line.startswith("step ") for line in page) == 1
    assert not any("━" in line or "sample at" in line for line in page)
    terminal("send-keys", "hello", "Enter")
    assert wait_for_screen(terminal, "(?m)^hello\nhello$")


WIDE = """
import time
from rich.console import Console
from rich.text import Text
from lmforge.ops.terminal.live_area import LiveArea
print("before")
area = LiveArea(Console(), lambda columns, lines: [Text(f"{at} " + "y" * 70) for at in range(3)])
area.start()
time.sleep(600)
"""


@pytest.mark.needs("tmux")
def test_a_terminal_that_becomes_narrower_than_the_lines_shows_them_cut_below_what_is_left_of_the_old_ones(
    tmp_path: Path,
    terminal: Terminal,  # noqa: F811 - its fixture
) -> None:
    (tmp_path / "wide.py").write_text(WIDE)
    command = f"env TERM=screen {sys.executable} {tmp_path / 'wide.py'}"
    assert terminal("new-session", "-d", "-x", 80, "-y", 24, command).returncode == 0
    assert wait_for_screen(terminal, "(?m)^2 y{70}$")[:4] == [
        "before",
        *(f"{at} {'y' * 70}" for at in range(3)),
    ]
    assert terminal("resize-window", "-x", 50, "-y", 24).returncode == 0
    page = wait_for_screen(terminal, "(?m)^2 y{46}…$")
    at = page.index(f"0 {'y' * 46}…")
    assert at < 4
    assert page[at : at + 4] == [*(f"{at} {'y' * 46}…" for at in range(3)), ""]


@pytest.mark.slow
@pytest.mark.needs("tmux")
def test_after_a_run_was_killed_the_terminal_is_sane(
    tiny_options: list[str],
    tmp_path: Path,
    terminal: Terminal,  # noqa: F811 - its fixture
) -> None:
    start_training(terminal, tiny_options, tmp_path)
    wait_for_screen(terminal, r"(?m)^step [\d,]+ of 100,000 .*\n(.*\n)+sample at step ")
    beat = (tmp_path / "a" / "health" / "rank-0.json").read_text()
    result = re.search(r'"process": ?(\d+)', beat)
    assert result
    os.kill(int(result[1]), signal.SIGKILL)
    # A line of its own, below the panel.
    assert "status 137" in wait_for_screen(terminal, "(?m)^status")
    terminal("send-keys", "hello", "Enter")
    assert wait_for_screen(terminal, "(?m)^hello\nhello$")
    assert terminal("display-message", "-p", "#{cursor_flag}").stdout.strip() == "1"
