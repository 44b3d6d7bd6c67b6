"""The content of a report agrees with the run's files."""

import json
import math
import os
from itertools import pairwise
from pathlib import Path

import pytest

import lmforge
from lmforge.cli import run as command
from lmforge.core.files.untrusted import MAX_BYTES
from lmforge.core.options.load import build_config
from lmforge.core.records.manifests import checkpoint_checksum
from lmforge.core.records.runs import Run
from lmforge.ops.report import page as report_page
from lmforge.ops.report.page import write_run_report
from lmforge.ops.report.run_data import MAX_POINTS, read_run, subject, verdict
from tests.ops.report.conftest import add_event, copied


def test_every_metric_has_its_values_by_step(first: Run) -> None:
    shown, records = read_run(first), first.read_metrics()
    for name in ("loss", "val/loss", "lr", "grad_norm"):
        expected = [[record["step"], record[name]] for record in records if name in record]
        assert shown["series"][name] == expected
    assert shown["axis"]["tokens"] == [record["tokens"] for record in records]
    assert shown["axis"]["seconds"][-1] == pytest.approx(
        sum(record.get("step_seconds", 0) for record in records)
    )


def test_a_series_of_a_long_run_is_thinned_to_its_first_last_and_evenly_spaced_points(
    first: Run, tmp_path: Path
) -> None:
    run = copied(first, tmp_path)
    run.metrics_path.write_text(
        "".join(json.dumps({"step": step, "loss": step / 7}) + "\n" for step in range(1, 50_001))
    )
    steps = [step for step, _ in read_run(run)["series"]["loss"]]
    assert (len(steps), steps[0], steps[-1]) == (MAX_POINTS, 1, 50_000)
    gaps = [after - before for before, after in pairwise(steps)]
    assert max(gaps) - min(gaps) <= 1


def test_a_restart_checkpoints_and_samples_are_events_in_the_order_of_time(first: Run) -> None:
    shown = read_run(first)
    kinds = [(event["kind"], event["step"]) for event in shown["events"]]
    before = [("start", 0), ("checkpoint", 2), ("checkpoint", 4), ("end", None)]
    assert kinds == [*before, ("start", 4), ("checkpoint", 6), ("end", None)]
    assert [sample["step"] for sample in shown["samples"]] == [2, 4, 6]
    assert {sample["prompt"] for sample in shown["samples"]} == {"def "}
    assert shown["state"] == "done"


def test_the_verdict_names_how_it_ended_and_what_went_wrong(first: Run, tmp_path: Path) -> None:
    shown = read_run(first)
    losses = [value for _, value in shown["series"]["val/loss"]]
    words = f"Finished: 6 of 6 steps, validation loss {losses[0]:.3f} → {losses[-1]:.3f}"
    assert verdict(shown).startswith(words)
    assert verdict(shown).endswith(" 1 restart.")
    run = copied(first, tmp_path)
    add_event(run, kind="bad step", step=5, reason="the loss is NaN")
    add_event(run, kind="bad step", step=6, reason="the loss is NaN")
    add_event(run, kind="rollback", step=6, to=4, reason="2 bad steps in a row")
    add_event(run, kind="end", step=None, state="failed", error="the disk is full")
    (run.health_folder / "rank-0.json").unlink()
    assert verdict(read_run(run)).endswith("2 bad steps, 1 rollback, 1 restart. the disk is full")
    assert verdict(read_run(run)).startswith("Failed: ")


def test_the_subject_names_the_model_the_data_and_the_time(first: Run) -> None:
    shown = read_run(first)
    count = sum(
        parameter.numel()
        for parameter in lmforge.load_model(first.path, device="cpu").model.parameters()
    )
    name, tokens = shown["sources"][0]["name"], f"{first.read_metrics()[-1]['tokens']:,.0f}"
    begin = (
        f"Pretraining of a model with {count:,} parameters (llama), on {name}: {tokens} tokens in "
    )
    assert subject(shown).startswith(begin)
    # A run of an earlier version, and one that has not made a step.
    assert subject(shown | {"model": {}}).startswith(f"Pretraining, on {name}: ")
    assert (
        subject(shown | {"model": {}, "axis": {"step": [], "tokens": [], "seconds": []}})
        == f"Pretraining, on {name}."
    )
    assert "validation loss 5.000." in verdict(shown | {"series": {"val/loss": [[0, 5.0]]}})


def test_a_run_whose_heartbeats_have_stopped_is_lost_and_one_with_them_runs(
    first: Run, tmp_path: Path
) -> None:
    run = copied(first, tmp_path)
    path = run.health_folder / "rank-0.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"phase": "forward", "host": "elsewhere"})
    )
    assert read_run(run)["state"] == "running"
    os.utime(path, (1, 1))
    assert read_run(run)["state"] == "lost"


