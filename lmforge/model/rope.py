"""Rotary position embeddings (RoFormer, arXiv 2104.09864): the angle of each pair of channels, and their rotation.

Angles are computed from positions in each forward, in fp32. The model stores nothing, so nothing is lost when it is built
on the meta device or cast to a 16-bit dtype.
"""

import math

import torch
from torch import Tensor

from lmforge.model.config import Rope


class RotaryEmbedding:
    """Cosine and sine of the angles of each position: fp32 [sequences, length, 1, head_dim / 2].

    A plain object: FSDP's mixed precision casts the tensors among a block's arguments to bf16, also inside of tuples,
    dictionaries and dataclasses, and angles must stay fp32.
    """

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos = cos
        self.sin = sin

    def apply_rotary(self, heads: Tensor) -> Tensor:
        """Rotate [sequences, length, heads, head_dim]; channel i pairs with channel i + head_dim / 2, as in transformers."""
        first, second = heads.chunk(2, dim=-1)
        rotated = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(rotated, dim=-1).to(heads.dtype)


def rotary_frequencies(rope: Rope, head_dim: int, device: torch.device | str = "cpu") -> Tensor:
    """Angle per position of each channel pair, in radians: fp32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    base = 1.0 / rope.theta**exponents
    scaling = rope.scaling
    if scaling is None:
        return base
    if scaling.rope_type == "linear":
        return base / scaling.factor
    assert scaling.low_freq_factor
    assert scaling.high_freq_factor
    assert scaling.original_max_position_embeddings
    # The number of full rotations within the original length decides how much of the unscaled frequency is kept.
    rotations = scaling.original_max_position_embeddings * base / (2 * math.pi)
    kept = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return base * (kept + (1 - kept) / scaling.factor)


def rotary_embedding(positions: Tensor, rope: Rope | None, head_dim: int) -> RotaryEmbedding | None:
    """The rotations of positions int64 [sequences, length], computed once per forward; None where positions are learned."""
    if rope is None:
        return None
    angles = positions.float()[:, :, None, None] * rotary_frequencies(rope, head_dim, positions.device)
    return RotaryEmbedding(angles.cos(), angles.sin())
