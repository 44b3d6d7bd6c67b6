"""The mixture of gpt-oss (arXiv 2508.10925): router and experts have biases, and the two factors of
an expert's inner channels are clamped.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lmforge.core.model.blocks import Mixer
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.layers import local_weight
from lmforge.core.model.mixture.experts import Experts, MixtureOfExperts
from lmforge.core.model.mixture.grouped_mm import sum_outer_products

LIMIT = 7.0
STEEPNESS = 1.702


class ClampedExperts(Experts):
    """Experts whose inner channels are (up + 1) · gate · sigmoid(1.702 · gate), where gate ≤ 7 and
    |up| ≤ 7.

    gate_up_proj_bias: [experts, 2 · inner], first those of the gates. down_proj_bias: [experts,
    width].
    """

    def __init__(self, config: ModelConfig, mixer: Mixer) -> None:
        super().__init__(config, mixer)
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
        bias = local_weight(getattr(self, f"{name}_bias"))
        result: Tensor = _AddBiases.apply(out, bias.to(out.dtype), ends)
        return result


class _AddBiases(torch.autograd.Function):
    """out [rows, outputs] + the bias of each row's expert, of biases [experts, outputs]; `ends` as in
    `multiply_groups`.

    Their gradient is a product; that of an index would be added up in an order that may change from
    run to run.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, biases: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        rows = torch.arange(out.shape[0], dtype=ends.dtype, device=ends.device)
        return out + biases[torch.searchsorted(ends, rows, right=True)]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (ends,) = ctx.saved_tensors
        ones = gradients[0].new_ones(gradients[0].shape[0], 1)
        of_biases = sum_outer_products(ones, gradients[0], ends).squeeze(1)
        return gradients[0], of_biases, None


class ClampedMixture(MixtureOfExperts):
    experts_class = ClampedExperts

    def __init__(self, config: ModelConfig, mixer: Mixer) -> None:
        super().__init__(config, mixer)
        self.get_router().bias = nn.Parameter(torch.empty(config.num_experts))
