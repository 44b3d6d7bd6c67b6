"""`lmforge runs`: one line per run, from the run's files."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from lmforge.cli import run as command
from lmforge.core.records.run_records import METRICS_TAIL_BYTES
from lmforge.core.records.runs import Run
from lmforge.ops.monitor.run_status import RunStatus, read_run_status
from lmforge.ops.report.run_data import read_run
from lmforge.ops.verbs.running import list_runs
from lmforge.ops.verbs.running.list_runs import read_runs
from tests.ops.report.conftest import add_event, copied


@pytest.fixture
def folder(first: Run, second: Run, tmp_path: Path) -> Path:
    """A run that has ended, one that runs, and folders that are none."""
    copied(first, tmp_path)
    running = copied(second, tmp_path)
    path = running.health_folder / "rank-0.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"phase": "forward", "written": time.time()})
    )
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    return tmp_path


def test_runs_that_run_come_first_and_each_has_its_last_values(folder: Path, first: Run) -> None:
    os.utime(folder / "first" / "metrics.jsonl", (4e9, 4e9))
    rows = read_runs(folder)
    assert [(row.name, row.state) for row in rows] == [("second", "running"), ("first", "done")]
    assert {(row.step, row.steps) for row in rows} == {(6, 6)}
    last = first.read_metrics()[-1]
    assert (rows[1].loss, rows[1].validation) == (last["loss"], last["val/loss"])
    assert rows[1].seconds_left is None


def test_a_run_that_is_removed_while_runs_are_listed_is_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove_and_read(run: Run) -> RunStatus:
        if run.path.name == "second":
            shutil.rmtree(run.path)
        return read_run_status(run)

    monkeypatch.setattr(list_runs, "read_run_status", remove_and_read)
    assert [row.name for row in read_runs(folder)] == ["first"]


@pytest.mark.parametrize(
    ("beats", "state"),
    [
        # The clock of its host is behind.
        ([{"phase": "forward", "written": time.time() - 300}], "running"),
        ([{"phase": "interrupted"}, {"phase": "failed"}], "failed"),
        ([{"phase": "forward", "world_size": 2}], "degraded"),  # rank 1 has never joined
        ([{"phase": "reduce", "noticed": True}, {"phase": "data", "noticed": True}], "stalled"),
        ([], "not started"),  # it is being started again
    ],
)
def test_the_state_of_a_run_is_that_of_its_ranks_wherever_it_is_shown(
    first: Run, tmp_path: Path, beats: list[dict[str, object]], state: str
) -> None:
    run = copied(first, tmp_path)
    add_event(run, kind="end", step=None, state="failed")
    add_event(run, kind="start", step=6, ranks=1, hosts=1, device="cpu")
    known = json.loads((run.health_folder / "rank-0.json").read_text()) | {"host": "elsewhere"}
    (run.health_folder / "rank-0.json").unlink()
    for rank, beat in enumerate(beats):
        (run.health_folder / f"rank-{rank}.json").write_text(
            json.dumps(known | {"rank": rank} | beat)
        )
    assert (read_run_status(run).state, read_run(run)["state"], read_runs(tmp_path)[0].state) == (
        state,
        state,
        state,
    )


def test_the_end_of_long_metrics_is_read(folder: Path) -> None:
    path = folder / "first" / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": step + 0.5}) for step in range(100_000)]
    path.write_text("\n".join([*lines, '{"step": 100000, "lo']))
    assert path.stat().st_size > 10 * METRICS_TAIL_BYTES
    row = next(row for row in read_runs(folder) if row.name == "first")
    assert (row.step, row.loss) == (99_999, 99_999.5)
    path.write_text(
        "\n".join(lines)
        + "\n"
        + " " * METRICS_TAIL_BYTES
        + json.dumps({"step": 100_000, "loss": 7.5})
        + "\n"
    )
    row = next(row for row in read_runs(folder) if row.name == "first")
    assert row.loss is None, "what is before the last METRICS_TAIL_BYTES is not read"


def test_the_table_and_its_json_name_every_run(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(["runs", str(folder)]) == 0
    table = capfd.readouterr().out.splitlines()
    results = [line.split()[:4] for line in table[1:]]
    assert results == [
        ["second", "pretrain", "running", "6/6"],
        ["first", "pretrain", "done", "6/6"],
    ]
    assert command(["runs", str(folder), "--output", "json"]) == 0
    assert [json.loads(line)["name"] for line in capfd.readouterr().out.splitlines()] == [
        "second",
        "first",
    ]


def test_a_damaged_recipe_is_named_and_the_other_runs_are_shown(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "first" / "recipe.toml").write_text("nonsense = 1")
    assert command(["runs", str(folder)]) == 0
    out = capfd.readouterr().out
    assert "second" in out
    assert "nonsense" in out


def test_a_folder_without_runs_or_that_is_not_there_is_one_line(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in (folder / "empty", folder / "nowhere", folder / "file"):
        assert command(["runs", str(path)]) == 2
        err = capfd.readouterr().err
        assert err.count("\n") == 1
        assert str(path) in err
    shutil.rmtree(folder / "second")
    assert command(["runs", str(folder), "--watch", "--output", "json"]) == 2
