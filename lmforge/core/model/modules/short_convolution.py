"""The gated short convolution of LFM2: out(C ∘ conv(B ∘ x)), with B, C and x from one matrix."""

from torch import Tensor, nn

from lmforge.core.model.attention import LayerCache
from lmforge.core.model.blocks import Mixer
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.layers import add_linears
from lmforge.core.model.modules.recurrent import (
    CausalConvolution,
    RecurrentMixer,
    Share,
    project,
)
from lmforge.core.model.rng.token_rng import TokenRng


class ShortConvolution(RecurrentMixer):
    in_proj: nn.Linear

    def __init__(self, config: ModelConfig, mixer: Mixer) -> None:
        super().__init__()
        self.heads = config.hidden_size
        self.conv = CausalConvolution(
            config.hidden_size, config.linear_conv_kernel_dim, config.conv_bias
        )
        add_linears(self, mixer)

    def mix(
        self,
        x: Tensor,
        document_ids: Tensor | None,
        cache: LayerCache | None,
        token_rng: TokenRng | None,
        share: Share,
    ) -> Tensor:
        channels = (self.heads,)
        projected = project(self.in_proj, x, token_rng, share, 3 * channels)
        before, after, values = projected.chunk(3, dim=-1)
        return after * self.conv(before * values, document_ids, cache, share, channels)
