"""The scores of tasks that the big run will have, in two steps (arXiv 2412.04403): the law gives its loss, a sigmoid the score.

The sigmoid is fitted to the losses and scores of the runs. The loss is that of the held-out text, not of the tasks' answers.
"""

from collections.abc import Mapping
from dataclasses import asdict
from itertools import product
from typing import Any

import numpy as np

from lmforge.ladder.fit import Fit, interval
from lmforge.ladder.frontier import Estimate, Target
from lmforge.ladder.law import MIN_POINTS, Array

SLOPES = np.geomspace(1.0, 30.0, 12)  # of the sigmoid, over the range of losses of the runs
CENTRES = np.linspace(-2.0, 1.5, 36)  # of the sigmoid, from the lowest loss on, in such ranges
OF_SOURCES = ("val/loss/", "val/bits_per_byte/")


def predict_scores(fit: Fit, scores: Mapping[str, Mapping[str, float]], target: Target, seed: int = 0) -> list[dict[str, Any]]:
    """For each score of tasks, what the target will have. `scores` has those of runs, by name; a run may lack some.

    Losses of single sources of data, which are logged under similar names, are no scores.
    """
    names = dict.fromkeys(name for each in scores.values() for name in each if not name.startswith(OF_SOURCES))
    found = []
    for name in names:
        having = [point for point in fit.points if name in scores.get(point.name, {})]
        if len(having) >= MIN_POINTS and len({point.loss for point in having}) > 1:
            losses = np.array([point.loss for point in having])
            values = np.array([scores[point.name][name] for point in having])
            found.append({"name": name, **_predict(fit, losses, values, target, np.random.default_rng(seed))})
    return found


def _predict(fit: Fit, losses: Array, scores: Array, target: Target, chance: np.random.Generator) -> dict[str, Any]:
    laws = (fit.law, *fit.draws)
    reached = np.array([law.loss(target.parameters, target.tokens) for law in laws])
    # The first is the best fit; the others are of runs drawn with repetition.
    weights = np.ones((len(laws), len(losses)))
    weights[1:] = chance.multinomial(len(losses), np.full(len(losses), 1 / len(losses)), len(fit.draws))
    predicted, deviation = _sigmoids(losses, scores, weights, reached)
    drawn = np.clip(predicted[1:] + deviation * chance.standard_normal(len(fit.draws)), 0, 1)
    estimate = Estimate(float(predicted[0]), *interval(drawn.tolist()))
    flat = np.ptp(scores) < 4 * deviation
    return {"score": asdict(estimate), "caution": "hardly changes from run to run: read the interval" if flat else ""}


def _sigmoids(losses: Array, scores: Array, weights: Array, at: Array) -> tuple[Array, float]:
    """(for each row of weights [fits, runs], the value at a loss `at` [fits] of the sigmoid that fits the scores [runs] best;
    the standard deviation of scores about the first). Floor and height follow in closed form for each of a grid of shapes."""
    lowest, span = losses.min(), np.ptp(losses)
    shapes = np.array([(lowest + centre * span, slope / span) for centre, slope in product(CENTRES, SLOPES)])

    def curve(shape: Array, loss: Array) -> Array:
        return 1 / (1 + np.exp(np.clip(shape[..., 1] * (loss - shape[..., 0]), -50, 50)))

    curves = curve(shapes[:, None], losses)  # [shapes, runs]
    weights = weights / weights.sum(1, keepdims=True)
    mean, mean_score = weights @ curves.T, (weights @ scores)[:, None]
    variance = weights @ (curves**2).T - mean**2
    height = (weights @ (curves * scores).T - mean * mean_score) / np.maximum(variance, 1e-9)
    height = np.clip(height, 0, 1)
    floor = np.clip(mean_score - height * mean, 0, 1 - height)
    fitted = floor[:, :, None] + height[:, :, None] * curves
    errors = np.einsum("fr,fsr->fs", weights, (fitted - scores) ** 2)
    rows, best = np.arange(len(weights)), errors.argmin(1)
    deviation = np.sqrt(errors[0, best[0]] * len(losses) / max(1, len(losses) - 4))
    return floor[rows, best] + height[rows, best] * curve(shapes[best], at), float(deviation)
