"""The loss curve exists while a run trains, and drawing it never stops the run."""

import json
from pathlib import Path

import pytest

from lmforge.cli import run as command
from lmforge.errors import UserError
from lmforge.monitor import loss_curve
from lmforge.monitor.loss_curve import LossCurveThread
from lmforge.runs import Run
from lmforge.stages import run_stage

PNG = b"\x89PNG"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    records = [{"step": step, "tokens": 100 * step, "loss": 5.0 - step / 10} for step in range(1, 9)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return Run(tmp_path)


def test_it_is_drawn_only_where_it_is_due(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    early = LossCurveThread(run)
    early.draw_if_due()
    early.close()
    assert not (run.path / "loss.png").exists(), "the first steps are not slowed by importing matplotlib"
    monkeypatch.setattr(loss_curve, "FIRST_AFTER_SECONDS", 0.0)
    drawing = LossCurveThread(run)
    drawing.draw_if_due()
    drawing.close()
    assert (run.path / "loss.png").read_bytes().startswith(PNG)
    (run.path / "loss.png").unlink()
    drawing.draw_if_due()  # a hundred times as long as it took has not passed
    drawing.close()
    assert not (run.path / "loss.png").exists()


def test_what_goes_wrong_while_drawing_is_ignored(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_curve, "FIRST_AFTER_SECONDS", 0.0)
    monkeypatch.setattr("threading.excepthook", lambda failed: pytest.fail(str(failed)))
    (run.path / "metrics.jsonl").write_bytes(b"\x00\xff")
    (run.path / "loss.png").mkdir()
    drawing = LossCurveThread(run)
    drawing.draw_if_due()
    drawing.close()
    assert (run.path / "loss.png").is_dir()


def test_a_run_has_it_before_its_end(
    tiny_options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(run: Run) -> Path:
        raise UserError("not at the end")

    monkeypatch.setattr(loss_curve, "FIRST_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(run_stage, "draw_loss_curve", refuse)
    assert command(["pretrain", *tiny_options, "--run.folder", str(tmp_path), "--run.name", "a"]) == 0
    assert "no loss curve: not at the end" in capsys.readouterr().out
    assert (tmp_path / "a" / "loss.png").read_bytes().startswith(PNG)
    assert not list((tmp_path / "a").glob(".loss.png*"))
