"""Rotary position embeddings (RoFormer, arXiv 2104.09864): the angle of each pair of channels, and
their rotation.

Angles are computed from positions in each forward, in fp32. The model stores nothing, so nothing is
lost when it is built on the meta device or cast to a 16-bit dtype.
"""

import math

import torch
from torch import Tensor

from lmforge.core.model.fields import UNROTATED, Rope, RopeScaling


class RotaryEmbedding:
    """Cosine and sine of the angles of each position: fp32 [sequences, length, 1, head_dim / 2].

    A plain object: FSDP's mixed precision casts the tensors among a block's arguments to bf16, also
    inside of tuples, dictionaries and dataclasses, and angles must stay fp32.
    """

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos = cos
        self.sin = sin

    def apply_rotary(self, heads: Tensor, interleaved: bool = False) -> Tensor:
        """Rotate [sequences, length, heads, head_dim]; channel i pairs with channel i + head_dim /
        2, as in transformers. Where there are angles for some channels only, those are the first.

        interleaved: neighbours are paired, but the result has the first of all pairs before the
        second ones.
        """
        width = 2 * self.cos.shape[-1]
        if width < heads.shape[-1]:
            rotated = self.apply_rotary(heads[..., :width], interleaved)
            return torch.cat((rotated, heads[..., width:]), dim=-1)
        first, second = (
            (heads[..., 0::2], heads[..., 1::2]) if interleaved else heads.chunk(2, dim=-1)
        )
        pairs = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(pairs, dim=-1).to(heads.dtype)


def rotary_frequencies(rope: Rope, head_dim: int, device: torch.device | str = "cpu") -> Tensor:
    """Angle per position of each channel pair, in radians: fp32 [head_dim / 2]."""
    if rope == UNROTATED:
        return torch.zeros(head_dim // 2, device=device)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    base = 1.0 / rope.theta**exponents
    scaling = rope.scaling
    if scaling is None:
        return base
    if scaling.rope_type == "linear":
        return base / scaling.factor
    assert scaling.original_max_position_embeddings
    # How much of the unscaled frequency is kept: of those with many full rotations within the
    # original length all of it.
    if scaling.rope_type == "yarn":

        def pair(rotations: float) -> float:
            """The channel pair, as a fraction, that turns this often."""
            wavelength = (scaling.original_max_position_embeddings or 0) / (rotations * 2 * math.pi)
            return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

        first = pair(scaling.beta_fast or 32)
        last = pair(scaling.beta_slow or 1)
        if scaling.truncate:
            first = math.floor(first)
            last = math.ceil(last)
        first = max(first, 0)
        last = min(last, head_dim - 1)
        last += 0.001 if first == last else 0
        kept = 1 - (torch.arange(head_dim // 2, dtype=torch.float32, device=device) - first) / (
            last - first
        )
    else:
        assert scaling.low_freq_factor
        assert scaling.high_freq_factor
        rotations = scaling.original_max_position_embeddings * base / (2 * math.pi)
        kept = (rotations - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
    kept = kept.clamp(0.0, 1.0)
    return base * (kept + (1 - kept) / scaling.factor)


def attention_factor(scaling: RopeScaling | None) -> float:
    """What cosines and sines are multiplied by, so that attention scores are by its square."""
    if scaling is None or scaling.rope_type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale is not None and scaling.mscale_all_dim is not None:
        return yarn_mscale(scaling, scaling.mscale) / yarn_mscale(scaling, scaling.mscale_all_dim)
    return yarn_mscale(scaling, 1.0)


def yarn_mscale(scaling: RopeScaling | None, weight: float | None) -> float:
    """1 + 0.1 · weight · ln(factor) of yarn, or 1: what attention scores are multiplied by the
    square of.
    """
    if scaling is None or scaling.rope_type != "yarn" or weight is None:
        return 1.0
    return 0.1 * math.log(max(1.0, scaling.factor)) * weight + 1


def rotary_embedding(positions: Tensor, rope: Rope | None, head_dim: int) -> RotaryEmbedding | None:
    """The rotations of positions int64 [sequences, length], computed once per forward; None where
    positions are learned.
    """
    if rope is None:
        return None
    angles = positions.float()[:, :, None, None] * rotary_frequencies(
        rope, head_dim, positions.device
    )
    cos = angles.cos()
    sin = angles.sin()
    factor = attention_factor(rope.scaling)
    return RotaryEmbedding(cos, sin) if factor == 1 else RotaryEmbedding(cos * factor, sin * factor)
