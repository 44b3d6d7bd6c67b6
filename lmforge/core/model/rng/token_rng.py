"""Dropout and NEFTune whose random numbers are a function of the tokens' rng keys: the same bits on
every device.

torch's own dropout draws from a generator in the order in which operators run, so its masks change
with the number of ranks, the micro-batches and what is recomputed. Here there is no generator and
no state: a token's key (core/data/order.py) and the site in the network seed a stream of random
numbers, one for each feature.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lmforge.core.model.rng.splitmix import splitmix64_stream, wrap_int64

# From one site in the network to the next: odd, and no small multiple of it is near one of
# COUNTER_STEP (a test counts).
_SITE_STEP = 0xD1342543DE82EF95
# Each 64-bit number of the stream is split into this many draws of 16 bits.
_DRAWS_PER_WORD = 4
_DRAW_LEVELS = 1 << 16
_HALF_LEVELS = 1 << 15
_ANY_STEP = (1 << 40) - 1
# Sites in a block: the output of attention and of the feed-forward.
SITES_PER_BLOCK = 2
# Other sites: before the first block, and from ADAPTER_SITE on those of the adapters in a block
# (lora.py).
NEFTUNE_SITE = -1
ADAPTER_SITE = 1 << 20


@dataclass(frozen=True)
class TokenRng:
    """What a forward pass draws from: the rate of dropout, and the key of each local token, int64
    [sequences, length].

    `neftune_scale` fp32 [sequences, length], if any, bounds what NEFTune adds to each number of a
    token's embedding.
    """

    dropout_rate: float
    rng_keys: Tensor
    neftune_scale: Tensor | None = None

    def for_block(self, layer_index: int) -> "TokenRng":
        """The TokenRng of a block.

        Made outside of the block, so that one compilation serves all blocks.
        """
        return TokenRng(self.dropout_rate, _keys_at_site(self.rng_keys, 1 + SITES_PER_BLOCK * layer_index))

    def apply_dropout(self, x: Tensor, site: int = 0) -> Tensor:
        return dropout(x, self.dropout_rate, self.rng_keys, site)


def dropout(x: Tensor, rate: float, rng_keys: Tensor, site: int) -> Tensor:
    """`x` with each number zeroed with probability `rate` and the others divided by 1 − rate:
    unbiased.

    Args:
        x: [..., width].
        rate: 0 ≤ rate < 1, rounded to a multiple of 2⁻¹⁶, for the scale too.
        rng_keys: int64 [...], one for each vector of `x`.
        site: a small number for the site in the network; every site has masks of its own.
    """
    dropped = round(rate * _DRAW_LEVELS)
    if dropped == 0:
        return x
    zeroed = random_int16(rng_keys, site, x.shape[-1]) < dropped - _HALF_LEVELS
    return x.masked_fill(zeroed, 0.0) * (_DRAW_LEVELS / (_DRAW_LEVELS - dropped))


def neftune_noise_scale(document_ids: Tensor, hidden_size: int, alpha: float) -> Tensor:
    """NEFTune's noise scale (arXiv 2310.05914) of each token: alpha / sqrt(tokens of its document ×
    width), fp32.

    The paper counts the tokens of a text. A packed sequence holds several, and padding: here the
    document counts, so that packing changes nothing. `document_ids` int [sequences, length] as in a
    batch: from 0 in each sequence, −1 on padding.
    """
    slots = document_ids.long() + 1
    counts = torch.zeros(slots.shape[0], slots.shape[1] + 1, device=slots.device)
    counts.scatter_add_(1, slots, torch.ones_like(slots, dtype=counts.dtype))
    return alpha * (counts.gather(1, slots) * hidden_size).rsqrt()


def perturb_embeddings(embeddings: Tensor, token_rng: TokenRng | None) -> Tensor:
    """Embeddings [sequences, length, width] with NEFTune's uniform noise, then dropout; unchanged
    where `token_rng` is None.
    """
    if token_rng is None:
        return embeddings
    if token_rng.neftune_scale is not None:
        drawn = (random_int16(token_rng.rng_keys, NEFTUNE_SITE, embeddings.shape[-1]) + 0.5) / _HALF_LEVELS
        embeddings = embeddings + (drawn * token_rng.neftune_scale.unsqueeze(-1)).to(embeddings.dtype)
    return token_rng.apply_dropout(embeddings)


def random_int16(rng_keys: Tensor, site: int, width: int) -> Tensor:
    """Integers [..., width], uniform in −2¹⁵ … 2¹⁵ − 1, of `rng_keys` int64 [...] at a site."""
    # The mask changes nothing, and keeps inductor from computing with the steps as with indices, in
    # numbers beyond 64 bits.
    steps = torch.arange(-(-width // _DRAWS_PER_WORD), device=rng_keys.device) & _ANY_STEP
    return _split_into_int16(splitmix64_stream(_keys_at_site(rng_keys, site).unsqueeze(-1), steps))[..., :width]


def _split_into_int16(words: Tensor) -> Tensor:
    """int64 [..., n] → [..., 4n], the 16 bits of each draw as a signed number, the lowest bits
    first.
    """
    if torch.compiler.is_compiling():
        # When fused, shifts cost nothing; and torch 2.13 writes past the end of a view in a
        # narrower dtype on a CPU.
        shifts = torch.arange(0, 64, 16, device=words.device)
        lifted = (words.unsqueeze(-1) >> shifts) + _HALF_LEVELS & _DRAW_LEVELS - 1
        return lifted.flatten(-2) - _HALF_LEVELS
    return words.view(torch.int16)


def _keys_at_site(rng_keys: Tensor, site: int) -> Tensor:
    return rng_keys + wrap_int64(site * _SITE_STEP) if site else rng_keys
