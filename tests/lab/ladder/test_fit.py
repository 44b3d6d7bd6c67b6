"""The fit of a ladder: known laws are found, intervals hold them, and points that do not fit a law
are named or refused.
"""

from dataclasses import replace

import pytest

from lmforge.core.errors import UserError
from lmforge.lab.ladder.fit import fit_points
from lmforge.lab.ladder.law import Law, Point, best_law
from tests.lab.ladder.ladders import LAW, ladder


@pytest.mark.parametrize("law", [LAW, Law(0.9, 60, 0.25, 300, 0.5), Law(0, 900, 0.3, 40, 0.2)])
def test_a_law_without_noise_is_found(law: Law) -> None:
    found, _ = best_law(ladder(law))
    assert [found.alpha, found.beta] == pytest.approx([law.alpha, law.beta], rel=2e-3)
    assert found.loss(1e7, 2e8) == pytest.approx(law.loss(1e7, 2e8), rel=1e-3)


def test_one_bad_run_hardly_moves_the_law() -> None:
    points = ladder(noise=0.002)
    bad = [*points[:5], replace(points[5], loss=points[5].loss * 1.06), *points[6:]]
    moved = [
        abs(best_law(bad, huber)[0].loss(3e6, 6e7) / best_law(points, huber)[0].loss(3e6, 6e7) - 1)
        for huber in (None, 1.0)
    ]
    assert moved[0] < 0.005
    assert moved[1] > 2 * moved[0]


def test_the_same_seed_draws_the_same_laws() -> None:
    points = ladder(noise=0.003)
    assert fit_points(points, draws=100, seed=3) == fit_points(points, draws=100, seed=3)
    assert (
        fit_points(points, draws=100, seed=3).draws != fit_points(points, draws=100, seed=4).draws
    )


@pytest.mark.slow
def test_intervals_of_ninety_percent_hold_the_law_that_often() -> None:
    """Of 24 ladders with 4 values each; a tenth should miss, and intervals half as wide do miss a
    third.
    """
    values = (
        lambda law: law.alpha,
        lambda law: law.beta,
        lambda law: law.E,
        lambda law: law.loss(1e7, 2e8),
    )
    held = half = 0
    for seed in range(24):
        fit = fit_points(ladder(noise=0.004, seed=seed), draws=300, seed=seed)
        for value_of in values:
            low, high = fit.interval(value_of)
            held += low <= value_of(LAW) <= high
            half += (3 * low + high) / 4 <= value_of(LAW) <= (low + 3 * high) / 4
    print(held, half)
    assert half < 78 <= held <= 94


def test_the_interval_is_wider_for_fewer_runs_and_for_a_larger_target() -> None:
    def width(points: list[Point], size: float) -> float:
        low, high = fit_points(points, draws=300).interval(lambda law: law.loss(size, 20 * size))
        return high - low

    points = ladder(noise=0.003)
    assert width(points[::2], 1e7) > 1.2 * width(points, 1e7)
    assert width(points, 1e8) > 1.2 * width(points, 1e7)


def test_diverged_runs_are_left_out_and_named() -> None:
    points = ladder(noise=0.002)
    bad = [
        *points,
        Point("not-a-number", 1e6, 1e7, float("nan")),
        Point("spiked", 2e6, 8e7, 1.2 * points[0].loss),
    ]
    fit = fit_points(bad, draws=50)
    assert fit == replace(fit_points(points, draws=50), left_out=fit.left_out)
    assert [name for name, _ in fit.left_out] == ["not-a-number", "spiked"]
    assert "nan" in fit.left_out[0][1]
    assert points[-1].name in fit.left_out[1][1]


def test_short_runs_are_left_out_and_named_where_ten_others_remain() -> None:
    points = [replace(each, steps=250) for each in ladder(noise=0.002)]
    assert len(points) >= 10
    short = [
        replace(each, name=f"short-{each.name}", loss=1.05 * each.loss, steps=249)
        for each in points[:3]
    ]
    fit = fit_points([*points, *short], draws=50)
    assert fit == replace(fit_points(points, draws=50), left_out=fit.left_out)
    assert [name for name, _ in fit.left_out] == [each.name for each in short]
    assert "it has 249 steps" in fit.left_out[0][1]
    few = [*points[-9:], *short]
    assert fit_points(few, draws=50).points == tuple(few)
    # Without the short ones no law is fixed.
    shapes = [(size, 5e7) for size in (1e5 * number for number in range(1, 11))]
    alike = [
        Point(f"{n}", size, count, LAW.loss(size, count), 250)
        for n, (size, count) in enumerate(shapes)
    ]
    assert fit_points([*alike, *short], draws=50).left_out == ()
    unknown = [replace(each, steps=None) for each in (*points, *short)]  # of others' runs
    assert fit_points(unknown, draws=50).points == tuple(unknown)


def test_fewer_than_five_runs_are_refused_with_how_many_are_missing() -> None:
    with pytest.raises(UserError, match="3 runs cannot fix them: add at least 2 more runs"):
        fit_points(ladder()[:3])


def test_fewer_than_five_different_runs_are_refused_however_often_they_are_given() -> None:
    points = [ladder()[number] for number in (0, 4, 8)]
    again = [replace(each, name=f"{each.name}-again") for each in (*points, *points[:2])]
    with pytest.raises(
        UserError, match="8 runs of 3 different sizes and token counts cannot fix them"
    ):
        fit_points([*points, *again])


def test_too_few_runs_name_those_that_are_left_out() -> None:
    points = [ladder()[number] for number in (0, 4, 6, 8)]
    with pytest.raises(
        UserError, match=r"add at least 1 more run \(spiked is left out: its loss is inf\)"
    ):
        fit_points([*points, Point("spiked", 2e6, 8e7, float("inf"))])


def test_runs_of_one_size_or_one_token_count_are_refused() -> None:
    with pytest.raises(UserError, match="all runs have the same size"):
        fit_points([replace(each, parameters=1e5) for each in ladder()])
    shapes = [(1e5 * 2**number, 1e6) for number in range(6)]
    with pytest.raises(UserError, match="all runs have the same token count"):
        fit_points([Point(str(shape), *shape, LAW.loss(*shape)) for shape in shapes])


def test_five_runs_have_an_interval() -> None:
    points = [ladder()[number] for number in (0, 4, 6, 8, 10)]
    low, high = fit_points(points, draws=300).interval(lambda law: law.loss(1e7, 2e8))
    assert low < LAW.loss(1e7, 2e8) < high
