"""Dropout whose masks are a function of the tokens' keys: no generator, no state, the same bits on every device.

torch's own draws from a generator in the order in which operators run, so that its masks change with the number of ranks,
the micro-batches and what is recomputed. Here a token's key (data/noise.py) and the place in the network seed a stream of
random numbers, of which each feature has its own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# A token's stream is that of SplitMix64 (Steele, Lea, Flood 2014): a counter in steps of _STEP, scattered by `_mix`.
_STEP = 0x9E3779B97F4A7C15
# From one place in the network to the next; odd, and with no small multiple near one of _STEP (a test counts).
_SITE = 0xD1342543DE82EF95
# Each number of the stream is cut into so many draws of 16 bits.
_DRAWS = 4
_LEVELS = 1 << 16
# Places in a block: its attention's output and its feed-forward's.
SITES_OF_BLOCK = 2
# Other places: before the first block, and from there on those of the adapters in a block (lora.py).
NEFTUNE_SITE = -1
ADAPTER_SITE = 1 << 20


@dataclass(frozen=True)
class Noise:
    """What a forward pass draws from: the `rate` of dropout, and `keys` int64 [rows, length] for the tokens that are here.

    `loudness` fp32 [rows, length], where there is any, is how far NEFTune disturbs a number of a token's embedding at most.
    """

    rate: float
    keys: Tensor
    loudness: Tensor | None = None

    def of_block(self, number: int) -> "Noise":
        """The same for block `number`. Made outside of the block, so that one compilation serves all of them."""
        return Noise(self.rate, _at(self.keys, 1 + SITES_OF_BLOCK * number))

    def drop(self, x: Tensor, site: int = 0) -> Tensor:
        return dropout(x, self.rate, self.keys, site)


def dropout(x: Tensor, rate: float, keys: Tensor, site: int) -> Tensor:
    """`x` with each number zero with probability `rate`, the others divided by what is left of it: unbiased.

    Args:
        x: [..., width].
        rate: 0 ≤ rate < 1; its nearest multiple of 2⁻¹⁶ is what is used, for the scale too.
        keys: int64 [...], one for each row of `x`.
        site: a small number for the place in the network; every place has masks of its own.
    """
    dropped = round(rate * _LEVELS)
    if dropped == 0:
        return x
    zeroed = draws(keys, site, x.shape[-1]) < dropped - _LEVELS // 2
    return x.masked_fill(zeroed, 0.0) * (_LEVELS / (_LEVELS - dropped))


def draws(keys: Tensor, site: int, width: int) -> Tensor:
    """Whole numbers [..., width], each of −2¹⁵ … 2¹⁵ − 1 equally likely: those of `keys` int64 [...] at a `site`."""
    steps = torch.arange(-(-width // _DRAWS), device=keys.device)
    counters = _at(keys, site).unsqueeze(-1) + steps * _signed(_STEP)
    return _cut(_mix(counters))[..., :width]


def _cut(numbers: Tensor) -> Tensor:
    """int64 [..., n] → [..., 4n], the 16 bits of each draw as a signed number, the lowest bits first."""
    if torch.compiler.is_compiling():
        # Fused, shifting costs nothing; and torch 2.13 writes past the end of a view in a narrower dtype on a CPU.
        shifts = torch.arange(0, 64, 16, device=numbers.device)
        lifted = (numbers.unsqueeze(-1) >> shifts) + _LEVELS // 2 & _LEVELS - 1
        return lifted.flatten(-2) - _LEVELS // 2
    return numbers.view(torch.int16)


def _at(keys: Tensor, site: int) -> Tensor:
    return keys + _signed(site * _SITE) if site else keys


def _mix(x: Tensor) -> Tensor:
    """data.order.mix on int64, in which torch multiplies; a shift to the right there brings the sign along, which is cut."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    return x ^ (x >> 31 & (1 << 33) - 1)


def _signed(number: int) -> int:
    """The int64 with the last 64 bits of `number`."""
    return ((number + (1 << 63)) % (1 << 64)) - (1 << 63)
