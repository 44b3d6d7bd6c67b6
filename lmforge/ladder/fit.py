"""The law that fits the losses of some runs best, and the intervals of anything that follows from it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log

import numpy as np

from lmforge.ladder.draws import LawDraws
from lmforge.ladder.law import Law, Losses, Point, best_law, diverged

LEVEL = 0.9  # of intervals


@dataclass(frozen=True)
class Fit:
    """The law that fits best, and laws drawn from those that the points allow.

    `noises` has, for each of `draws`, the standard deviation of the logarithm of a run's loss about it. `left_out` names the
    points that were not used, each with the reason.
    """

    law: Law
    draws: tuple[Law, ...]
    noises: tuple[float, ...]
    points: tuple[Point, ...]
    left_out: tuple[tuple[str, str], ...] = ()

    def interval(self, value_of: Callable[[Law], float], level: float = LEVEL) -> tuple[float, float]:
        """The range that holds a value of the law with probability `level`, with equal tails."""
        return interval([value_of(law) for law in self.draws], level)

    def residuals(self) -> list[float]:
        """For each point, the logarithm of its loss over that of the law."""
        return [log(each.loss / self.law.loss(each.parameters, each.tokens)) for each in self.points]


def interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def fit_points(points: Sequence[Point], *, draws: int = 1000, seed: int = 0) -> Fit:
    """Fit the points, without diverged runs, and draw laws. The same points, `draws` and `seed` give the same fit.

    Raises UserError where the points that remain are too few, or all of one size or token count.
    """
    left_out = tuple(diverged(points))
    used = tuple(each for each in points if each.name not in dict(left_out))
    law, huber = best_law(used)
    laws, noises = LawDraws(Losses(used), law, huber).draw(draws, np.random.default_rng(seed))
    return Fit(law, tuple(laws), tuple(map(float, noises)), used, left_out)
