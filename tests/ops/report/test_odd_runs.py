"""Reports and the table for runs that failed, were killed, or whose files have unexpected
content.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from lmforge.cli import run as command
from lmforge.core import run as stages
from lmforge.core.records.run_records import newest_values
from lmforge.core.records.runs import Run
from lmforge.core.stages.run_files import RunEvents
from lmforge.ops.monitor.run_status import MAX_MISSING, read_run_status
from lmforge.ops.report import page as report_page
from lmforge.ops.report.page import render
from lmforge.ops.report.run_data import MAX_SAMPLES, read_run, verdict
from lmforge.ops.verbs.running.list_runs import read_runs
from tests.ops.report.conftest import add_event, copied
from tests.ops.report.test_page import opened

DEEP = "[" * 20_000 + "]" * 20_000
HUGE = "9" * 400


def values_of(page: str) -> Any:
    """What the page's script draws; a constant that JSON lacks fails the test."""
    result = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert result
    return json.loads(result[1], parse_constant=pytest.fail)


@pytest.mark.parametrize(
    "problem", [OSError(28, "No space left on device"), KeyError("x\ny"), KeyboardInterrupt()]
)
def test_a_run_that_failed_unforeseen_says_why(
    tiny_options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: BaseException
) -> None:
    def fail(*parts: object, **numbers: object) -> None:
        raise problem

    monkeypatch.setattr(stages, "train", fail)
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
        != 0
    )
    shown = read_run(Run.open(tmp_path / "a"))
    assert shown["state"] == "failed"
    assert type(problem).__name__ in verdict(shown)
    assert "Nothing went wrong" not in verdict(shown)
    assert type(problem).__name__ in (tmp_path / "a" / "report.html").read_text()


def test_no_problem_is_reported_only_for_a_run_that_is_done_or_runs(first: Run) -> None:
    shown = read_run(first) | {"events": []}
    said = {
        state: "Nothing went wrong." in verdict(shown | {"state": state})
        for state in ("done", "running", "failed", "lost")
    }
    assert said == {"done": True, "running": True, "failed": False, "lost": False}
    assert "Nothing" not in verdict(shown | {"state": "interrupted"})


@pytest.mark.parametrize(
    "problem",
    [RecursionError("too deep"), UnicodeEncodeError("utf-8", "\ud800", 0, 1, "a surrogate")],
)
def test_whatever_a_report_fails_of_is_a_warning(
    tiny_options: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    problem: Exception,
) -> None:
    def fail(run: Run, state: str) -> Path:
        raise problem

    monkeypatch.setattr(report_page, "write_run_report", fail)
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
                "2",
            ]
        )
        == 0
    )
    assert f"no report: {type(problem).__name__}: " in capfd.readouterr().out


def test_the_wait_for_a_save_is_what_the_total_grew_by(
    first: Run, tmp_path: Path, browser: Browser
) -> None:
    run = copied(first, tmp_path)
    totals = [0, 0, 5.0, 5.0, 9.0, 2.0, 2.0]  # another attempt begins at the sixth
    lines = [
        {"step": 10 * n, "step_seconds": 1.0, "save_stall_seconds": total}
        for n, total in enumerate(totals, 1)
    ]
    run.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [row[3] for row in read_run(run)["step_times"]] == pytest.approx(
        [0, 0, 0.5, 0, 0.4, 0.2, 0]
    )
    assert command(["report", str(run.path)]) == 0
    for page in opened(browser, run.path / "report.html"):
        assert "waiting for a save 15.7 %" in page.locator("#curves").inner_text()
    with open(run.metrics_path, "a") as file:
        file.writelines(
            json.dumps({"step": 70 + n, "step_seconds": 1.0, "save_stall_seconds": 2.0}) + "\n"
            for n in range(1, 9000)
        )
    assert sum(row[3] for row in read_run(run)["step_times"]) <= 1.1


