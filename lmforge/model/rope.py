"""Rotary positions: which angle each pair of channels turns by (RoFormer, arXiv 2104.09864), and the turning itself.

Angles are computed from positions in each forward, in fp32. Nothing is stored in the model, so nothing can be lost when
it is built on the meta device or cast to a narrow dtype.
"""

import math

import torch

from lmforge.model.config import ModelConfig


class RotaryEmbedding:
    """Cosine and sine of each position's angles: fp32 [rows, length, 1, head_dim / 2].

    A plain object, because mixed precision of FSDP casts the tensors among a block's arguments to bf16, those inside of
    tuples, dictionaries and dataclasses too, and angles must not be.
    """

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self.cos = cos
        self.sin = sin

    def apply_rotary(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate [rows, length, heads, head_dim]; channel i turns with channel i + head_dim / 2, as in transformers."""
        first, second = heads.chunk(2, dim=-1)
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(turned, dim=-1).to(heads.dtype)


def rotary_frequencies(config: ModelConfig, device: torch.device | str = "cpu") -> torch.Tensor:
    """Angle per position of each channel pair, in radians: fp32 [head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    base = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return base
    if scaling.rope_type == "linear":
        return base / scaling.factor
    assert scaling.low_freq_factor
    assert scaling.high_freq_factor
    assert scaling.original_max_position_embeddings
    # How often a channel turns round within the original length decides its share of the unscaled frequency.
    turns = scaling.original_max_position_embeddings * base / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return base * (kept + (1 - kept) / scaling.factor)


def rotary_embedding(positions: torch.Tensor, config: ModelConfig) -> RotaryEmbedding:
    """The rotation of each position: int64 [rows, length] → cosines and sines, made once per forward."""
    angles = positions.float()[:, :, None, None] * rotary_frequencies(config, positions.device)
    return RotaryEmbedding(angles.cos(), angles.sin())
