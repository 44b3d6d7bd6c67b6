"""The scores of tasks that the big run will have, in two steps (arXiv 2412.04403).

A law gives its loss, a sigmoid the score.

The sigmoid is fitted to the losses and scores of the runs. The loss is the bits per byte of the
task's correct answers, which have a law of their own; where runs lack them, as for answers that the
model writes, it is that of the held-out text.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import product
from math import inf
from typing import Any

import numpy as np

from lmforge.core.errors import UserError
from lmforge.lab.ladder.fit import Fit, fit_points, interval
from lmforge.lab.ladder.frontier import Estimate, Target, estimate
from lmforge.lab.ladder.law import MIN_POINTS, Array

SLOPES = np.geomspace(1.0, 30.0, 12)  # of the sigmoid, over the range of losses of the runs
CENTRES = np.linspace(-2.0, 1.5, 36)  # of the sigmoid, from the lowest loss on, in such ranges
OF_SOURCES = ("val/loss/", "val/bits_per_byte/")
OF_ANSWERS = "bits_per_byte"  # of run_task


def predict_scores(
    fit: Fit, scores: Mapping[str, Mapping[str, float]], target: Target
) -> list[dict[str, Any]]:
    """The predicted scores of the target, for each score of tasks that the runs have.

    `scores` has those of runs, by name; a run may lack some.

    Losses of single sources of data, which are logged under similar names, are no scores.
    """
    names = dict.fromkeys(
        name for each in scores.values() for name in each if not name.startswith(OF_SOURCES)
    )
    found = []
    of_answers = dict[str, Fit | None]()
    for name in names:
        task, _, metric = name.rpartition("/")
        if task not in of_answers:
            of_answers[task] = _fit_answers(fit, scores, f"{task}/{OF_ANSWERS}")
        law = of_answers[task]
        if law and metric == OF_ANSWERS:
            bits = estimate(law, lambda each: each.loss(target.parameters, target.tokens))
            found.append({"name": name, "score": asdict(bits), "caution": ""})
        elif metric != OF_ANSWERS:
            score = _predict(law or fit, scores, name, target)
            if score:
                found.append({"name": name, **score})
    return found


def _fit_answers(fit: Fit, scores: Mapping[str, Mapping[str, float]], name: str) -> Fit | None:
    """The law of the bits per byte of a task's answers; None where too few runs have them."""
    having = [each for each in fit.points if name in scores.get(each.name, {})]
    try:
        points = [replace(each, loss=scores[each.name][name]) for each in having]
        # The answers of few questions are noisy: one that is above those of a smaller run has not
        # diverged.
        return fit_points(points, draws=len(fit.draws), diverged_ratio=inf)
    except UserError:
        return None


def _predict(
    fit: Fit, scores: Mapping[str, Mapping[str, float]], name: str, target: Target
) -> dict[str, Any] | None:
    """One score; None where too few runs have it."""
    having = [each for each in fit.points if name in scores.get(each.name, {})]
    losses = np.array([each.loss for each in having])
    if len(having) < MIN_POINTS or not np.ptp(losses):
        return None
    values = np.array([scores[each.name][name] for each in having])
    chance = np.random.default_rng(0)
    laws = (fit.law, *fit.draws)
    reached = np.array([law.loss(target.parameters, target.tokens) for law in laws])
    # The first is the best fit; the others are of runs drawn with repetition.
    weights = np.ones((len(laws), len(losses)))
    weights[1:] = chance.multinomial(
        len(losses), np.full(len(losses), 1 / len(losses)), len(fit.draws)
    )
    predicted, deviation = _sigmoids(losses, values, weights, reached)
    drawn = np.clip(predicted[1:] + deviation * chance.standard_normal(len(fit.draws)), 0, 1)
    score = Estimate(float(predicted[0]), *interval(drawn.tolist()))
    flat = np.ptp(values) <= 4 * deviation  # both are 0 where all runs have the same score
    return {
        "score": asdict(score),
        "caution": "hardly changes from run to run: read the interval" if flat else "",
    }


def _sigmoids(losses: Array, scores: Array, weights: Array, at: Array) -> tuple[Array, float]:
    """The values [fits] of sigmoids that fit the scores [runs] best, and a standard deviation.

    There is a sigmoid for each row of weights [fits, runs], with its value at a loss `at` [fits];
    the deviation is that of scores about the first. Floor and height follow in closed form for each
    of a grid of shapes.
    """
    lowest = losses.min()
    span = np.ptp(losses)
    shapes = np.array(
        [(lowest + centre * span, slope / span) for centre, slope in product(CENTRES, SLOPES)]
    )

    def curve(shape: Array, loss: Array) -> Array:
        return 1 / (1 + np.exp(np.clip(shape[..., 1] * (loss - shape[..., 0]), -50, 50)))

    curves = curve(shapes[:, None], losses)  # [shapes, runs]
    weights = weights / weights.sum(1, keepdims=True)
    mean = weights @ curves.T
    mean_score = (weights @ scores)[:, None]
    variance = weights @ (curves**2).T - mean**2
    height = (weights @ (curves * scores).T - mean * mean_score) / np.maximum(variance, 1e-9)
    height = np.clip(height, 0, 1)
    floor = np.clip(mean_score - height * mean, 0, 1 - height)
    fitted = floor[:, :, None] + height[:, :, None] * curves
    errors = np.einsum("fr,fsr->fs", weights, (fitted - scores) ** 2)
    rows = np.arange(len(weights))
    best = errors.argmin(1)
    deviation = np.sqrt(errors[0, best[0]] * len(losses) / max(1, len(losses) - 4))
    return floor[rows, best] + height[rows, best] * curve(shapes[best], at), float(deviation)
