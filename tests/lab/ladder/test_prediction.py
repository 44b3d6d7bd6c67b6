"""The curve that a ladder predicts for its big run: known where its rungs were validated, and as
much above the law as they.
"""

from math import ceil

import pytest

from lmforge.core.options.load import parse_config
from lmforge.core.options.stage import PretrainConfig
from lmforge.hf.resolve import model_config_from_options
from lmforge.lab.ladder.fit import fit_points
from lmforge.lab.ladder.prediction import predict_curve
from lmforge.lab.ladder.rungs import Trial
from tests.lab.ladder.ladders import LAW, ladder

FIT = fit_points(ladder())
POINTS = ladder()


@pytest.fixture(scope="module")
def target() -> Trial:
    words = ["--data.folder", "tokens", "--train.steps", "1000", "--train.global_batch_size", "8"]
    config = parse_config(PretrainConfig, words)
    return Trial(config, model_config_from_options(config.model, 512))


def factor(part: float) -> float:
    """How far above the law a run is whose learning rate decays."""
    return 1 + (1 - part)


def curve(parameters: float, tokens: float, steps: int) -> list[tuple[float, float]]:
    """Five validations of a rung."""
    every = ceil(steps / 5)
    parts = [*(number * every / steps for number in range(1, 5)), 1.0]
    return [(part, LAW.loss(parameters, tokens * part) * factor(part)) for part in parts]


def test_from_its_first_point_a_curve_is_above_the_law_as_its_rungs_are(target: Trial) -> None:
    # Rungs of steps that five does not divide are first validated after a fifth; so many steps
    # differ by rung.
    curves = [
        (each.parameters, each.tokens, curve(each.parameters, each.tokens, 100 + 7 * n))
        for n, each in enumerate(POINTS)
    ]
    points = predict_curve(FIT, target, curves)
    assert points[0][0] == pytest.approx(1000 * max(each[0][0] for _, _, each in curves), abs=1)
    for step, loss, low, high in points[:-1]:
        law = LAW.loss(target.parameters, target.tokens * step / 1000)
        assert loss / law == pytest.approx(factor(step / 1000), rel=0.01)
        assert low <= loss <= high
    assert points[-1][1] == pytest.approx(LAW.loss(target.parameters, target.tokens), rel=0.01)


def test_rungs_that_were_validated_late_or_only_at_their_end_and_diverged_ones_say_nothing_of_the_curve(
    target: Trial,
) -> None:
    useful = [
        (each.parameters, each.tokens, curve(each.parameters, each.tokens, 100))
        for each in POINTS[:6]
    ]
    late = [
        (1e6, 2e7, [(1.0, 9.0)]),
        (1e6, 2e7, [(0.9, 9.0), (1.0, 8.0)]),
        (1e6, 2e7, [(0.2, 9.0)]),
        (1e6, 2e7, []),
    ]
    assert predict_curve(FIT, target, [*useful, *late]) == predict_curve(FIT, target, useful)
    assert [point[0] for point in predict_curve(FIT, target, late)] == [1000]
