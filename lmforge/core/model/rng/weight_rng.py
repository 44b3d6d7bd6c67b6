"""Random numbers for initial weights: number k of a tensor is a function of the tensor's key and of
k, and of nothing else.

So each rank draws only what it holds, however tensors are sharded, and all ranks together hold the
same weights. There is no generator and no state. Beside integers, numbers are only multiplied and
added, one operation after another: IEEE 754 rounds those in one way, so the bits do not depend on
the device, the number of threads or where a shard begins.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from lmforge.core.model.rng.splitmix import splitmix64_stream, wrap_int64

# int32 of uniform bits → fp32 numbers of a distribution.
Distribution = Callable[[Tensor], Tensor]

# Numbers drawn at a time. They stay in the cache of a core; a GPU needs more to be busy.
_CHUNK_PER_THREAD = 1 << 16
_GPU_CHUNK = 1 << 22
# The exponent and 10 bits of the mantissa of an fp32 number choose a segment, and the other 13 bits
# a position in it.
_FRACTION_BITS = 13
_FRACTION_MASK = (1 << _FRACTION_BITS) - 1
_SEGMENT_MASK = (1 << 31 - _FRACTION_BITS) - 1
# Those of 0.5 and of 2³¹.
_FIRST_SEGMENT = 126 << 23 - _FRACTION_BITS
_LAST_SEGMENT = 158 << 23 - _FRACTION_BITS


@torch.no_grad()
def fill_random(
    local: Tensor,
    starts: Tensor,
    key: int,
    distribution: Distribution,
    loc: float = 0.0,
    scale: float = 1.0,
) -> None:
    """Fill a rank's part of a tensor with loc + scale · numbers of `distribution`, computed in
    fp32, in place.

    Args:
        local: [runs, length], of any dtype: each row holds neighbours in the flattened full tensor.
        starts: int64 [runs], on the same device: the index of each row's first number in the
        flattened full tensor.
        key: of the tensor, 64 bits.
    """
    runs, length = local.shape
    chunk = _GPU_CHUNK if local.is_cuda else _CHUNK_PER_THREAD * torch.get_num_threads()
    columns = max(1, min(length, chunk))
    rows = max(1, chunk // columns)
    for top in range(0, runs, rows):
        for left in range(0, length, columns):
            target = local[top : top + rows, left : left + columns]
            drawn = distribution(
                random_int32(key, starts[top : top + rows] + left, target.shape[1])
            ).mul_(scale)
            target.copy_(drawn.add_(loc) if loc else drawn)


def random_int32(key: int, starts: Tensor, length: int) -> Tensor:
    """Numbers `starts` … `starts` + length − 1 of a key: int32 [runs, length], all bits random.

    `starts` is int64 [runs].

    Numbers 2i and 2i + 1 are the halves of word i of the key's stream, the lower half first.
    """
    words = torch.arange(length // 2 + 1, device=starts.device)
    halves = splitmix64_stream(wrap_int64(key), (starts >> 1).unsqueeze(-1) + words).view(
        torch.int32
    )
    return torch.where(
        (starts & 1).bool().unsqueeze(-1), halves[:, 1 : length + 1], halves[:, :length]
    )


def standard_uniform(bits: Tensor) -> Tensor:
    """Numbers in −1 … 1."""
    return bits.float().add_(0.5).mul_(2.0**-31)


def standard_normal(bits: Tensor) -> Tensor:
    """Numbers of mean 0 and variance 1: the inverse of the normal distribution function, to 3e-7,
    up to ±6.3.

    The magnitude of a signed number is a probability in 0 … 1/2. torch's `ndtri` and `log` may
    round otherwise at the end of a tensor than within, and cost more. Here each octave of the
    probability has a table of 1,024 segments, and the quantile is interpolated linearly between
    their ends: where it grows without bound, segments are as much shorter.
    """
    quantiles, slopes = _normal_tables(bits.device)
    signed = bits.flatten().float().add_(0.5)
    as_bits = signed.view(torch.int32)
    segments = (as_bits >> _FRACTION_BITS).bitwise_and_(_SEGMENT_MASK).sub_(_FIRST_SEGMENT)
    fractions = as_bits.bitwise_and(_FRACTION_MASK).float()
    drawn = (
        slopes.index_select(0, segments).mul_(fractions).add_(quantiles.index_select(0, segments))
    )
    return drawn.copysign_(signed).view(bits.shape)


@cache
def _normal_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """|quantile| at the beginning of each segment, and its change from one fraction to the next:
    fp32.

    Segments begin at 0.5, which stands for a probability of 2⁻³³, and end with that of 2³¹, which
    stands for 1/2.
    """
    begins = (
        torch.arange(_FIRST_SEGMENT, _LAST_SEGMENT + 1, dtype=torch.int32) << _FRACTION_BITS
    ).view(torch.float32)
    quantiles = torch.special.ndtri(begins.double() * 2.0**-32).neg()
    slopes = quantiles.diff(append=quantiles[-1:]) / (_FRACTION_MASK + 1)
    return quantiles.float().to(device), slopes.float().to(device)
