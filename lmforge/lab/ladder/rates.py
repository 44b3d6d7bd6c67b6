"""The learning rate of a ladder and its big run: tried on one rung, since rates transfer."""

from collections.abc import Sequence
from math import exp, inf, isfinite, log

import numpy as np

from lmforge.core.errors import UserError
from lmforge.lab.ladder.rungs import Trial, with_changes


def with_rate(rung: Trial, rate: float, name: str | None = None) -> Trial:
    """The rung with another learning rate; with a name it is another run."""
    run = {} if name is None else {"run": {"name": name}}
    return Trial(with_changes(rung.config, {"optimizer": {"lr": rate}, **run}), rung.model)


def rate_trials(rungs: Sequence[Trial], rates: Sequence[float]) -> list[Trial]:
    """A run of the rung in the middle with each rate."""
    rung = rungs[len(rungs) // 2]
    return [with_rate(rung, rate, f"{rung.name}-lr-{rate:g}") for rate in rates]


def best_rate(rates: Sequence[float], losses: Sequence[float]) -> tuple[float, bool]:
    """(the rate with the lowest loss, whether it is one of the outer ones).

    Between three rates loss is taken for a parabola of the rate's logarithm. Raises UserError where
    no run has a loss.
    """
    pairs = sorted(zip(rates, losses, strict=True))
    finite = [loss if isfinite(loss) else inf for _, loss in pairs]
    lowest = finite.index(min(finite))
    if finite[lowest] == inf:
        raise UserError("--ladder.learning_rates: every run diverged; give lower ones")
    around = pairs[max(0, lowest - 1) : lowest + 2]
    if len(around) < 3 or not all(isfinite(loss) for _, loss in around):
        return pairs[lowest][0], len(around) < 3
    square, slope, _ = np.polyfit(
        [log(rate) for rate, _ in around], [loss for _, loss in around], 2
    )
    if square > 0:
        return (float(f"{exp(-slope / (2 * square)):.3g}"), False)
    return (pairs[lowest][0], False)
