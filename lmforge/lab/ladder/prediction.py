"""Predictions of a fitted ladder for its big run: its loss along the way, and its best shape."""

from collections.abc import Sequence

import numpy as np

from lmforge.core.model.config import ModelConfig
from lmforge.core.model.flops import flops_per_token
from lmforge.core.options.ranges import COUNT
from lmforge.lab.ladder.fit import Fit
from lmforge.lab.ladder.frontier import predicted_loss
from lmforge.lab.ladder.rungs import Trial, scaled_parameters, shapes, tokens_per_step

# Points of the curve that is predicted for a run; the part of a run before which its loss says
# little; and the part in which a rung must first be validated to show how its loss falls.
CURVE_POINTS = 20
CURVE_FROM = 0.2
FIRST_BEFORE = 0.5


def predict_curve(
    fit: Fit, target: Trial, curves: Sequence[tuple[float, float, Sequence[tuple[float, float]]]]
) -> list[list[float]]:
    """[step, loss, low, high] of the big run at its validations.

    The law is of runs whose learning rate has decayed. Before the end a loss is higher, by the
    factor that rungs had at the same part of theirs; the interval holds the factors of nine rungs
    in ten too. Before every rung has been validated there is no such factor, and no point.

    Args:
        curves: (parameters, tokens, [(fraction of the run, loss)]) of each rung.
    """
    known = [  # of rungs that were validated along the way, and have not diverged
        (
            [at for at, _ in curve],
            [loss / fit.law.loss(parameters, tokens * at) for at, loss in curve],
        )
        for parameters, tokens, curve in curves
        if curve and curve[0][0] <= FIRST_BEFORE and curve[-1][0] == 1.0
    ]
    begin = max([CURVE_FROM, *(ats[0] for ats, _ in known)])
    points = []
    parts = np.linspace(begin, 1.0, CURVE_POINTS).tolist() if known else [1.0]
    for part in parts:
        low = middle = high = 1.0
        if part < 1.0:  # at the end factors are residuals of the fit, which its interval has
            factors = [float(np.interp(part, ats, values)) for ats, values in known]
            low, middle, high = np.quantile(factors, [0.05, 0.5, 0.95]).tolist()
        tokens = target.tokens * part
        loss = predicted_loss(fit, target.parameters, tokens)
        points.append(
            [
                round(part * target.config.train.steps),
                loss.value * middle,
                loss.low * low,
                loss.high * high,
            ]
        )
    return points


def candidates(target: Trial, flops: float) -> list[tuple[ModelConfig, float]]:
    """The models in the target's proportions among which the best is sought, with their tokens.

    The smallest comes first.
    """
    times = 4 * max(1.0, (flops / target.flops) ** 0.5)
    length = target.config.data.sequence_length
    pairs = [
        (shape, flops / flops_per_token(shape, length)) for shape in shapes(target.model, times)
    ]
    return [each for each in pairs if each[1] <= COUNT["le"] * tokens_per_step(target.config)]


def best_shape(fit: Fit, target: Trial, flops: float) -> tuple[ModelConfig, float]:
    """The model in the target's proportions with the lowest loss for so many FLOPs.

    It comes with its tokens.
    """

    def loss(candidate: tuple[ModelConfig, float]) -> float:
        shape, tokens = candidate
        return fit.law.loss(scaled_parameters(shape), tokens)

    return min(candidates(target, flops), key=loss)
