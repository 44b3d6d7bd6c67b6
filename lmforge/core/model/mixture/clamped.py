"""The mixture of gpt-oss (arXiv 2508.10925): router and experts have biases, and the two factors of
an expert's inner channels are clamped.
"""

import torch
from torch import Tensor, nn

from lmforge.core.model.blocks import Mixer
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.layers import local_weight, to_autocast_dtype
from lmforge.core.model.mixture.experts import Experts, MixtureOfExperts
from lmforge.core.model.mixture.grouped_mm import grouped_linear

LIMIT = 7.0
STEEPNESS = 1.702


class ClampedExperts(Experts):
    """Experts whose inner channels are (up + 1) · gate · sigmoid(1.702 · gate), where gate ≤ 7 and
    |up| ≤ 7.

    gate_up_proj_bias: [experts, 2 · inner], first those of the gates. down_proj_bias: [experts,
    width].
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        for name in self.matrices:
            experts, outputs, _ = getattr(self, name).shape
            bias = nn.Parameter(torch.empty(experts, outputs))
            self.register_parameter(f"{name}_bias", bias)

    def _gate(self, gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.clamp(max=LIMIT)
        up = up.clamp(min=-LIMIT, max=LIMIT)
        return (up + 1) * gate * torch.sigmoid(STEEPNESS * gate)

    def _multiply(self, name: str, rows: Tensor, ends: Tensor) -> Tensor:
        out = super()._multiply(name, rows, ends)
        bias = to_autocast_dtype(local_weight(getattr(self, f"{name}_bias")))
        # As a product, since its gradient adds up the rows of an expert in the same order each time.
        ones = out.new_ones(out.shape[0], 1)
        return out + grouped_linear(ones, bias.unsqueeze(-1), ends)


class ClampedMixture(MixtureOfExperts):
    experts_class = ClampedExperts

    def __init__(self, config: ModelConfig, mixer: Mixer) -> None:
        super().__init__(config, mixer)
        self.gate.bias = nn.Parameter(torch.empty(config.num_experts))
