"""What follows from a law: the best size by search, the price of others, cautions, and mixtures
side by side.
"""

import json
from dataclasses import replace
from math import log

import numpy as np
import pytest

from lmforge.lab.ladder.fit import Fit, fit_points
from lmforge.lab.ladder.frontier import (
    Target,
    best_size,
    cautions,
    compare,
    conclusions,
    flat_range,
    flops_ratio,
    loss_at,
    predicted_loss,
)
from lmforge.lab.ladder.law import Law
from tests.lab.ladder.ladders import LAW, ladder

TARGET = Target(parameters=3e6, tokens=6e7, flops_per_token=6.6 * 3e6, bytes_per_token=4.0)


@pytest.fixture(scope="module")
def fit() -> Fit:
    return fit_points(ladder(noise=0.003), draws=200)


def test_no_other_size_is_better_than_the_best_for_the_same_flops() -> None:
    sizes = np.geomspace(1e4, 1e9, 2001)
    losses = [LAW.loss(size, TARGET.flops / (6.6 * size)) for size in sizes]
    assert best_size(LAW, TARGET, TARGET.flops) == pytest.approx(
        sizes[int(np.argmin(losses))], rel=0.01
    )
    assert loss_at(LAW, TARGET, TARGET.flops) <= min(losses)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 3.0])
def test_the_flops_that_a_size_needs_for_the_best_loss_reach_it(ratio: float) -> None:
    times = flops_ratio(LAW, TARGET, TARGET.flops, ratio)
    size = ratio * best_size(LAW, TARGET, TARGET.flops)
    tokens = times * TARGET.flops / (6.6 * size)
    assert LAW.loss(size, tokens) == pytest.approx(loss_at(LAW, TARGET, TARGET.flops))
    assert times >= 1 - 1e-12


def test_a_size_too_small_for_a_loss_reaches_it_with_no_number_of_tokens() -> None:
    assert flops_ratio(LAW, TARGET, TARGET.flops, 0.05) == float("inf")


def test_the_targets_own_size_has_a_row(fit: Fit) -> None:
    found = conclusions(fit, TARGET)
    (own,) = (size for size in found["sizes"] if size["is_target"])
    assert (own["parameters"], own["tokens"]) == pytest.approx((TARGET.parameters, TARGET.tokens))
    assert own["loss"] == pytest.approx(found["target"]["loss"]["value"])
    assert found["sizes"] == sorted(found["sizes"], key=lambda size: size["ratio"])


def test_at_the_ends_of_the_flat_range_the_loss_is_one_percent_above_the_best() -> None:
    best = loss_at(LAW, TARGET, TARGET.flops)
    for ratio in flat_range(LAW, TARGET, TARGET.flops):
        assert loss_at(LAW, TARGET, TARGET.flops, ratio) == pytest.approx(1.01 * best, rel=1e-3)


def test_the_loss_of_a_run_has_a_wider_interval_than_the_law(fit: Fit) -> None:
    run = predicted_loss(fit, 4e5, 8e6)
    low, high = fit.interval(lambda law: law.loss(4e5, 8e6))
    assert run.low < low < run.value < high < run.high


def test_a_target_out_of_reach_is_said(fit: Fit) -> None:
    assert cautions(fit, TARGET) == []
    far = Target(parameters=3e7, tokens=6e9, flops_per_token=6 * 3e7)
    beyond, ratio = cautions(fit, far)
    assert (
        beyond
        == "the target has 3,600 times the FLOPs of the largest run: beyond 100 times a law says"
        " little"
    )
    assert ratio == "the target has 200 tokens for each parameter, the runs 8 to 50"


def test_runs_that_gain_nothing_from_size_say_so_and_their_prediction_is_in_its_interval() -> None:
    points = [
        replace(each, loss=each.loss * (each.parameters / 1e5) ** 0.02)
        for each in ladder(Law(3.0, 0.0, 0.3, 100.0, 0.3))
    ]
    found = conclusions(fit_points(points, draws=200), TARGET)
    assert any(line.startswith("A is 0 in the best law") for line in found["cautions"])
    for estimate in (found["target"]["loss"], *found["best"].values()):
        if isinstance(estimate, dict):
            assert estimate["low"] <= estimate["value"] <= estimate["high"]


