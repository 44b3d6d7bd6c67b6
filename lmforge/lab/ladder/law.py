"""The law L(N, D) = E + A/N^alpha + B/D^beta, and the one that fits the losses of some runs best.

Hoffmann et al. (arXiv 2203.15556) state the law, Besiroglu et al. (2404.10102) correct its fit, and
Czech et al. (2603.22339) show that parabolas through runs of equal FLOPs are biased, and that
variable projection is not: where alpha and beta are given, the other three follow from a linear
problem, so that only two dimensions are searched.

N is the number of parameters in matrix products with each token (`ParameterCount.active_matmul`):
without the input embedding, with the head. So 6 N D is nearly what FLOPS_CONVENTION counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, isfinite

import numpy as np
from numpy.typing import NDArray

from lmforge.core.errors import UserError, format_count

Array = NDArray[np.float64]

MIN_POINTS = NUM_FITTED = 5
EXPONENTS = (0.02, 2.0)  # the lowest and highest alpha and beta; published ones are 0.05 to 1
# A run whose loss is this much above that of one with no more parameters and tokens did not learn
# as the others did.
DIVERGED_RATIO = 1.1
# A run with fewer steps has not left its fast beginning, and is above the law; so many other runs
# must remain to say so.
SHORT_STEPS = 250
LEAST_OTHERS = 2 * NUM_FITTED
# Where Huber's loss becomes linear, in standard deviations. With few runs more of them are taken
# for outliers than are.
HUBER_DEVIATIONS = 2.0
FIRST_HUBER = 1e-3  # in the fit that gives the standard deviation; the value of Hoffmann et al.
MIN_DEVIATION = 1e-5
REWEIGHTINGS = 20


@dataclass(frozen=True)
class Point:
    """A run of a ladder.

    parameters: in matrix products. tokens: of training. loss: the last one, in nats per held-out
    token. steps: where they are known.
    """

    name: str
    parameters: float
    tokens: float
    loss: float
    steps: int | None = None


@dataclass(frozen=True)
class Law:
    """L(N, D) = E + A/N^alpha + B/D^beta, in nats per token."""

    E: float
    A: float
    alpha: float
    B: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        return float(self.E + self.A * parameters**-self.alpha + self.B * tokens**-self.beta)


def diverged(points: Sequence[Point], ratio: float) -> list[tuple[str, str]]:
    """The names of the points that a fit leaves out, each with the reason.

    ratio: the most over the loss of a smaller run.
    """
    usable = [each for each in points if isfinite(each.loss) and each.loss > 0]
    found = [(each.name, f"its loss is {each.loss}") for each in points if each not in usable]
    for each in usable:
        smaller = [
            other
            for other in usable
            if other.parameters <= each.parameters and other.tokens <= each.tokens
        ]
        best = min(smaller, key=lambda other: other.loss)
        if each.loss > ratio * best.loss:
            than = f"that of the smaller {best.name} {best.loss:.3f}"
            found.append((each.name, f"its loss is {each.loss:.3f}, {than}"))
    return found


def too_short(points: Sequence[Point]) -> list[tuple[str, str]]:
    """The names of the points that a fit leaves out for their few steps, each with the reason.

    There are none where too few would be left, or all of one size or token count.
    """
    short = [each for each in points if each.steps is not None and each.steps < SHORT_STEPS]
    others = [each for each in points if each not in short]
    sizes = {each.parameters for each in others}
    token_counts = {each.tokens for each in others}
    if len(others) < LEAST_OTHERS or len(sizes) == 1 or len(token_counts) == 1:
        return []
    return [
        (each.name, f"it has {each.steps} steps, and below {SHORT_STEPS} a loss is above the law")
        for each in short
    ]


def best_law(points: Sequence[Point], huber: float | None = None) -> tuple[Law, float]:
    """The law with the smallest sum of Huber's losses, and where that loss becomes linear.

    The losses are of log residuals. The latter is `huber`, or else HUBER_DEVIATIONS. Raises
    UserError where the points cannot fix a law.
    """
    missing = MIN_POINTS - len(points)
    if missing > 0:
        more = format_count(missing, "more run")
        runs = format_count(len(points), "run")
        raise UserError(
            f"ladder: the law has five parameters, and {runs} cannot fix them: add at least {more}"
        )
    places = len({(each.parameters, each.tokens) for each in points})
    if places < MIN_POINTS:
        runs = f"{len(points)} runs of {places} different sizes and token counts"
        raise UserError(
            f"ladder: the law has five parameters, and {runs} cannot fix them: at least"
            f" {MIN_POINTS} must differ"
        )
    for what, values in (
        ("size", {each.parameters for each in points}),
        ("token count", {each.tokens for each in points}),
    ):
        if len(values) < 2:
            raise UserError(
                f"ladder: all runs have the same {what}: the law needs at least two, better four"
            )
    losses = Losses(points)
    exponents = losses.search(huber or FIRST_HUBER)
    if huber is None:
        huber = HUBER_DEVIATIONS * losses.deviation(exponents, FIRST_HUBER)
        exponents = losses.search(huber, exponents)
    return losses.law(exponents[0], losses.solve(exponents, huber)[0][0]), huber


class Losses:
    """Points as arrays [points].

    Parameters and tokens are divided by their geometric means, so that the columns of the linear
    problem have like sizes; `terms` are E, and A and B of the sizes so divided.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        sizes = np.log([[float(each.parameters), float(each.tokens)] for each in points])
        self.centre = sizes.mean(0)
        self.sizes = sizes - self.centre
        self.log_losses = np.log([each.loss for each in points])

    def columns(self, exponents: Array) -> Array:
        """Exponents [laws, 2] → the factors of the terms, [laws, points, 3]."""
        powers = np.exp(-exponents[:, None] * self.sizes)
        return np.concatenate([np.ones_like(powers[:, :, :1]), powers], 2)

    def law(self, exponents: Array, terms: Array) -> Law:
        """The law of exponents [2] and terms [3]."""
        E, A, B = map(float, terms * np.exp(np.append(0, exponents * self.centre)))
        return Law(E, A, float(exponents[0]), B, float(exponents[1]))

    def solve(self, exponents: Array, huber: float) -> tuple[Array, Array]:
        """Exponents [laws, 2] → the best terms [laws, 3], and their sums of Huber's losses [laws].

        No term is negative. The problem is solved again with new weights, and with the logarithm
        taken as linear about the last solution.
        """
        columns = self.columns(exponents)
        predicted = np.broadcast_to(np.exp(self.log_losses), columns.shape[:2])
        for _ in range(REWEIGHTINGS):
            residuals = self.log_losses - np.log(predicted)
            weights = np.minimum(1, huber / np.maximum(np.abs(residuals), 1e-12)) / predicted**2
            terms = least_squares(columns, weights, predicted * (1 + residuals))
            last = predicted
            predicted = np.einsum("lpt,lt->lp", columns, terms)
            if np.abs(predicted - last).max() < 1e-7:
                break
        sizes = np.abs(self.log_losses - np.log(predicted))
        return terms, np.where(sizes < huber, sizes**2 / 2, huber * (sizes - huber / 2)).sum(1)

    def search(self, huber: float, start: Array | None = None) -> Array:
        """The best exponents [1, 2], from a grid or `start`, by ever finer grids about the best."""
        low, high = np.log(EXPONENTS)
        near = np.array([(0, 0), *product((-2, -1, 0, 1, 2), repeat=2)])
        best = 0
        step = (high - low) / 20
        if start is None:
            grid = np.array(list(product(np.linspace(low, high, 21), repeat=2)))
            best = int(np.argmin(self.solve(np.exp(grid), huber)[1]))
        else:
            grid = np.log(start)
        while step > 1e-4:  # of a logarithm
            grid = np.clip(grid[best] + step * near, low, high)
            best = int(np.argmin(self.solve(np.exp(grid), huber)[1]))
            if np.abs(near[best]).max() < 2:
                step /= 3
        return np.exp(grid[best : best + 1])

    def deviation(self, exponents: Array, huber: float) -> float:
        """The standard deviation of log residuals.

        It comes from the median of those that a robust fit does not bring to nearly 0.
        """
        terms, _ = self.solve(exponents, huber)
        residuals = np.abs(self.log_losses - np.log(self.columns(exponents)[0] @ terms[0]))
        return max(MIN_DEVIATION, 1.4826 * float(np.median(np.sort(residuals)[NUM_FITTED - 1 :])))


def least_squares(columns: Array, weights: Array, targets: Array) -> Array:
    """The solutions [problems, 3] of weighted linear problems of three unknowns, none negative.

    columns: [problems, points, 3]. weights, targets: [problems, points]. Of the sets of unknowns
    that are not 0 the best one is taken.
    """
    weighted = columns * weights[:, :, None]
    gram = weighted.swapaxes(1, 2) @ columns
    moments = np.einsum("lpt,lp->lt", weighted, targets)
    scale = np.sqrt(np.einsum("ltt->lt", gram))
    gram = gram / (scale[:, :, None] * scale[:, None]) + 1e-12 * np.eye(3)
    moments = moments / scale
    best = np.zeros_like(moments)
    gains = np.zeros(len(moments))
    for chosen in product((True, False), repeat=3):
        used = np.array(chosen)
        found = np.linalg.solve(
            np.where(used[:, None] & used, gram, np.eye(3)), (moments * used)[:, :, None]
        )[:, :, 0]
        gain = np.where((found >= 0).all(1), (found * moments).sum(1), -inf)
        best = np.where((gain > gains)[:, None], found, best)
        gains = np.maximum(gains, gain)
        if used.all() and np.isfinite(gain).all():
            break
    return best / scale
