"""Real trackers: the records are read with each tracker's own reader, in local or offline mode."""

import json
import os
import socket
import sqlite3
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from lmforge.cli import run as command
from lmforge.core.records.runs import Run
from lmforge.ops.trackers import run_trackers
from tests.support.tools import need

PROMPT = "def "
VARIABLES = (
    "MLFLOW_TRACKING_URI",
    "TRACKIO_SPACE_ID",
    "TRACKIO_SERVER_URL",
    "WANDB_PROJECT",
    "WANDB_RUN_ID",
)


def have(*packages: str) -> None:
    for package in packages:
        need(package)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of runs, where trackers keep what they have; no variable of the user's leads
    elsewhere.
    """
    folder = tmp_path_factory.mktemp("tracked")
    with pytest.MonkeyPatch.context() as patch:
        for name in VARIABLES:
            patch.delenv(name, raising=False)
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        patch.chdir(folder)
        # A busy machine imports mlflow slowly.
        patch.setattr(run_trackers, "FINISH_SECONDS", 240.0)
        yield folder


@pytest.fixture(scope="module")
def tracked(tiny_options: list[str], place: Path) -> Run:
    """A run of 4 steps with all trackers, that was continued to 6."""
    have("wandb", "trackio", "mlflow")
    where = [
        *tiny_options,
        "--run.folder",
        str(place),
        "--run.name",
        "tracked",
        "--log.project",
        "ours",
    ]
    where += ["--sample.every_steps", "2", "--sample.max_tokens", "4", "--sample.prompts", PROMPT]
    where += ["--schedule.name", "constant"]
    where += ["--log.trackers", "tensorboard", "wandb", "trackio", "mlflow"]
    assert command(["pretrain", *where, "--train.steps", "4"]) == 0
    assert command(["pretrain", *where, *announcing_completions(place), "--train.steps", "6"]) == 0
    return Run.open(place / "tracked")


COMPLETION = {
    "prompt": [{"role": "user", "content": "2 + 2?"}],
    "completion": "4|\n",
    "reward": 1.0,
    "tokens": 3,
    "ended": True,
}
ROWS = [[4, "user: 2 + 2?", "4|\n", 1.0, 3, True], [4, "user: 2 + 2?", "5", None, 3, True]]
COLUMNS = ["step", "prompt", "text", "reward", "tokens", "ended"]


def announcing_completions(folder: Path, name: str = "announcing") -> list[str]:
    """Options of a callback that writes a table as alignment does, and announces it."""
    lines = [COMPLETION, COMPLETION | {"completion": "5", "reward": None}]
    table = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "announcing.py").write_text(
        "import lmforge\n"
        f'@lmforge.register("callback", "{name}")\n'
        "class Announcing:\n"
        "    def __init__(self, options): ...\n"
        "    def on_run_start(self, run, step, model):\n"
        '        folder = run.run.path / "completions"\n'
        "        folder.mkdir()\n"
        f'        (folder / "set-000000-rank-0.jsonl").write_text({table!r})\n'
        '        run.events.add("completions", step, table="set-000000")\n'
    )
    return ["--plugins", str(folder / "announcing.py"), "--train.callbacks", name]


def expected(run: Run) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of each metric of metrics.jsonl."""
    points: dict[str, list[tuple[int, float]]] = {}
    for record in run.read_metrics():
        for name, value in record.items():
            if name != "step" and value is not None:
                points.setdefault(name, []).append((record["step"], value))
    return points


def texts(run: Run) -> list[str]:
    events = [json.loads(line) for line in run.events_path.read_text().splitlines()]
    return [event["text"] for event in events if event["kind"] == "sample"]


