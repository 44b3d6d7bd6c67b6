"""The law that fits the losses of some runs best, and the intervals of what follows from it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log

import numpy as np

from lmforge.core.errors import UserError
from lmforge.lab.ladder.draws import LawDraws
from lmforge.lab.ladder.law import DIVERGED_RATIO, Law, Losses, Point, best_law, diverged, too_short

LEVEL = 0.9  # of intervals


@dataclass(frozen=True)
class Fit:
    """The law that all values are of, and laws drawn from those that the points allow.

    `law` is `best`, which fits best, or the most central of `draws` where `best` lies at an end of
    them. `noises` has, for each of `draws`, the standard deviation of the logarithm of a run's loss
    about it. `left_out` names the points that were not used, each with the reason.
    """

    law: Law
    best: Law
    draws: tuple[Law, ...]
    noises: tuple[float, ...]
    points: tuple[Point, ...]
    left_out: tuple[tuple[str, str], ...] = ()

    def interval(
        self, value_of: Callable[[Law], float], level: float = LEVEL
    ) -> tuple[float, float]:
        """The range that holds a value of the law with probability `level`, with equal tails."""
        return interval([value_of(law) for law in self.draws], level)

    def residuals(self) -> list[float]:
        """The logarithm of each point's loss over that of the law."""
        return [
            log(each.loss / self.law.loss(each.parameters, each.tokens)) for each in self.points
        ]


def interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def fit_points(
    points: Sequence[Point],
    *,
    draws: int = 1000,
    seed: int = 0,
    diverged_ratio: float = DIVERGED_RATIO,
) -> Fit:
    """Fit the points, without diverged and short runs, and draw laws.

    The same points, `draws` and `seed` give the same fit.

    Args:
        points: of different names.
        diverged_ratio: a run whose loss is this many times that of a smaller one has diverged.

    Raises UserError where the points that remain are too few, or all of one size or token count.
    """
    left_out = diverged(points, diverged_ratio)
    left_out += too_short([each for each in points if each.name not in dict(left_out)])
    used = tuple(each for each in points if each.name not in dict(left_out))
    try:
        best, huber = best_law(used)
        laws, noises = LawDraws(Losses(used), best, huber).draw(draws, np.random.default_rng(seed))
    except UserError as error:
        names = "; ".join(f"{name} is left out: {reason}" for name, reason in left_out)
        raise UserError(f"{error} ({names})" if names else str(error)) from error
    return Fit(
        _law_of_all(best, laws, used),
        best,
        tuple(laws),
        tuple(map(float, noises)),
        used,
        tuple(left_out),
    )


def _law_of_all(best: Law, draws: Sequence[Law], points: Sequence[Point]) -> Law:
    """The best law, or the draw that is nearest the middle in all respects.

    It is the latter where the best is outside an interval in any respect. The best law can be at an
    end of what is possible, such as A = 0, and predict what hardly any draw does.
    """
    largest = [max(getattr(each, name) for each in points) for name in ("parameters", "tokens")]
    places = [
        (times * largest[0], more * largest[1]) for times in (0.1, 1, 10) for more in (0.1, 1, 10)
    ]
    values = np.array(
        [
            [
                law.E,
                law.A * largest[0] ** -law.alpha,
                law.alpha,
                law.B * largest[1] ** -law.beta,
                law.beta,
            ]
            + [law.loss(*place) for place in places]
            for law in (best, *draws)
        ]
    )
    low, high = np.quantile(values[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    if ((low <= values[0]) & (values[0] <= high)).all():
        return best
    ranks = values[1:].argsort(0).argsort(0)
    return draws[int(np.argmin(((ranks / len(draws) - 0.5) ** 2).sum(1)))]
