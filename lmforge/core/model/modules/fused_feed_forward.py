"""A gated feed-forward whose gate and other factor come from one matrix, as Granite 4 has it."""

from torch import Tensor, nn

from lmforge.core.model.blocks import Mixer
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.layers import ACTIVATIONS, add_linears, apply_replicated
from lmforge.core.model.rng.token_rng import TokenRng


class FusedFeedForward(nn.Module):
    input_linear: nn.Linear
    output_linear: nn.Linear

    def __init__(self, config: ModelConfig, mixer: Mixer) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.hidden_act]
        add_linears(self, mixer)

    def forward(self, x: Tensor, token_rng: TokenRng | None = None) -> Tensor:
        """x [sequences, length, width] → the same shape and dtype."""
        gate, up = apply_replicated(self.input_linear, x, token_rng).chunk(2, dim=-1)
        return apply_replicated(self.output_linear, self.activation(gate) * up, token_rng)
