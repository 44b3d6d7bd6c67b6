"""SplitMix64 on tensors (Steele, Lea, Flood 2014): random words that are a function of a key and a
number, on any device.

Only integers are computed with, so the bits are the same everywhere. core/data/order.py has the
same function for numpy.
"""

from torch import Tensor

COUNTER_STEP = 0x9E3779B97F4A7C15


def splitmix64_stream(keys: Tensor | int, counters: Tensor) -> Tensor:
    """Words `counters`, int64, of the streams of `keys`, an int or int64 that broadcasts with them:
    int64, all bits random.
    """
    return _splitmix64(keys + counters * wrap_int64(COUNTER_STEP))


def _splitmix64(x: Tensor) -> Tensor:
    """data.order.splitmix64 on int64, which torch multiplies; its right shift copies the sign,
    which is masked.
    """
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * wrap_int64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * wrap_int64(0x94D049BB133111EB)
    return x ^ (x >> 31 & (1 << 33) - 1)


def wrap_int64(number: int) -> int:
    """The int64 with the last 64 bits of `number`."""
    return ((number + (1 << 63)) % (1 << 64)) - (1 << 63)