def test_all_values_are_of_one_law_where_the_best_lies_at_an_end() -> None:
    points = [
        replace(each, loss=each.loss * (each.parameters / 1e5) ** 0.02)
        for each in ladder(Law(3.0, 0.0, 0.3, 100.0, 0.3))
    ]
    fit = fit_points(points, draws=200)
    found = conclusions(fit, TARGET)
    law = Law(**{name: each["value"] for name, each in found["law"].items()})
    assert law == fit.law != fit.best
    assert (
        found["target"]["loss"]["value"]
        == predicted_loss(fit, 3e6, 6e7).value
        == law.loss(3e6, 6e7)
    )
    for best in (found["best"], *found["frontier"]):
        assert best["parameters"]["value"] == best_size(law, TARGET, best["flops"])
        assert best["loss"]["value"] == loss_at(law, TARGET, best["flops"])
    assert any(
        line.startswith("the law that fits best is an extreme one") for line in found["cautions"]
    )


def test_a_best_law_in_the_middle_is_the_law(fit: Fit) -> None:
    assert fit.law == fit.best


def test_an_exponent_at_the_end_of_its_range_is_said() -> None:
    points = ladder(Law(0.0, 1e9, 2.6, 30.0, 0.1))
    lines = cautions(fit_points(points, draws=100), TARGET)
    assert any(
        line.startswith("alpha is 2 in the best law, the end of its range") for line in lines
    )


def test_conclusions_are_json_and_agree_with_the_law(fit: Fit) -> None:
    found = json.loads(json.dumps(conclusions(fit, TARGET), allow_nan=False))
    loss = found["target"]["loss"]
    assert loss["low"] < loss["value"] < loss["high"]
    assert found["target"]["bits_per_byte"]["value"] == pytest.approx(loss["value"] / log(2) / 4)
    assert [each["name"] for each in found["points"]] == [each.name for each in ladder()]
    best = found["best"]
    assert best["parameters"]["value"] * best["tokens"]["value"] * 6.6 == pytest.approx(
        TARGET.flops
    )
    assert best["loss"]["value"] <= loss["value"]


def test_of_two_mixtures_the_better_is_named_only_beyond_the_interval() -> None:
    other = Law(**{**LAW.__dict__, "E": 1.0})
    same, better = (
        fit_points(ladder(law, noise=0.003, seed=seed), draws=200)
        for law, seed in ((LAW, 1), (other, 2))
    )
    first = fit_points(ladder(noise=0.003), draws=200)
    alike, differ = compare({"a": first, "b": same}, TARGET) + compare(
        {"a": first, "c": better}, TARGET
    )
    assert not alike["decided"]
    assert differ["decided"]
    assert differ["low"] < LAW.loss(3e6, 6e7) - other.loss(3e6, 6e7) < differ["high"]


@pytest.mark.parametrize(("noise", "is_said"), [(0.003, False), (0.04, True)])
def test_runs_that_follow_no_law_are_said_to(noise: float, is_said: bool) -> None:
    lines = cautions(fit_points(ladder(noise=noise), draws=100), TARGET)
    assert any("--ladder.learning_rates" in line for line in lines) == is_said


def test_the_largest_run_is_predicted_from_the_smaller_models_and_one_that_is_off_is_told() -> None:
    points = ladder(noise=0.003)
    check = conclusions(fit_points(points, draws=100), TARGET)["check"]
    assert check["name"] == max(points, key=lambda each: each.parameters * each.tokens).name
    assert check["is_inside"]
    assert check["predicted"]["value"] == pytest.approx(check["loss"], rel=0.05)
    # Larger models that learn what smaller ones cannot.
    largest = max(each.parameters for each in points)
    better = [
        replace(each, loss=each.loss * 0.9) if each.parameters == largest else each
        for each in points
    ]
    check = conclusions(fit_points(better, draws=100), TARGET)["check"]
    assert not check["is_inside"]
    assert check["predicted"]["value"] > 1.05 * check["loss"]


def test_too_few_smaller_models_check_nothing() -> None:
    points = ladder(noise=0.003)
    sizes = sorted({each.parameters for each in points})
    assert (
        conclusions(
            fit_points([each for each in points if each.parameters >= sizes[-2]], draws=100), TARGET
        )["check"]
        is None
    )
