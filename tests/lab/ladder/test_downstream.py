"""Scores of tasks, predicted from the loss."""

import numpy as np
import pytest

from lmforge.lab.ladder.downstream import predict_scores
from lmforge.lab.ladder.fit import Fit, fit_points
from lmforge.lab.ladder.frontier import Target
from lmforge.lab.ladder.law import Law
from tests.lab.ladder.ladders import LAW, ladder

TARGET = Target(3e6, 6e7, 6 * 3e6)


def score(loss: float) -> float:
    return 0.25 + 0.7 / (1 + float(np.exp(0.5 * (loss - 9))))


def answered(bits: float) -> float:
    return 0.25 + 0.7 / (1 + float(np.exp(2 * (bits - 1.6))))


@pytest.fixture(scope="module")
def fit() -> Fit:
    return fit_points(ladder(noise=0.003), draws=200)


def test_a_score_that_follows_a_sigmoid_of_the_loss_is_predicted_beyond_the_runs(fit: Fit) -> None:
    chance = np.random.default_rng(0)
    scores = {
        each.name: {"val/quiz/acc": score(each.loss) + 0.01 * chance.standard_normal()}
        for each in fit.points
    }
    (found,) = predict_scores(fit, scores, TARGET)
    expected = score(LAW.loss(TARGET.parameters, TARGET.tokens))
    assert expected > max(each["val/quiz/acc"] for each in scores.values())
    assert found["name"] == "val/quiz/acc"
    assert found["score"]["low"] < expected < found["score"]["high"]
    assert found["score"]["value"] == pytest.approx(expected, abs=0.05)
    assert found["caution"] == ""


def test_the_bits_of_the_answers_have_a_law_of_their_own_and_the_score_follows_it(fit: Fit) -> None:
    """Here they fall another way than the held-out loss does, which alone predicts a score that is
    far off.
    """
    chance = np.random.default_rng(0)
    of_answers = Law(E=0.6, A=9.0, alpha=0.18, B=30.0, beta=0.3)

    def bits(parameters: float, tokens: float) -> float:
        return of_answers.loss(parameters, tokens) * float(np.exp(0.003 * chance.standard_normal()))

    scores = {}
    for each in fit.points:
        reached = bits(each.parameters, each.tokens)
        scores[each.name] = {"val/quiz/acc": answered(reached), "val/quiz/bits_per_byte": reached}
    found = {each["name"]: each["score"] for each in predict_scores(fit, scores, TARGET)}
    expected = of_answers.loss(TARGET.parameters, TARGET.tokens)
    assert (
        found["val/quiz/bits_per_byte"]["low"] < expected < found["val/quiz/bits_per_byte"]["high"]
    )
    assert found["val/quiz/bits_per_byte"]["value"] == pytest.approx(expected, rel=0.02)
    by_answers = abs(found["val/quiz/acc"]["value"] - answered(expected))
    (only,) = predict_scores(
        fit, {name: {"val/quiz/acc": each["val/quiz/acc"]} for name, each in scores.items()}, TARGET
    )
    assert by_answers < 0.02 < abs(only["score"]["value"] - answered(expected))


def test_bits_of_too_few_runs_are_left_out_and_the_held_out_loss_predicts_the_score(
    fit: Fit,
) -> None:
    scores = {each.name: {"val/quiz/acc": score(each.loss)} for each in fit.points}
    expected = predict_scores(fit, scores, TARGET)
    for each in fit.points[:4]:
        scores[each.name]["val/quiz/bits_per_byte"] = each.loss
    assert [each["name"] for each in expected] == ["val/quiz/acc"]
    assert predict_scores(fit, scores, TARGET) == expected


def test_scores_at_chance_say_so(fit: Fit) -> None:
    chance = np.random.default_rng(0)
    scores = {
        each.name: {"val/quiz/acc": 0.25 + 0.01 * chance.standard_normal(), "val/loss/web": 3.0}
        for each in fit.points
    }
    (found,) = predict_scores(fit, scores, TARGET)
    assert found["score"]["low"] < 0.25 < found["score"]["high"]
    assert "hardly changes" in found["caution"]
    (same,) = predict_scores(
        fit, {each.name: {"val/quiz/acc": 0.25} for each in fit.points}, TARGET
    )
    assert "hardly changes" in same["caution"]


def test_a_run_whose_noisy_answers_are_worse_than_those_of_a_smaller_one_counts(fit: Fit) -> None:
    def interval_of_bits(times: float) -> float:
        scores = {each.name: {"val/quiz/bits_per_byte": each.loss / 4} for each in fit.points}
        scores[fit.points[-1].name]["val/quiz/bits_per_byte"] *= times
        (found,) = predict_scores(fit, scores, TARGET)
        return float(found["score"]["high"] - found["score"]["low"])

    assert interval_of_bits(1.8) > 1.5 * interval_of_bits(1.0)


def test_a_task_of_fewer_than_five_runs_is_not_predicted(fit: Fit) -> None:
    assert (
        predict_scores(fit, {each.name: {"val/quiz/acc": 0.5} for each in fit.points[:4]}, TARGET)
        == []
    )
