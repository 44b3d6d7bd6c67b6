"""Conclusions from a fit about larger runs: their loss, and the best size for a number of FLOPs.

They include what another size costs.
FLOPs are `flops_per_token` of the target over its parameters, times parameters and tokens:
FLOPS_CONVENTION for its shape, and nearly that for models of other sizes. Everything is plain
values for JSON: `conclusions` has all of it.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import combinations
from math import exp, isfinite, log
from operator import attrgetter
from typing import Any

import numpy as np

from lmforge.core.errors import UserError
from lmforge.lab.ladder.fit import LEVEL, Fit, fit_points, interval
from lmforge.lab.ladder.law import EXPONENTS, Law

FAR = 100  # FLOPs of the target over those of the largest run: beyond, a law says little
NOISY = 0.015  # deviation of runs from the law: twice that of seeds of the quickstart
FLAT = 0.01  # of the loss: sizes that cost no more are as good
SIZE_RATIOS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 4.0)  # over the best size
FRONTIER_POINTS = 30
CHECK_DRAWS = 200


@dataclass(frozen=True)
class Target:
    """The big run. `parameters` as in `Point`; `bytes_per_token` is of its held-out text."""

    parameters: float
    tokens: float
    flops_per_token: float
    bytes_per_token: float | None = None

    @property
    def flops(self) -> float:
        return self.flops_per_token * self.tokens

    def flops_of(self, parameters: float, tokens: float) -> float:
        return self.flops_per_token / self.parameters * parameters * tokens

    def tokens_of(self, flops: float, parameters: float) -> float:
        return flops / (self.flops_per_token / self.parameters * parameters)


@dataclass(frozen=True)
class Estimate:
    """A value of the law, and its interval.

    The interval is that of LEVEL of the laws that the runs allow, widened to hold the value.
    """

    value: float
    low: float
    high: float


def estimate(fit: Fit, value_of: Callable[[Law], float]) -> Estimate:
    return _estimate(value_of(fit.law), [value_of(law) for law in fit.draws])


def _estimate(value: float, drawn: list[float]) -> Estimate:
    low, high = interval(drawn)
    return Estimate(value, min(low, value), max(high, value))


def predicted_loss(fit: Fit, parameters: float, tokens: float) -> Estimate:
    """The loss of one run, in nats per token.

    The interval has the noise of that run too, so that it holds what is measured.
    """
    chance = np.random.default_rng(0).standard_normal(len(fit.draws))
    pairs = zip(fit.draws, fit.noises, chance, strict=True)
    losses = [law.loss(parameters, tokens) * exp(noise * one) for law, noise, one in pairs]
    return _estimate(fit.law.loss(parameters, tokens), losses)


def best_size(law: Law, target: Target, flops: float) -> float:
    """The parameters with the lowest loss for a number of FLOPs."""
    log_pairs = log(target.tokens_of(flops, 1))  # parameters times tokens
    log_ratio = log(max(law.alpha * law.A, 1e-300)) - log(max(law.beta * law.B, 1e-300))
    return exp(min(max((log_ratio + law.beta * log_pairs) / (law.alpha + law.beta), 0), log_pairs))


def loss_at(law: Law, target: Target, flops: float, size_ratio: float = 1) -> float:
    """The loss for a number of FLOPs with the best size times `size_ratio`."""
    parameters = size_ratio * best_size(law, target, flops)
    return law.loss(parameters, target.tokens_of(flops, parameters))


def flops_ratio(law: Law, target: Target, flops: float, size_ratio: float) -> float:
    """The FLOPs over `flops` that reach the best loss for `flops` with another size.

    The size is the best one times `size_ratio`. Returns inf where none reach it.
    """
    parameters = size_ratio * best_size(law, target, flops)
    left = loss_at(law, target, flops) - law.loss(parameters, float("inf"))
    if left > 0:
        return target.flops_of(parameters, (law.B / left) ** (1 / law.beta)) / flops
    return float("inf")


def flat_range(law: Law, target: Target, flops: float) -> tuple[float, float]:
    """The lowest and the highest ratio to the best size whose loss is within FLAT of the best."""
    ratios = np.geomspace(1e-3, 1e3, 601)
    best = loss_at(law, target, flops)
    good = [ratio for ratio in ratios if loss_at(law, target, flops, ratio) <= (1 + FLAT) * best]
    return float(min(good)), float(max(good))


def cautions(fit: Fit, target: Target) -> list[str]:
    """Lines that a reader of the prediction must know."""
    largest = max(target.flops_of(each.parameters, each.tokens) for each in fit.points)
    lines = [f"{name} is left out: {reason}" for name, reason in fit.left_out]
    if target.flops > FAR * largest:
        times = f"{target.flops / largest:,.0f} times the FLOPs of the largest run"
        lines.append(f"the target has {times}: beyond {FAR} times a law says little")
    ratios = [each.tokens / each.parameters for each in fit.points]
    if not min(ratios) / 2 <= target.tokens / target.parameters <= 2 * max(ratios):
        lines.append(
            f"the target has {target.tokens / target.parameters:.3g} tokens for each parameter, "
            f"the runs {min(ratios):.3g} to {max(ratios):.3g}"
        )
    for name, exponent, what in (("A", "alpha", "size"), ("B", "beta", "number of tokens")):
        value = getattr(fit.best, exponent)
        if getattr(fit.best, name) == 0:
            lines.append(
                f"{name} is 0 in the best law: these runs do not show what a larger {what} gains,"
                " nor what the best size is"
            )
        elif not EXPONENTS[0] * 1.01 < value < EXPONENTS[1] / 1.01:
            lines.append(
                f"{exponent} is {value:.2g} in the best law, the end of its range: no such law fits"
                " these runs well"
            )
    noise = float(np.median(fit.noises))
    if noise > NOISY:
        lines.append(
            f"losses of the runs are {noise:.1%} from the law: are they too short, or is the"
            " learning rate too high for them? longer ones, or --ladder.learning_rates, would"
            " show it"
        )
    if fit.law != fit.best:
        lines.append(
            "the law that fits best is an extreme one of those that the runs allow: all values are"
            " of a middle one"
        )
    for name in ("alpha", "beta"):
        low, high = fit.interval(attrgetter(name))
        if high / low > (EXPONENTS[1] / EXPONENTS[0]) ** 0.5:
            lines.append(
                f"the runs hardly fix {name}: {low:.2g} to {high:.2g}; more of them, and other"
                " sizes and token counts, would"
            )
    return lines


def check_largest(fit: Fit) -> dict[str, Any] | None:
    """The run with the most FLOPs, as the smaller models predict it.

    That is what the ladder would have said of it before it was trained. None where they cannot fix
    a law.
    """
    largest = max(fit.points, key=lambda each: each.parameters * each.tokens)
    smaller = [each for each in fit.points if each.parameters < largest.parameters]
    try:
        fit_of_smaller = fit_points(smaller, draws=CHECK_DRAWS)
    except UserError:
        return None
    predicted = predicted_loss(fit_of_smaller, largest.parameters, largest.tokens)
    return {
        "name": largest.name,
        "loss": largest.loss,
        "predicted": asdict(predicted),
        "is_inside": predicted.low <= largest.loss <= predicted.high,
    }


def conclusions(fit: Fit, target: Target) -> dict[str, Any]:
    """Everything that follows from a fit about a target, as values for JSON.

    Intervals are of LEVEL.
    """
    flops = target.flops
    law = fit.law
    loss = predicted_loss(fit, target.parameters, target.tokens)
    low, high = flat_range(law, target, flops)
    own = target.parameters / best_size(law, target, flops)
    smallest = min(target.flops_of(each.parameters, each.tokens) for each in fit.points)
    return {
        "level": LEVEL,
        "law": {name: asdict(estimate(fit, attrgetter(name))) for name in asdict(law)},
        "noise": float(np.median(fit.noises)),
        "points": [
            {
                **asdict(each),
                "predicted": law.loss(each.parameters, each.tokens),
                "residual": residual,
            }
            for each, residual in zip(fit.points, fit.residuals(), strict=True)
        ],
        "left_out": [{"name": name, "reason": reason} for name, reason in fit.left_out],
        "cautions": cautions(fit, target),
        "check": check_largest(fit),
        "target": {
            **asdict(target),
            "flops": flops,
            "loss": asdict(loss),
            "bits_per_byte": _bits(loss, target),
        },
        "best": _best(fit, target, flops),
        "flat": {"low": low, "high": high},
        "sizes": [_with_size(fit, target, ratio, own) for ratio in sorted({*SIZE_RATIOS, own})],
        "frontier": [
            _best(fit, target, float(each))
            for each in np.geomspace(smallest, 10 * flops, FRONTIER_POINTS)
        ],
    }


def compare(fits: Mapping[str, Fit], target: Target) -> list[dict[str, Any]]:
    """The loss at the target of each mixture less that of every later one.

    "decided" says that its interval leaves out 0. Their losses must be of the same held-out text.
    """

    def losses(fit: Fit) -> list[float]:
        return [law.loss(target.parameters, target.tokens) for law in (fit.law, *fit.draws)]

    found = []
    for a, b in combinations(fits, 2):
        pairs = zip(losses(fits[a]), losses(fits[b]), strict=False)
        differences = [one - other for one, other in pairs]
        difference = _estimate(differences[0], differences[1:])
        found.append(
            {
                "first": a,
                "second": b,
                **asdict(difference),
                "decided": difference.low > 0 or difference.high < 0,
            }
        )
    return found


def _bits(loss: Estimate, target: Target) -> dict[str, float] | None:
    """A loss in bits per byte."""
    if target.bytes_per_token is None:
        return None
    return {name: value / log(2) / target.bytes_per_token for name, value in asdict(loss).items()}


def _best(fit: Fit, target: Target, flops: float) -> dict[str, Any]:
    """The best size, its tokens and its loss for a number of FLOPs."""
    size = estimate(fit, lambda law: best_size(law, target, flops))
    tokens = estimate(fit, lambda law: target.tokens_of(flops, best_size(law, target, flops)))
    loss = estimate(fit, lambda law: loss_at(law, target, flops))
    return {
        "flops": flops,
        "parameters": asdict(size),
        "tokens": asdict(tokens),
        "loss": asdict(loss),
    }


def _with_size(fit: Fit, target: Target, ratio: float, own: float) -> dict[str, Any]:
    """The cost of another size than the best.

    That is its loss for the same FLOPs, and FLOPs and tokens for the same loss.
    """
    flops = target.flops
    parameters = ratio * best_size(fit.law, target, flops)
    times: float | None = None
    tokens = None
    most = flops_ratio(fit.law, target, flops, ratio)
    if isfinite(most):
        times = most
        tokens = target.tokens_of(times * flops, parameters)
    return {
        "ratio": ratio,
        "is_target": ratio == own,
        "parameters": parameters,
        "tokens": target.tokens_of(flops, parameters),
        "loss": loss_at(fit.law, target, flops, ratio),
        "same_loss_flops": times,
        "same_loss_tokens": tokens,
    }
