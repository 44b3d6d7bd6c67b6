"""A run beside the prediction of a ladder: it says when it leaves the interval, and is otherwise
the same run.
"""

import json
from pathlib import Path

import pytest

from lmforge.core.errors import UserError
from lmforge.core.records.runs import Run
from lmforge.ops.monitor.predicted_loss import LossWatch, PredictedLoss, read_predicted_loss
from lmforge.ops.report.run_data import read_run, verdict
from tests.conftest import Command

PREDICTED = PredictedLoss(steps=100, points=[(20, 5.0, 4.0, 6.0), (100, 3.0, 2.5, 3.5)])


def test_the_prediction_between_its_points_is_on_the_line_between_them() -> None:
    assert PREDICTED.at(60) == pytest.approx((4.0, 3.25, 4.75))
    assert PREDICTED.at(100) == (3.0, 2.5, 3.5)
    assert PREDICTED.at(19) is None


def test_leaving_the_interval_and_returning_are_said_once_each() -> None:
    watch = LossWatch(PREDICTED)
    losses = {10: 9.0, 20: 5.9, 30: 9.0, 40: float("nan"), 60: None, 80: 3.5, 100: 3.4}
    said = {step: line for step, loss in losses.items() if (line := watch.check(step, loss))}
    assert list(said) == [30, 80]
    assert "val/loss 9.0000, predicted 4.7500 (3.8125 to 5.6875): outside" in said[30]
    assert "again inside" in said[80]


def test_a_prediction_of_another_run_or_none_is_refused_in_one_line(tmp_path: Path) -> None:
    (path := tmp_path / "prediction.json").write_text(PREDICTED.model_dump_json())
    assert read_predicted_loss(path, 100) == PREDICTED
    with pytest.raises(UserError, match="of a run of 100 steps, and this one has 7; leave it out"):
        read_predicted_loss(path, 7)
    with pytest.raises(UserError, match=r"^log.prediction: .*none.json: No such file"):
        read_predicted_loss(tmp_path / "none.json", 7)
    path.write_text(json.dumps({"steps": 7, "points": []}))
    with pytest.raises(UserError, match="points"):
        read_predicted_loss(path, 7)


@pytest.mark.slow
def test_a_run_that_leaves_its_interval_warns_and_keeps_every_bit(
    tiny_run: Path, tiny_options: list[str], lmforge: Command
) -> None:
    Path("prediction.json").write_text(
        json.dumps({"steps": 6, "points": [[3, 1.0, 0.9, 1.1], [6, 0.8, 0.7, 0.9]]})
    )
    done = lmforge(
        "pretrain", *tiny_options, "--run.name", "seen", "--log.prediction", "prediction.json"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("outside the ladder's interval") == 1
    seen, plain = (Run(path).read_metrics() for path in (Path("runs/seen"), tiny_run))
    assert [record["loss"] for record in seen] == [record["loss"] for record in plain]
    assert read_run(Run(Path("runs/seen")))["predicted_loss"][1] == (6, 0.8, 0.7, 0.9)
    said = verdict(read_run(Run(Path("runs/seen"))))
    assert said.endswith(
        "; its ladder predicted 0.8 (0.7 to 0.9). the validation loss is outside the ladder's"
        " interval."
    )
    refused = lmforge(
        "pretrain", *tiny_options, "--run.name", "other", "--log.prediction", "none.json"
    )
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert not Path("runs/other/recipe.toml").exists()
    # A run that was begun with it trains to its end without.
    Path("prediction.json").rename("moved.json")
    resumed = lmforge(
        "pretrain",
        *tiny_options,
        "--run.name",
        "seen",
        "--log.prediction",
        "prediction.json",
        "--train.steps",
        "7",
    )
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stderr.count("log.prediction: prediction.json: No such file") == 1
    assert Run(Path("runs/seen")).checkpoint_steps()[-1] == 7