def test_many_samples_hide_no_event_and_are_thinned(first: Run, tmp_path: Path) -> None:
    run = copied(first, tmp_path)
    before = len(read_run(run)["events"])
    line = (
        json.dumps({"time": "t", "kind": "sample", "step": 0, "prompt": "", "text": "x" * 70_000})
        + "\n"
    )
    with open(run.events_path, "a") as file:
        file.writelines(line.replace('"step": 0', f'"step": {step}') for step in range(10, 1010))
    add_event(run, kind="bad step", step=1010, reason="the loss is NaN")
    assert run.events_path.stat().st_size > 2**26
    shown = read_run(run)
    assert len(shown["events"]) == before + 1
    assert len(shown["samples"]) == MAX_SAMPLES
    assert shown["samples"][-1]["step"] == 1009


def test_odd_content_is_left_out_of_the_report(
    first: Run, tmp_path: Path, browser: Browser
) -> None:
    run = copied(first, tmp_path)
    events = [
        '{"time": "t", "kind": "end", "step": NaN}',
        DEEP,
        '{"time": 1, "kind": [], "step": 1}',
        f'{{"step": {HUGE}}}',
    ]
    events += [r'{"time": "t", "kind": "bad step", "step": 1, "reason": "\ud800"}']
    events += ['{"time": "t", "kind": "rollback", "step": 1, "to": 1, "reason": "kept"}']
    events += ['{"time": "t", "kind": "rollback", "step": 1, "to": 1e999, "reason": "none"}']
    with open(run.events_path, "a") as file:
        file.write("\n".join(events) + "\n")
    (run.path / "completions").mkdir()
    rows = [
        "[]",
        DEEP,
        '{"prompt": [1]}',
        '{"prompt": "p", "completion": "good", "reward": 1, "tokens": 1, "ended": true}',
    ]
    (run.path / "completions" / "set-000000-rank-0.jsonl").write_text("\n".join(rows))
    (run.path / "environment.json").write_text('{"packages": 1}')
    assert command(["report", str(run.path)]) == 0
    (shown,) = values_of((run.path / "report.html").read_text())["runs"]
    assert shown["events"][-1] == {
        "time": "t",
        "kind": "rollback",
        "step": 1,
        "to": 1,
        "reason": "kept",
    }
    assert [row["completion"] for row in shown["tables"][0]["rows"]] == ["good"]
    for page in opened(browser, run.path / "report.html"):
        assert page.locator("#environment").count() == 0


def test_a_path_that_is_not_unicode_can_be_shown(first: Run, tmp_path: Path) -> None:
    run = copied(first, tmp_path)
    odd = Run(run.path.rename(tmp_path / "odd\udcff"))
    assert report_page.write_run_report(odd).exists()


@pytest.mark.parametrize(
    "line",
    [
        '{"step": Infinity}',
        f'{{"step": 7, "loss": {HUGE}}}',
        f'{{"step": {HUGE}}}',
        DEEP,
        '{"step": "x"}',
    ],
)
def test_an_odd_record_does_not_stop_the_table(first: Run, tmp_path: Path, line: str) -> None:
    run = copied(first, tmp_path)
    with open(run.metrics_path, "a") as file:
        file.write(line + "\n")
    (row,) = read_runs(tmp_path)
    assert (row.step, row.state) == (6, "done")
    (run.health_folder / "rank-0.json").write_text(f'{{"phase": "x", "written": {HUGE}}}')
    (run.events_path).write_text(DEEP)
    assert [row.state for row in read_runs(tmp_path)] == ["not started"]
    assert command(["runs", str(tmp_path)]) == 0


def test_a_loss_that_is_not_finite_any_more_is_not_shown_as_its_last_number(
    first: Run, tmp_path: Path, browser: Browser
) -> None:
    run = copied(first, tmp_path)
    with open(run.metrics_path, "a") as file:
        file.write('{"step": 7, "loss": null, "tokens_per_second": null}\n')
    (row,) = read_runs(tmp_path)
    validation = first.read_metrics()[-1]["val/loss"]
    assert (row.step, row.loss, row.tokens_per_second, row.validation) == (
        7,
        None,
        None,
        validation,
    )
    assert "the loss is not finite" in verdict(read_run(run))
    assert command(["report", str(run.path)]) == 0
    for page in opened(browser, run.path / "report.html"):
        assert "not finite" in page.locator(".tile").filter(has_text="loss").first.inner_text()