def test_the_report_that_a_run_writes_as_it_ends_says_how_though_other_ranks_have_not_ended_yet(
    first: Run, tmp_path: Path
) -> None:
    run = copied(first, tmp_path)
    beat = json.loads((run.health_folder / "rank-0.json").read_text())
    (run.health_folder / "rank-1.json").write_text(
        json.dumps(beat | {"rank": 1, "phase": "save", "world_size": 2})
    )
    assert '"state": "done"' in write_run_report(run, "done").read_text()
    assert '"state": "running"' in write_run_report(run).read_text()


@pytest.mark.slow
def test_a_checkpoint_of_any_number_of_files_is_shown_with_its_size(
    first: Run, tmp_path: Path
) -> None:
    run = copied(first, tmp_path)
    path = run.checkpoint_path(6) / "manifest.json"
    fields = json.loads(path.read_text())
    size = sum(file["bytes"] for file in fields["files"].values())
    fields["files"] |= {
        f"{'x' * 100}{number}": {"bytes": 10, "xxh3": []} for number in range(150_000)
    }
    fields["xxh3"] = checkpoint_checksum(
        {name: value for name, value in fields.items() if name != "xxh3"}
    )
    path.write_text(json.dumps(fields))
    assert path.stat().st_size > MAX_BYTES
    shown = read_run(run)["checkpoints"][-1]
    assert (shown["step"], shown["bytes"], shown["metrics"]) == (
        6,
        size + 1_500_000,
        fields["metrics"],
    )


def test_options_that_differ_from_the_defaults_are_those_that_were_given(first: Run) -> None:
    shown = read_run(first)
    assert shown["options"]["optimizer.lr"] == 0.01
    assert {"optimizer.lr", "model.hidden_size", "data.folder", "schedule.warmup_steps"} <= set(
        shown["changed"]
    )
    assert not {"optimizer.beta1", "optimizer.name", "train.master_dtype", "data.sources"} & set(
        shown["changed"]
    )


def test_a_path_that_was_not_given_does_not_differ_from_its_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = build_config("pretrain", {"run.name": "plain", "train.steps": 300})
    run = Run.from_config(config)
    run.start_attempt(config)
    assert read_run(run)["options"]["run.folder"] == "runs"
    assert read_run(run)["changed"] == ["run.name", "run.stage", "train.steps"]


def test_the_documents_of_the_data_are_counted_by_length(first: Run) -> None:
    (source,) = read_run(first)["sources"]
    assert sum(source["lengths"]) == source["documents"] > 0
    assert source["tokens"] > source["documents"]


def test_what_is_missing_or_damaged_is_left_out(first: Run, tmp_path: Path) -> None:
    run = copied(first, tmp_path)
    (run.path / "environment.json").write_text("{")
    run.events_path.write_bytes(
        b'\xff\n[1]\n{"kind": "sample"}\n{"time": "t", "kind": "start", "step": 0}\nhalf a li'
    )
    (run.health_folder / "rank-0.json").write_text("[]")
    for folder in run.checkpoints_folder.iterdir():
        (folder / "manifest.json").write_text("[]")
    (run.path / "completions").mkdir()
    (run.path / "completions" / "set-000000-rank-0.jsonl").write_text("no JSON")
    shown = read_run(run)
    assert (shown["environment"], shown["checkpoints"], shown["state"]) == ({}, [], "not started")
    assert [event["kind"] for event in shown["events"]] == ["start"]
    assert shown["tables"] == [{"name": "set-000000", "rows": []}]
    run.metrics_path.unlink()
    assert read_run(run)["series"] == {}


def test_a_report_that_cannot_be_written_does_not_end_the_run(
    tiny_options: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = report_page.write_run_report

    def into_a_folder(run: Run, state: str) -> Path:
        (run.path / "report.html").mkdir()
        return written(run, state)

    monkeypatch.setattr(report_page, "write_run_report", into_a_folder)
    assert (
        command(
            [
                "pretrain",
                *tiny_options,
                "--run.folder",
                str(tmp_path),
                "--run.name",
                "a",
                "--train.steps",
                "3",
            ]
        )
        == 0
    )
    assert "no report: " in capfd.readouterr().out
    assert command(["report", str(tmp_path / "a")]) == 2
    err = capfd.readouterr().err
    assert (
        err
        == f"lmforge: --out: {tmp_path / 'a' / 'report.html'}: Is a directory; name another file\n"
    )


def test_numbers_that_json_lacks_are_not_in_the_page(first: Run, tmp_path: Path) -> None:
    run = copied(first, tmp_path)
    lines = [
        '{"step": 1, "loss": null, "lr": 1.0}',
        '{"step": 2, "loss": 2.5}',
        '{"step": 3, "loss": 1e999}',
    ]
    run.metrics_path.write_text("\n".join(lines) + "\n")
    series = read_run(run)["series"]
    assert series["loss"] == [[2, 2.5]]
    assert all(math.isfinite(value) for points in series.values() for _, value in points)