def test_tensorboard_has_the_metrics_of_both_attempts(tracked: Run) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(
        str(tracked.path / "tensorboard"), {"tensors": 0, "scalars": 0}
    ).Reload()
    tracked_points = expected(tracked)
    assert set(events.Tags()["scalars"]) == set(tracked_points)
    for name, points in tracked_points.items():
        assert [
            (event.step, pytest.approx(event.value, rel=1e-6)) for event in events.Scalars(name)
        ] == points
    samples = [
        make_ndarray(event.tensor_proto).item().decode() for event in events.Tensors("samples")
    ]
    assert len(samples) == 3
    assert all(PROMPT in table for table in samples)
    [config] = events.Tensors("config")
    assert "| train.steps | 4 |" in make_ndarray(config.tensor_proto).item().decode()
    [completions] = events.Tensors("completions")
    assert (
        "| 4 | user: 2 + 2? | 4\\|<br> | 1.0 | 3 | true |"
        in make_ndarray(completions.tensor_proto).item().decode()
    )
    reports = {
        make_ndarray(event.tensor_proto).item().decode() for event in events.Tensors("report")
    }
    assert reports == {f"`{tracked.path / 'report.html'}`"}


def test_mlflow_has_one_run_with_metrics_options_samples_and_the_report(
    tracked: Run, place: Path
) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{place / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("ours")
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("tracked", "FINISHED")
    assert run.data.params["train.steps"] == "4"  # mlflow keeps the first value
    for name, points in expected(tracked).items():
        assert [
            (each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)
        ] == points
    folder = Path(client.download_artifacts(run.info.run_id, "", str(place)))
    tables = [json.loads(path.read_text()) for path in sorted((folder / "samples").iterdir())]
    assert [row for table in tables for row in table["data"]] == [
        [step, PROMPT, text] for step, text in zip((2, 4, 6), texts(tracked), strict=True)
    ]
    assert (folder / "report.html").read_bytes() == (tracked.path / "report.html").read_bytes()
    assert json.loads((folder / "completions" / "step-00000004.json").read_text()) == {
        "columns": COLUMNS,
        "data": ROWS,
    }


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: those of a LevelDB log, in blocks of 32 KiB, after a header of
    7 bytes.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def test_wandb_has_one_run_with_the_metrics_of_both_attempts(tracked: Run) -> None:
    files = sorted(tracked.path.glob("trackers/wandb/offline-run-*/*.wandb"))
    records = [record for file in files for record in wandb_records(file)]
    assert len(files) == 2
    runs = [record.run for record in records if record.HasField("run")]
    run_id = json.loads((tracked.path / "trackers" / "wandb.json").read_text())["run_id"]
    assert {(run.run_id, run.project, run.display_name) for run in runs} == {
        (run_id, "ours", "tracked")
    }
    assert "train.steps" in {update.key for run in runs for update in run.config.update}
    result: dict[str, list[tuple[int, float]]] = {}
    shown: dict[str, list[int]] = {}
    for record in records:
        if not record.HasField("history"):
            continue
        row = {
            tuple(item.nested_key) or (item.key,): json.loads(item.value_json)
            for item in record.history.item
        }
        for names, value in row.items():
            if names[1:] == ("_type",):  # a table or a page
                shown.setdefault(names[0], []).append(row[("step",)])
            elif len(names) == 1 and not names[0].startswith("_") and names != ("step",):
                result.setdefault(names[0], []).append((row[("step",)], value))
    assert result == expected(tracked)
    assert shown == {"samples": [2, 4, 6], "completions": [4], "report": [4, 6]}
    tables = [
        json.loads(path.read_text())["data"]
        for path in tracked.path.glob("trackers/wandb/offline-run-*/files/media/table/*")
    ]
    samples = [[[step, PROMPT, text]] for step, text in zip((2, 4, 6), texts(tracked), strict=True)]
    assert sorted(tables, key=lambda rows: (len(rows), rows)) == [*samples, ROWS]


def test_trackio_has_one_run_with_the_same_metrics(tracked: Run, place: Path) -> None:
    [database] = (place / "trackio").glob("*.db")
    rows = (
        sqlite3.connect(database)
        .execute("select run_name, step, metrics from metrics order by id")
        .fetchall()
    )
    assert len({name for name, _, _ in rows}) == 1
    assert rows[0][0].startswith("tracked-")
    result: dict[str, list[tuple[int, float]]] = {}
    for _, step, metrics in rows:
        for name, value in json.loads(metrics).items():
            result.setdefault(name, []).append((step, value))
    assert [step for step, _ in result.pop("completions")] == [4]
    tables = result.pop("samples")
    assert [step for step, _ in tables] == [2, 4, 6]
    assert result == expected(tracked)
    reports = {
        path.read_bytes()
        for path in place.glob("trackio/artifacts/ours/blobs/**/*")
        if path.is_file()
    }
    assert (tracked.path / "report.html").read_bytes() in reports


@contextmanager
def mlflow_server(folder: Path, port: int) -> Iterator[str]:
    """The address of `mlflow server`, which keeps everything in a folder.

    It is asked until it answers.
    """
    where = ["--port", str(port), "--backend-store-uri", f"sqlite:///{folder / 'server.db'}"]
    where += ["--artifacts-destination", str(folder / "artifacts"), "--workers", "1"]
    # It would start workers for evaluations, which have needs of their own.
    variables = os.environ | {
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    with open(folder / "server.log", "ab") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *where],
            env=variables,
            stdout=log,
            stderr=log,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert server.poll() is None, (folder / "server.log").read_text()
            with (
                suppress(OSError),
                urllib.request.urlopen(f"{address}/health", timeout=10) as answer,
            ):
                assert answer.read() == b"OK"
                break
            time.sleep(0.2)
        yield address
    finally:
        server.terminate()
        server.wait()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_mlflow_server_gets_the_run_and_after_it_was_away_all_that_it_missed(
    tiny_options: list[str],
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    have("mlflow")
    from mlflow import MlflowClient

    port = free_port()
    where = [
        *tiny_options,
        "--run.folder",
        str(tmp_path),
        "--run.name",
        "served",
        "--log.project",
        "ours",
    ]
    where += ["--sample.every_steps", "2", "--sample.max_tokens", "4", "--sample.prompts", PROMPT]
    where += ["--schedule.name", "constant", "--log.trackers", "mlflow"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")

    with mlflow_server(tmp_path, port) as address:
        assert command(["pretrain", *where, "--train.steps", "2"]) == 0
        run = Run.open(tmp_path / "served")
        run_id = json.loads((run.path / "trackers" / "mlflow.json").read_text())["run_id"]
        printed = capsys.readouterr()
        assert f"{address}/#/runs/{run_id}" in printed.out
        assert printed.err == ""
        assert MlflowClient(address).get_run(run_id).info.status == "FINISHED"

    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        assert command(["pretrain", *where, "--train.steps", "4"]) == 0
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("lmforge: mlflow: ")
    assert first.endswith("; the run continues")
    assert last.startswith("lmforge: mlflow: not sent: 3 records, the report, the end of the run; ")

    with mlflow_server(tmp_path, port) as address:
        assert (
            command(
                [
                    "pretrain",
                    *where,
                    *announcing_completions(tmp_path, "announcing-again"),
                    "--train.steps",
                    "6",
                ]
            )
            == 0
        )
        assert capsys.readouterr().err == ""
        client = MlflowClient(address)
        [result] = client.search_runs([client.get_experiment_by_name("ours").experiment_id])
        assert (result.info.run_id, result.info.run_name, result.info.status) == (
            run_id,
            "served",
            "FINISHED",
        )
        for name, points in expected(run).items():
            assert [
                (each.step, each.value) for each in client.get_metric_history(run_id, name)
            ] == points
        kept = tmp_path / "artifacts" / result.info.experiment_id / run_id / "artifacts"
        assert (kept / "report.html").read_bytes() == (run.path / "report.html").read_bytes()
        tables = [
            json.loads(path.read_text())["data"] for path in sorted((kept / "samples").iterdir())
        ]
        assert tables == [
            [[step, PROMPT, text]] for step, text in zip((2, 4, 6), texts(run), strict=True)
        ]
        assert json.loads((kept / "completions" / "step-00000004.json").read_text())["data"] == ROWS