def test_the_newest_value_of_a_metric_may_be_in_an_earlier_record_and_is_none_where_it_is_not_finite() -> (
    None
):
    records: list[dict[str, float | None]] = [
        {"step": 1, "loss": 1.0, "mfu": 0.5, "val/loss": 2.0},
        {"step": 2, "loss": None},
    ]
    assert newest_values(records) == {"step": 2, "loss": None, "mfu": 0.5, "val/loss": 2.0}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "values", [(1e17, 1e17 + 16), (1e17, 1e17 + 1e6), (0.1, 0.1 + 2**-56), (0.0, 0.0)]
)
def test_values_that_hardly_differ_are_drawn(
    first: Run, tmp_path: Path, browser: Browser, values: tuple[float, float]
) -> None:
    run = copied(first, tmp_path)
    lines = [
        json.dumps({"step": step, "loss": value}) + "\n" for step, value in enumerate(values, 1)
    ]
    run.metrics_path.write_text("".join(lines))
    assert command(["report", str(run.path)]) == 0
    for page in opened(browser, run.path / "report.html"):
        assert page.locator("path.curve").count() == 1
        result = page.evaluate(
            "[ticks(1e17, 1e17 + 16, 100).length, ticks(0, 10, 5), ticks(-3, 3, 3)]"
        )
        assert result[0] <= 401
        assert result[1:] == [[0, 2, 4, 6, 8, 10], [-2, 0, 2]]


def test_after_half_an_event_the_next_one_is_a_line_of_its_own(first: Run, tmp_path: Path) -> None:
    run = copied(first, tmp_path)
    whole = read_run(run)["events"]
    with open(run.events_path, "a") as file:
        file.write('{"time": "t", "kind": "bad st')
    RunEvents(run).add("sample", 6, prompt="\ud800", text="")
    RunEvents(run).add("start", 6, ranks=1, hosts=1, device="cpu")
    shown = read_run(run)
    assert [event["kind"] for event in shown["events"]] == [
        *(event["kind"] for event in whole),
        "start",
    ]
    assert shown["samples"][-1]["prompt"] == "?"


def test_a_name_that_looks_like_a_place_in_the_page_is_only_a_name(
    first: Run, tmp_path: Path
) -> None:
    run = read_run(first) | {"name": "x@STYLEDATA@"}
    page = render([run])
    assert "<title>x@STYLEDATA@ · lmforge</title>" in page
    assert values_of(page)["runs"][0]["name"] == "x@STYLEDATA@"


def test_a_run_named_like_a_pipeline_is_a_run(first: Run, tmp_path: Path) -> None:
    path = copied(first, tmp_path).path.rename(tmp_path / "a.toml")
    assert command(["report", str(path)]) == 0
    assert "<title>a.toml · lmforge</title>" in (path / "report.html").read_text()


