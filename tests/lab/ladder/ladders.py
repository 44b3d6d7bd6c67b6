"""Ladders of known laws, for tests."""

from itertools import product

import numpy as np

from lmforge.lab.ladder.law import Law, Point

LAW = Law(E=1.82, A=482.0, alpha=0.348, B=2085.0, beta=0.366)
SIZES, RATIOS = (6e4, 1.5e5, 4e5, 1e6), (8, 20, 50)


def ladder(law: Law = LAW, noise: float = 0.0, seed: int = 0) -> list[Point]:
    """Twelve runs. `noise` is the standard deviation of the logarithm of their losses."""
    errors = noise * np.random.default_rng(seed).standard_normal(12)
    shapes = [(size, ratio * size) for size, ratio in product(SIZES, RATIOS)]
    return [
        Point(f"rung-{number}", *shape, law.loss(*shape) * float(np.exp(error)))
        for number, (shape, error) in enumerate(zip(shapes, errors, strict=True))
    ]
