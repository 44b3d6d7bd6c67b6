"""What signals and lost output do to a run: what the table in docs/signals.md says, with real
processes.
"""

import os
import pty
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.distributed.processes import STOP_SIGNALS, signal_name
from lmforge.core.distributed.rendezvous import free_port
from lmforge.core.records.runs import Run
from tests.conftest import ROOT
from tests.distributed.conftest import Recipe, losses
from tests.distributed.test_resume import PACED_RUN, Pace, reach, started
from tests.support.preloaded import Forked
from tests.support.text import write_documents

STEPS = 8
ROWS = re.findall(
    r"^\| (SIG[\w+]+(?:, SIG[\w+]+)*) \| .* \| (\w.*) \|$",
    (ROOT / "docs" / "signals.md").read_text(),
    re.M,
)
TABLE = {
    int(getattr(signal, name.partition("+")[0])) + int(name.partition("+")[2] or 0): does
    for names, does in ROWS
    for name in names.split(", ")
}


def options(recipe: Recipe, folder: Path, *more: str) -> list[str]:
    return [
        "pretrain",
        *recipe(folder, "run", "--train.steps", str(STEPS), "--log.every_steps", "1", *more),
    ]


def test_every_signal_that_stops_a_run_is_in_the_table() -> None:
    assert {number for number, does in TABLE.items() if does.startswith("saves")} == set(
        STOP_SIGNALS
    )


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            each, id=signal_name(each), marks=[] if each == signal.SIGHUP else pytest.mark.slow
        )
        for each in sorted(TABLE, key=lambda each: each != signal.SIGHUP)
    ],
)
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_signal_does_what_the_table_says(
    number: int, processes: int, recipe: Recipe, tmp_path: Path
) -> None:
    run, pace = Run(tmp_path / "run"), Pace(tmp_path, 3)
    does = TABLE[number]
    status = 128 + number if does.startswith(("saves", "ends")) else 0

    def send(process: Forked) -> None:
        reach(run, 2, process)
        process.send_signal(number)
        if does.startswith("halts"):
            if number != signal.SIGCONT:
                time.sleep(0.3)
                assert psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
            process.send_signal(signal.SIGCONT)
        time.sleep(0.5 if processes > 1 else 0.0)  # the launcher passes the signal on in a moment
        pace.allow(STEPS if status == 0 else STEPS - 1)

    ended = started(
        options(recipe, tmp_path, "--launch.processes", str(processes)), tmp_path, send, pace
    )
    assert ended.status in (status, -number), ended
    if number == signal.SIGKILL and processes > 1:
        while (
            "stopped by the loss of its launcher after step" not in run.log_path(1, 0).read_text()
        ):
            time.sleep(0.05)
    elif does.startswith("ends"):
        assert run.checkpoint_steps() == []
    else:
        assert (run.checkpoint_steps()[-1] == STEPS) == (status == 0)
    if does.startswith("saves"):
        assert f"stopped by {signal_name(number)} after step " in run.log_path(1, 0).read_text()


