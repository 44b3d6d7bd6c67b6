"""Scores of tasks, predicted from the loss."""

import numpy as np
import pytest

from lmforge.ladder.downstream import predict_scores
from lmforge.ladder.fit import Fit, fit_points
from lmforge.ladder.frontier import Target
from tests.ladder.ladders import LAW, ladder

TARGET = Target(3e6, 6e7, 6 * 3e6)


def score(loss: float) -> float:
    return 0.25 + 0.7 / (1 + float(np.exp(0.5 * (loss - 9))))


@pytest.fixture(scope="module")
def fit() -> Fit:
    return fit_points(ladder(noise=0.003), draws=200)


def test_a_score_that_follows_a_sigmoid_of_the_loss_is_predicted_beyond_the_runs(fit: Fit) -> None:
    chance = np.random.default_rng(0)
    scores = {each.name: {"val/quiz/acc": score(each.loss) + 0.01 * chance.standard_normal()} for each in fit.points}
    (found,) = predict_scores(fit, scores, TARGET)
    expected = score(LAW.loss(TARGET.parameters, TARGET.tokens))
    assert expected > max(each["val/quiz/acc"] for each in scores.values())
    assert found["name"] == "val/quiz/acc"
    assert found["score"]["low"] < expected < found["score"]["high"]
    assert found["score"]["value"] == pytest.approx(expected, abs=0.05)
    assert found["caution"] == ""


def test_scores_at_chance_say_so(fit: Fit) -> None:
    chance = np.random.default_rng(0)
    scores = {each.name: {"val/quiz/acc": 0.25 + 0.01 * chance.standard_normal(), "val/loss/web": 3.0} for each in fit.points}
    (found,) = predict_scores(fit, scores, TARGET)
    assert found["score"]["low"] < 0.25 < found["score"]["high"]
    assert "hardly changes" in found["caution"]


def test_a_task_of_fewer_than_five_runs_is_not_predicted(fit: Fit) -> None:
    assert predict_scores(fit, {each.name: {"val/quiz/acc": 0.5} for each in fit.points[:4]}, TARGET) == []
