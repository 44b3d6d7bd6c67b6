"""Draws laws that the losses of some runs allow, for the intervals of a fit.

They are drawn by their probability. The noise is unknown, so the likelihood is Student's t; and for
given exponents the law is linear in its other three parameters, so that these are drawn in closed
form. The prior is Jeffreys', which depends on no parametrization: it gives equal volumes of
predicted losses equal weight, so that an interval holds the truth as often as that of a linear
model with unknown noise.

Not a bootstrap over runs: of nine runs a resample has six different ones on average, which five
parameters fit nearly exactly. benchmarks/ladder_law.py measures how often intervals hold the truth.
"""

import numpy as np

from lmforge.core.errors import UserError
from lmforge.lab.ladder.law import EXPONENTS, NUM_FITTED, Array, Law, Losses, least_squares

PROPOSALS = 8  # for each law that is drawn
# Standard deviation of the logarithm of a loss, where five runs leave nothing to estimate it from;
# as of one further run.
ASSUMED_NOISE = 0.01
CELLS = 40  # of the grid, for each exponent
UNLIKELY = 12.0  # nats below the likeliest cell: the grid need not hold it
ANYWHERE = 0.1  # of the proposals, evenly over the grid


class LawDraws:
    """The laws that `losses` allow.

    `law` is the robust fit; `huber` is where its loss becomes linear.
    """

    def __init__(self, losses: Losses, law: Law, huber: float) -> None:
        self._losses = losses
        sizes = np.exp(losses.sizes + losses.centre)
        self._fitted = np.array([law.loss(*each) for each in sizes])
        residuals = losses.log_losses - np.log(self._fitted)
        near = np.mean(np.abs(residuals) < huber)
        # Huber's pseudo-values and correction for few points (Robust Statistics, 7.6): least
        # squares on them has the variance of the robust fit.
        correction = 1 + NUM_FITTED / len(residuals) * (1 - near) / near
        self._targets = 1 + np.clip(residuals, -huber, huber) / near * correction
        five = len(residuals) == NUM_FITTED
        self._count = len(residuals) + five
        self._assumed = ASSUMED_NOISE**2 if five else 1e-12

    def draw(self, count: int, rng: np.random.Generator) -> tuple[list[Law], Array]:
        """`count` laws, and for each the deviation of a run's loss about it.

        That is the standard deviation of the loss's logarithm. Raises UserError where the points
        allow no law.
        """
        exponents, log_weights = self._propose_exponents(PROPOSALS * count, rng)
        columns, gram, log_volume = self._problem(exponents)
        best = np.linalg.solve(gram, (self._targets @ columns)[:, :, None])
        squares = self._squares(columns, best[:, :, 0])
        freedom = self._count - 3
        normal = np.linalg.solve(
            np.linalg.cholesky(gram).swapaxes(1, 2), rng.standard_normal(best.shape)
        )
        terms = (
            best[:, :, 0]
            + normal[:, :, 0] * np.sqrt(squares / rng.chisquare(freedom, len(best)))[:, None]
        )
        allowed = (terms[:, 0] >= 0) & (terms[:, 1:] > 0).all(1)
        log_terms = np.log(np.where(allowed[:, None], terms[:, 1:], 1)).sum(1)
        if not allowed.any():
            raise UserError(
                "ladder: no law fits these runs: their losses do not fall with size and tokens;"
                " train others"
            )
        log_weights += (
            log_volume + log_terms - np.linalg.slogdet(gram)[1] / 2 - freedom / 2 * np.log(squares)
        )
        weights = np.where(allowed, np.exp(log_weights - log_weights[allowed].max()), 0)
        even = (np.arange(count) + rng.random()) / count
        chosen = rng.permutation(
            np.searchsorted(np.cumsum(weights) / weights.sum(), even).clip(max=len(weights) - 1)
        )
        noises = np.sqrt(
            self._squares(columns[chosen], terms[chosen]) / rng.chisquare(self._count, count)
        )
        return [self._losses.law(exponents[each], terms[each]) for each in chosen], noises

    def _problem(self, exponents: Array) -> tuple[Array, Array, Array]:
        """The linear problem of exponents [laws, 2].

        Returns the columns [laws, points, 3] over the losses of the fitted law, their Gram
        matrices, and the logarithm of the volume [laws] of the losses that a unit of each of the
        five parameters spans, at terms of 1.
        """
        columns = self._losses.columns(exponents) / self._fitted[:, None]
        slopes = np.concatenate([columns, columns[:, :, 1:] * self._losses.sizes], 2)
        gram = slopes.swapaxes(1, 2) @ slopes
        scale = np.sqrt(np.einsum("ltt->lt", gram))
        scaled = gram / (scale[:, :, None] * scale[:, None]) + 1e-14 * np.eye(NUM_FITTED)
        return columns, gram[:, :3, :3], np.linalg.slogdet(scaled)[1] / 2 + np.log(scale).sum(1)

    def _squares(self, columns: Array, terms: Array) -> Array:
        """The sum of squared residuals of each law."""
        residuals = self._targets - np.einsum("lpt,lt->lp", columns, terms)
        return (residuals**2).sum(1) + self._assumed

    def _propose_exponents(self, count: int, rng: np.random.Generator) -> tuple[Array, Array]:
        """Exponents [count, 2], evenly distributed in cells of a grid, and their log weights."""
        bounds = np.log([EXPONENTS, EXPONENTS]).T
        low, high = bounds
        while True:
            width = (high - low) / CELLS
            grid = np.stack(
                np.meshgrid(*(low[:, None] + width[:, None] * (np.arange(CELLS) + 0.5))), -1
            ).reshape(-1, 2)
            likely = self._log_likelihoods(np.exp(grid))
            kept = grid[likely > likely.max() - UNLIKELY]
            span = high - low
            low, high = np.clip([kept.min(0) - width, kept.max(0) + width], *bounds)
            if (high - low > span / 2).all():
                break
        chances = np.exp(likely - likely.max())
        chances = (1 - ANYWHERE) * chances / chances.sum() + ANYWHERE / len(grid)
        cells = rng.choice(len(grid), count, p=chances)
        logs = grid[cells] + width * (rng.random((count, 2)) - 0.5)
        return np.exp(logs), logs.sum(1) - np.log(chances[cells])

    def _log_likelihoods(self, exponents: Array) -> Array:
        """The approximate log probability of exponents [laws, 2], in logarithmic units of them."""
        columns, gram, log_volume = self._problem(exponents)
        weights = np.ones(columns.shape[:2])
        terms = least_squares(columns, weights, weights * self._targets)
        log_terms = np.log(np.maximum(terms[:, 1:], 1e-3 * terms.sum(1, keepdims=True))).sum(1)
        fits = (
            -(self._count - 3) / 2 * np.log(self._squares(columns, terms))
            - np.linalg.slogdet(gram)[1] / 2
        )
        return log_volume + log_terms + fits + np.log(exponents).sum(1)
