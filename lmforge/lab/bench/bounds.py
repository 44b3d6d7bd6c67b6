"""The one table of bounds on how far two trainings of the same computation may be apart.

`lmforge compare`, `lmforge doctor --parity`, the quickstart, docs/determinism.md and the tests read
it. Not here: how close results are to those of other libraries.
"""

from dataclasses import dataclass, replace
from math import inf, isnan

# The bounds are of so many steps. Later, training amplifies rounding: slowly, or at once where a
# loss spikes.
BOUND_STEPS = 20


@dataclass(frozen=True)
class Bound:
    """The largest relative differences that are allowed where `setup` is all that differs.

    loss, gradient_norm: at a step. weights: to the largest of their tensor (`weights_difference` in
    parity.py).
    """

    setup: str
    loss: float
    gradient_norm: float
    weights: float
    reason: str


EQUAL_BITS = Bound("nothing", 0, 0, 0, "every sum is added in the same order")
FP32 = Bound(
    "the split, in fp32 on a CPU",
    1e-6,
    1e-6,
    1e-6,
    "fp32 rounds by 6e-8, and sums are added in another order",
)
MUON = Bound(
    "the split, in fp32 with Muon",
    1e-6,
    1e-6,
    1e-5,
    "Muon amplifies small parts of a gradient, up to 3.4⁵ times",
)
GPU = Bound(
    "the split, in fp32 on a GPU",
    5e-5,
    5e-5,
    5e-5,
    "the kernels of a GPU choose the order of sums by shapes too",
)
# It shows least in a mean over all tokens, and most in the one element, of all weights, that moved
# most differently.
BF16 = Bound(
    "the split, in bf16",
    2e-4,
    2**-8,
    2**-6,
    "bf16 rounds by 2^-9, and under FSDP norms and embeddings too",
)
BF16_STATES = Bound(
    "the split, with weights or moments kept in bf16",
    2e-4,
    2**-6,
    2**-4,
    "what is kept in bf16 is rounded at each step",
)
BOUNDS = (EQUAL_BITS, FP32, MUON, GPU, BF16, BF16_STATES)
# Of weights where epsilon is smaller, by norms: 7e-6 was measured. A gradient that is zero but for
# rounding then becomes a whole step of AdamW, in a direction that the order of a sum decides, so
# single elements have no bound.
LARGE_EPSILON = 1e-3
WEIGHTS_OF_SMALL_EPSILON = 1e-4


def bound_of_splits(
    dtype: str,
    device_type: str,
    optimizer: str = "adamw",
    epsilon: float = LARGE_EPSILON,
    keeps_bf16: bool = False,
) -> Bound:
    """The bound between two splits of the same batches.

    Splits differ in ranks, strategies, micro-batches, threads or compilation. `dtype`, `optimizer`
    and `epsilon` are as in options; `keeps_bf16`: master weights or optimizer states are in bf16.
    """
    if keeps_bf16:
        bound = BF16_STATES
    elif dtype != "fp32":
        bound = BF16
    elif device_type == "cuda":
        bound = GPU
    else:
        bound = MUON if optimizer == "muon" else FP32
    if epsilon >= LARGE_EPSILON:
        return bound
    return replace(bound, weights=max(bound.weights, WEIGHTS_OF_SMALL_EPSILON))


def relative_difference(ours: float, theirs: float) -> float:
    """The difference of two numbers as a part of the second; infinite where one is not finite."""
    difference = abs(ours - theirs) / max(abs(theirs), 1e-12)
    return inf if isnan(difference) else difference
