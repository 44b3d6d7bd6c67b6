"""What a fitted ladder says of its big run: the loss at its end and along the way, and the recipe that is ready to start."""

from collections.abc import Sequence

import numpy as np

from lmforge.ladder.fit import Fit
from lmforge.ladder.frontier import predicted_loss
from lmforge.ladder.rungs import Trial, scaled_parameters, shapes
from lmforge.model.config import ModelConfig
from lmforge.model.flops import flops_per_token

# Points of the curve that is predicted for a run, and the part of a run before which its loss says little.
CURVE_POINTS, CURVE_FROM = 20, 0.2


def predict_curve(
    fit: Fit, target: Trial, curves: Sequence[tuple[float, float, Sequence[tuple[float, float]]]]
) -> list[list[float]]:
    """[step, loss, low, high] of the big run at its validations.

    The law is of runs whose learning rate has decayed. Before the end a loss is higher, by the factor that rungs had at the
    same part of theirs; the interval holds the factors of nine rungs in ten too.

    Args:
        curves: (parameters, tokens, [(fraction of the run, loss)]) of each rung.
    """
    points = []
    for part in np.linspace(CURVE_FROM, 1.0, CURVE_POINTS).tolist():
        factors = [
            float(np.interp(part, [at for at, _ in curve], [loss for _, loss in curve]))
            / fit.law.loss(parameters, tokens * part)
            for parameters, tokens, curve in curves
            if curve and curve[0][0] <= part
        ]
        # At the end they are the residuals of the fit, which its interval has already.
        low, middle, high = np.quantile(factors, [0.05, 0.5, 0.95]).tolist() if factors and part < 1.0 else (1.0, 1.0, 1.0)
        tokens = target.tokens * part
        loss = predicted_loss(fit, target.parameters, tokens)
        points.append([round(part * target.config.train.steps), loss.value * middle, loss.low * low, loss.high * high])
    return points


def best_shape(fit: Fit, target: Trial, flops: float) -> tuple[ModelConfig, float]:
    """The model in the target's proportions that reaches the lowest loss with so many FLOPs, and its tokens."""
    length = target.config.data.sequence_length

    def tokens(shape: ModelConfig) -> float:
        return flops / flops_per_token(shape, length)

    times = 4 * max(1.0, (flops / target.flops) ** 0.5)
    best = min(shapes(target.model, times), key=lambda shape: fit.law.loss(scaled_parameters(shape), tokens(shape)))
    return best, tokens(best)
