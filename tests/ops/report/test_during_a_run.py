"""A run has its report while it trains, and writing it never stops the run."""

import shutil
from pathlib import Path

import pytest

from lmforge.cli import run as command
from lmforge.core.records.runs import Run
from lmforge.ops.report import page
from lmforge.ops.report.page import ReportThread, is_report


@pytest.fixture
def run(tiny_run: Path, tmp_path: Path) -> Run:
    shutil.copytree(tiny_run, tmp_path / "a")
    (tmp_path / "a" / "report.html").unlink()
    return Run(tmp_path / "a")


def test_it_is_written_only_where_it_is_due(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    report = run.path / "report.html"
    early = ReportThread(run)
    early.write_if_due()
    early.close()
    assert not report.exists(), "the first steps are not slowed"
    monkeypatch.setattr(page, "FIRST_AFTER_SECONDS", 0.0)
    thread = ReportThread(run)
    thread.write_if_due()
    thread.close()
    assert is_report(report)
    for edited in (
        report.read_bytes().replace(b"</body>", b"<p>Mine.</p></body>"),
        page.BEGINNING,
        report.read_bytes() + b"\n",
    ):
        (run.path / "mine.html").write_bytes(edited)
        assert not is_report(run.path / "mine.html")
    report.unlink()
    thread.write_if_due()  # a hundred times as long as it took has not passed
    thread.close()
    assert not report.exists()


def test_what_goes_wrong_while_it_is_written_is_ignored(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "FIRST_AFTER_SECONDS", 0.0)
    monkeypatch.setattr("threading.excepthook", lambda failed: pytest.fail(str(failed)))
    (run.path / "report.html").mkdir()
    thread = ReportThread(run)
    thread.write_if_due()
    thread.close()
    assert (run.path / "report.html").is_dir()


def test_a_run_has_it_before_its_end(
    tiny_options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    written = page.write_run_report

    def refuse(run: Run, state: str | None = None) -> Path:
        if state is None:
            return written(run)
        raise OSError("not at the end")

    monkeypatch.setattr(page, "FIRST_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(page, "write_run_report", refuse)
    assert (
        command(["pretrain", *tiny_options, "--run.folder", str(tmp_path), "--run.name", "a"]) == 0
    )
    assert "no report: OSError: not at the end" in capsys.readouterr().out
    assert is_report(tmp_path / "a" / "report.html")
    assert not list((tmp_path / "a").glob(".report.html*"))
