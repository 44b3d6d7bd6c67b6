"""NEFTune: uniform noise on the embeddings in training (Jain et al., arXiv 2310.05914), drawn from the tokens' keys.

The longer a text, the less each of its tokens is disturbed. A row holds several texts, and padding: what counts is the
length of the document, so that packing changes nothing. No state, no generator; see dropout.py.
"""

import torch
from torch import Tensor

from lmforge.model.dropout import NEFTUNE_SITE, Noise, draws

_HALF_LEVELS = 1 << 15


def loudness(documents: Tensor, width: int, alpha: float) -> Tensor:
    """alpha / sqrt(tokens of its document in this row × width), for each token: fp32 [rows, length].

    `documents` int [rows, length] is as in a batch: numbered from 0 in each row, −1 on padding.
    """
    slots = documents.long() + 1
    counts = torch.zeros(slots.shape[0], slots.shape[1] + 1, device=slots.device)
    counts.scatter_add_(1, slots, torch.ones_like(slots, dtype=counts.dtype))
    return alpha * (counts.gather(1, slots) * width).rsqrt()


def disturbed(embedded: Tensor, noise: Noise | None) -> Tensor:
    """`embedded` [rows, length, width] with what `noise` does to embeddings: NEFTune, then dropout. None does nothing."""
    if noise is None:
        return embedded
    if noise.loudness is not None:
        drawn = (draws(noise.keys, NEFTUNE_SITE, embedded.shape[-1]) + 0.5) / _HALF_LEVELS
        embedded = embedded + (drawn * noise.loudness.unsqueeze(-1)).to(embedded.dtype)
    return noise.drop(embedded)
