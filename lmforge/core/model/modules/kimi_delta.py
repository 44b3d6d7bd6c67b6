"""Kimi delta attention (arXiv 2510.26692): the delta rule of gated_delta.py, whose state forgets each
channel of the keys by a factor of its own.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from lmforge.core.model.blocks import Mixer
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.layers import add_linears, local_weight
from lmforge.core.model.modules.gated_delta import DeltaRule
from lmforge.core.model.modules.recurrent import Share, project, wide
from lmforge.core.model.rng.token_rng import TokenRng


class ForgetGate(nn.Module):
    """Decays, from a few channels: −exp(A_log) · softplus(f_b(f_a(x)) + dt_bias)."""

    f_a_proj: nn.Linear
    f_b_proj: nn.Linear

    def __init__(self, mixer: Mixer, heads: int, key_dim: int) -> None:
        super().__init__()
        self.dt_bias = nn.Parameter(torch.empty(heads * key_dim))
        self.A_log = nn.Parameter(torch.empty(1, 1, heads, 1))
        add_linears(self, mixer, f"{mixer.name}.forget_gate")

    def forward(self, x: Tensor, token_rng: TokenRng | None, share: Share) -> Tensor:
        """x [sequences, length, width] → fp32 [sequences, length, heads, key_dim] of a share."""
        channels = self.dt_bias.shape
        latents = project(self.f_a_proj, x, token_rng)
        steps = project(self.f_b_proj, latents, token_rng, share, channels)
        bias = wide(share.of(local_weight(self.dt_bias), channels))
        rate = wide(share.of(local_weight(self.A_log), self.A_log.shape[2:3], 2))
        return -rate.exp() * softplus(wide(steps) + bias).unflatten(-1, (rate.shape[2], -1))


class KimiDeltaAttention(DeltaRule):
    output = "o_proj"
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    g_a_proj: nn.Linear
    g_b_proj: nn.Linear
    b_proj: nn.Linear
    o_norm: nn.Module

    def __init__(self, config: ModelConfig, mixer: Mixer) -> None:
        super().__init__(config, mixer)
        self.forget_gate = ForgetGate(mixer, self.heads, self.key_dim)

    def read_inputs(
        self, x: Tensor, token_rng: TokenRng | None, share: Share
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        channels = self.parts[:1]
        layers = (self.q_proj, self.k_proj, self.v_proj)
        qkv = [project(layer, x, token_rng, share, channels) for layer in layers]
        latents = project(self.g_a_proj, x, token_rng)
        z = project(self.g_b_proj, latents, token_rng, share, channels)
        beta = wide(project(self.b_proj, x, token_rng, share, self.value_heads)).sigmoid()
        return torch.cat(qkv, dim=-1), z, self.forget_gate(x, token_rng, share), beta

    def gate(self, out: Tensor, z: Tensor) -> Tensor:
        # In fp32 up to the end, weights too.
        return self.o_norm(wide(out)) * wide(z).sigmoid()
