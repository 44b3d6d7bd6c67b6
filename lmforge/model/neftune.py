"""NEFTune: uniform noise on the embeddings in training (Jain et al., arXiv 2310.05914), drawn from the tokens' keys.

The longer a text, the less each of its tokens is disturbed. A row holds several texts, and padding: what counts is the
length of the document, so that packing changes nothing. No state, no generator; see dropout.py.
"""

import torch
from torch import Tensor

from lmforge.model.dropout import NEFTUNE_SITE, TokenRng, random_int16

_HALF_DRAW_LEVELS = 1 << 15


def neftune_noise_scale(document_ids: Tensor, hidden_size: int, alpha: float) -> Tensor:
    """alpha / sqrt(tokens of its document in this row × width), for each token: fp32 [rows, length].

    `documents` int [rows, length] is as in a batch: numbered from 0 in each row, −1 on padding.
    """
    slots = document_ids.long() + 1
    counts = torch.zeros(slots.shape[0], slots.shape[1] + 1, device=slots.device)
    counts.scatter_add_(1, slots, torch.ones_like(slots, dtype=counts.dtype))
    return alpha * (counts.gather(1, slots) * hidden_size).rsqrt()


def perturb_embeddings(embeddings: Tensor, token_rng: TokenRng | None) -> Tensor:
    """`embedded` [rows, length, width] with what `noise` does to embeddings: NEFTune, then dropout. None does nothing."""
    if token_rng is None:
        return embeddings
    if token_rng.neftune_scale is not None:
        drawn = (random_int16(token_rng.rng_keys, NEFTUNE_SITE, embeddings.shape[-1]) + 0.5) / _HALF_DRAW_LEVELS
        embeddings = embeddings + (drawn * token_rng.neftune_scale.unsqueeze(-1)).to(embeddings.dtype)
    return token_rng.apply_dropout(embeddings)
