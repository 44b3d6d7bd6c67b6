"""Dropout whose masks are a function of the tokens' keys: no generator, no state, the same bits on every device.

torch's own draws from a generator in the order in which operators run, so that its masks change with the number of ranks,
the micro-batches and what is recomputed. Here a token's key (data/token_rng.py) and the place in the network seed a stream of
random numbers, of which each feature has its own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# A token's stream is that of SplitMix64 (Steele, Lea, Flood 2014): a counter in steps of _STEP, scattered by `_mix`.
_COUNTER_STEP = 0x9E3779B97F4A7C15
# From one place in the network to the next; odd, and with no small multiple near one of _STEP (a test counts).
_SITE_STEP = 0xD1342543DE82EF95
# Each number of the stream is cut into so many draws of 16 bits.
_DRAWS_PER_WORD = 4
_DRAW_LEVELS = 1 << 16
# Places in a block: its attention's output and its feed-forward's.
SITES_PER_BLOCK = 2
# Other places: before the first block, and from there on those of the adapters in a block (lora.py).
NEFTUNE_SITE = -1
ADAPTER_SITE = 1 << 20


@dataclass(frozen=True)
class TokenRng:
    """What a forward pass draws from: the `rate` of dropout, and `keys` int64 [rows, length] for the tokens that are here.

    `loudness` fp32 [rows, length], where there is any, is how far NEFTune disturbs a number of a token's embedding at most.
    """

    dropout_rate: float
    rng_keys: Tensor
    neftune_scale: Tensor | None = None

    def for_block(self, layer_index: int) -> "TokenRng":
        """The same for block `number`. Made outside of the block, so that one compilation serves all of them."""
        return TokenRng(self.dropout_rate, _keys_at_site(self.rng_keys, 1 + SITES_PER_BLOCK * layer_index))

    def apply_dropout(self, x: Tensor, site: int = 0) -> Tensor:
        return dropout(x, self.dropout_rate, self.rng_keys, site)


def dropout(x: Tensor, rate: float, rng_keys: Tensor, site: int) -> Tensor:
    """`x` with each number zero with probability `rate`, the others divided by what is left of it: unbiased.

    Args:
        x: [..., width].
        rate: 0 ≤ rate < 1; its nearest multiple of 2⁻¹⁶ is what is used, for the scale too.
        keys: int64 [...], one for each row of `x`.
        site: a small number for the place in the network; every place has masks of its own.
    """
    dropped = round(rate * _DRAW_LEVELS)
    if dropped == 0:
        return x
    zeroed = random_int16(rng_keys, site, x.shape[-1]) < dropped - _DRAW_LEVELS // 2
    return x.masked_fill(zeroed, 0.0) * (_DRAW_LEVELS / (_DRAW_LEVELS - dropped))


def random_int16(rng_keys: Tensor, site: int, width: int) -> Tensor:
    """Whole numbers [..., width], each of −2¹⁵ … 2¹⁵ − 1 equally likely: those of `keys` int64 [...] at a `site`."""
    steps = torch.arange(-(-width // _DRAWS_PER_WORD), device=rng_keys.device)
    counters = _keys_at_site(rng_keys, site).unsqueeze(-1) + steps * _wrap_int64(_COUNTER_STEP)
    return _split_into_int16(_splitmix64(counters))[..., :width]


def _split_into_int16(words: Tensor) -> Tensor:
    """int64 [..., n] → [..., 4n], the 16 bits of each draw as a signed number, the lowest bits first."""
    if torch.compiler.is_compiling():
        # Fused, shifting costs nothing; and torch 2.13 writes past the end of a view in a narrower dtype on a CPU.
        shifts = torch.arange(0, 64, 16, device=words.device)
        lifted = (words.unsqueeze(-1) >> shifts) + _DRAW_LEVELS // 2 & _DRAW_LEVELS - 1
        return lifted.flatten(-2) - _DRAW_LEVELS // 2
    return words.view(torch.int16)


def _keys_at_site(rng_keys: Tensor, site: int) -> Tensor:
    return rng_keys + _wrap_int64(site * _SITE_STEP) if site else rng_keys


def _splitmix64(x: Tensor) -> Tensor:
    """data.order.mix on int64, in which torch multiplies; a shift to the right there brings the sign along, which is cut."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _wrap_int64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _wrap_int64(0x94D049BB133111EB)
    return x ^ (x >> 31 & (1 << 33) - 1)


def _wrap_int64(number: int) -> int:
    """The int64 with the last 64 bits of `number`."""
    return ((number + (1 << 63)) % (1 << 64)) - (1 << 63)