@pytest.mark.slow
def test_under_nohup_a_run_goes_on_when_the_terminal_is_closed(
    recipe: Recipe, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "lmforge", *options(recipe, tmp_path)]
    process = subprocess.Popen(
        ["nohup", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout
    process.stdout.readline()
    process.send_signal(signal.SIGHUP)
    process.communicate()
    assert process.returncode == 0
    assert Run(tmp_path / "run").checkpoint_steps()[-1] == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("lost", ["a reader that leaves", "a full disk", "closed"])
def test_output_that_cannot_be_written_is_dropped_and_the_run_goes_on(
    lost: str, processes: int, recipe: Recipe, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run")
    command = [
        sys.executable,
        "-m",
        "lmforge",
        *options(recipe, tmp_path, "--launch.processes", str(processes)),
    ]
    if lost == "a full disk":
        with open("/dev/full", "wb") as full:
            assert subprocess.run(command, stdout=full, stderr=full).returncode == 0
    elif lost == "closed":
        shell = ["bash", "-c", 'exec "$@" >&- 2>&-', "-"]
        assert subprocess.run([*shell, *command]).returncode == 0
    else:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert process.stdout
        process.stdout.readline()
        process.stdout.close()
        assert process.wait() == 0
    assert max(losses(run)) == STEPS
    log = run.log_path(1, 0).read_text()
    reason = {"a full disk": "No space left on device", "closed": "closed"}.get(lost, "Broken pipe")
    assert (
        log.count(
            f"standard output: {reason}; from now on it is written to this log only; the run goes"
            " on\n"
        )
        == 1
    )
    assert f"step {STEPS}/{STEPS}" in log


@pytest.mark.slow
def test_closed_output_is_said_in_the_log_of_its_rank_and_all_train(
    recipe: Recipe, tmp_path: Path
) -> None:
    """One rank as a launcher would start it, whose standard output is closed, beside another whose
    standard error is.
    """
    run, port = Run(tmp_path / "run"), free_port()
    closed = {0: (">&-", "standard output"), 1: ("2>&-", "standard error")}
    ranks = []
    for rank, (redirection, _) in closed.items():
        words = [sys.executable, "-m", "lmforge", *options(recipe, tmp_path)]
        place = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": 2,
            "LOCAL_WORLD_SIZE": 2,
            "MASTER_PORT": port,
        }
        environment = {
            **os.environ,
            "MASTER_ADDR": "localhost",
            **{name: str(value) for name, value in place.items()},
        }
        ranks.append(
            subprocess.Popen(
                ["bash", "-c", f'exec "$@" {redirection}', "-", *words], env=environment
            )
        )
    try:
        assert [process.wait(timeout=60) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    for rank, (_, what) in closed.items():
        assert (
            f"{what}: closed; from now on it is written to this log only; the run goes on\n"
            in run.log_path(1, rank).read_text()
        )
    assert max(losses(run)) == STEPS


PREPARES = (
    "import sys; from lmforge import cli; from lmforge.text.verbs import prepare;"
    " prepare.PRINT_EVERY_SECONDS = 0; cli.main()"
)


@pytest.mark.parametrize(
    "redirection", ["", ">&- 2>&-", "> /dev/full 2>&1"], ids=["no reader", "closed", "full"]
)
def test_a_preparation_is_finished_where_nothing_reads_what_it_prints(
    redirection: str, tmp_path: Path
) -> None:
    write_documents(tmp_path / "text")
    reader, writer = os.pipe()
    os.close(reader)
    words = [
        sys.executable,
        "-c",
        PREPARES,
        "prepare",
        tmp_path / "text",
        "--out",
        tmp_path / "tokens",
        "--vocab_size",
        "512",
    ]
    done = subprocess.run(
        ["bash", "-c", f'exec "$@" {redirection}', "-", *words], stdout=writer, stderr=writer
    )
    os.close(writer)
    assert done.returncode == 0
    assert TokenFolder.open(tmp_path / "tokens").manifest.splits["train"]


def test_a_run_whose_terminal_is_closed_saves_and_ends(recipe: Recipe, tmp_path: Path) -> None:
    run, pace = Run(tmp_path / "run"), Pace(tmp_path, 3)
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": "xterm", "TTY_COMPATIBLE": "1", **pace.variables}
        os.execv(sys.executable, [sys.executable, str(PACED_RUN), *options(recipe, tmp_path)])
    while not (records := run.read_metrics()) or records[-1]["step"] < 2:
        with suppress(OSError):
            os.read(terminal, 65536)
    os.close(terminal)
    time.sleep(0.2)
    pace.allow(STEPS - 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGHUP
    assert "stopped by SIGHUP after step" in run.log_path(1, 0).read_text()
    assert run.checkpoint_steps()[-1] < STEPS