def test_events_are_read_only_where_there_is_no_heartbeat(
    first: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copied(first, tmp_path)
    add_event(run, kind="end", step=None, state="interrupted")
    assert [row.state for row in read_runs(tmp_path)] == ["done"]
    (run.health_folder / "rank-0.json").unlink()
    assert [row.state for row in read_runs(tmp_path)] == ["interrupted"]
    monkeypatch.setattr(Run, "events_path", property(lambda run: pytest.fail("events are read")))
    copied(first, tmp_path / "others")
    assert [row.state for row in read_runs(tmp_path / "others")] == ["done"]


HEARTBEAT = {
    "rank": 0,
    "host": "elsewhere",
    "process": 1,
    "step": 6,
    "number": 0,
    "phase": "forward",
    "since": 1e9,
}
HEARTBEAT |= {"written": 1e9, "bytes": 1, "noticed": False, "reported": False, "world_size": 1}
USAGE = {
    "host": "elsewhere",
    "time": 1e9,
    "cores": 1,
    "cpu_percent": 1.0,
    "load_1m": 1.0,
    "memory_used_bytes": 1,
}
USAGE |= {"memory_total_bytes": 2, "received_bytes_per_second": None, "sent_bytes_per_second": None}
USAGE |= {"devices": [], "processes": [], "notes": []}
MODEL = {"time": "2026-01-02T03:04:05.678+00:00", "kind": "model", "step": 0, "model_type": "llama"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(
            ("health/rank-0.json", HEARTBEAT | {name: 10**400})
            for name in ("step", "number", "bytes", "process", "world_size")
        ),
        ("health/rank-0.json", HEARTBEAT | {"since": -1.7e308, "written": 1.7e308}),
        ("health/rank-0.json", HEARTBEAT | {"since": 10**400}),
        ("health/rank-0.json", HEARTBEAT | {"world_size": 10**12}),
        (
            "health/host-of-rank-0.json",
            USAGE | {"memory_used_bytes": 10**400, "memory_total_bytes": 10**400},
        ),
        (
            "health/host-of-rank-0.json",
            USAGE | {"devices": [{"index": 0, "memory_used_bytes": 10**400}]},
        ),
        ("health/host-of-rank-0.json", USAGE | {"load_1m": 1e308, "time": 1e308}),
        ("events.jsonl", MODEL | {"parameters": 10**400, "trained": 1}),
        ("events.jsonl", MODEL | {"parameters": 1e300}),
        ("events.jsonl", MODEL | {"parameters": 10, "trained": 10**4000}),
        (
            "metrics.jsonl",
            {
                "step": 9,
                "step_seconds": 1.7e308,
                "seconds_left": 1e308,
                "loss": 1.0,
                "tokens": 1e308,
            },
        ),
        ("metrics.jsonl", {"step": 10**12, "step_seconds": 1.0}),
        ("metrics.jsonl", {"step": 9, "step_seconds": 10**400}),
    ],
    ids=str,
)
def test_a_number_that_no_run_has_leaves_every_view_as_it_is(
    first: Run,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    name: str,
    content: dict[str, Any],
) -> None:
    run = copied(first, tmp_path)
    with open(run.path / name, "w" if name.startswith("health") else "a") as file:
        file.write(json.dumps(content) + "\n")
    for words in (
        ["runs", str(tmp_path)],
        ["top", str(run.path), "--once"],
        ["report", str(run.path)],
        ["logs", str(run.path)],
    ):
        assert command(words) == 0, capfd.readouterr().err
    assert command(["show", str(run.path)]) == 0
    assert HUGE[:100] not in capfd.readouterr().out


def test_a_metric_too_large_to_be_one_counts_as_not_finite_and_the_rest_of_its_line_is_kept(
    first: Run, tmp_path: Path
) -> None:
    run = copied(first, tmp_path)
    with open(run.metrics_path, "a") as file:
        file.write('{"step": 9, "loss": 2.5, "mine": -1e300, "grad_norm": 3e38}\n')
    assert run.read_metrics()[-1] == {"step": 9, "loss": 2.5, "mine": None, "grad_norm": 3e38}


def test_one_heartbeat_of_a_million_ranks_lists_only_the_first_of_them(
    first: Run, tmp_path: Path
) -> None:
    run = copied(first, tmp_path)
    (run.health_folder / "rank-0.json").write_text(json.dumps(HEARTBEAT | {"world_size": 2**20}))
    ranks = read_run_status(run).ranks
    assert [rank.rank for rank in ranks] == list(range(MAX_MISSING + 1))
    assert {rank.state for rank in ranks[1:]} == {"missing"}


@pytest.mark.parametrize("name", ["x.html", "x.htm"])
def test_a_report_replaces_a_report_and_no_other_file(
    first: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    out = tmp_path / name
    words = ["report", str(first.path), "--out", str(out)]
    assert command(words) == command(words) == 0
    out.write_text("<!doctype html>\nmine")
    capfd.readouterr()
    assert command(words) == 2
    message = f"--out: {out} exists and is not a report of lmforge; name another file"
    assert capfd.readouterr().err == f"lmforge: {message}\n"
    assert out.read_text() == "<!doctype html>\nmine"
    out.unlink()
    os.mkfifo(out)
    assert command(words) == 2
    assert out.is_fifo()


def test_the_report_of_a_run_is_written_again_whatever_became_of_it(
    first: Run, tmp_path: Path
) -> None:
    run = copied(first, tmp_path)
    (run.path / "report.html").write_bytes(b"\0" * 100)
    assert command(["report", str(run.path)]) == 0
    assert command(["report", str(run.path), "--out", str(run.path / "report.html")]) == 0
