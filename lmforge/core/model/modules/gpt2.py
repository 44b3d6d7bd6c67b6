"""GPT-2 by its Hugging Face tensor names: LayerNorm, learned positions, GELU. Its description is in
families/gpt2.py.

Radford et al., "Language Models are Unsupervised Multitask Learners", 2019. Dropout, if any, is on
the embeddings and on what each half of a block adds, not on attention's probabilities. No loss
here: the objective applies the head.
"""

from torch import Tensor, nn

from lmforge.core.model.attention import AttentionMask, LayerCache, attend
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.layers import (
    ACTIVATIONS,
    Conv1D,
    LanguageModel,
    LMHead,
    add_residual,
    apply_linear,
)
from lmforge.core.model.rng.token_rng import TokenRng


class GPT2Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.c_attn = Conv1D(config.hidden_size, 3 * config.hidden_size)
        self.c_proj = Conv1D(config.hidden_size, config.hidden_size)

    def forward(
        self, x: Tensor, mask: AttentionMask, cache: LayerCache | None, token_rng: TokenRng | None
    ) -> Tensor:
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (
            part.view(heads).transpose(1, 2)
            for part in apply_linear(self.c_attn, x, token_rng).chunk(3, dim=-1)
        )
        if cache is not None:
            k, v = cache.update(k, v)
        return apply_linear(
            self.c_proj, attend(q, k, v, mask).transpose(1, 2).flatten(2), token_rng
        )


class GPT2MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.hidden_act]
        self.c_fc = Conv1D(config.hidden_size, config.intermediate_size)
        self.c_proj = Conv1D(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor, token_rng: TokenRng | None = None) -> Tensor:
        return apply_linear(
            self.c_proj, self.activation(apply_linear(self.c_fc, x, token_rng)), token_rng
        )


class GPT2Block(nn.Module):
    """One layer: hidden + attention(norm(hidden)), then the same with the feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.attn = GPT2Attention(config)
        self.ln_2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.mlp = GPT2MLP(config)

    def forward(
        self,
        hidden: Tensor,
        rotary: None,
        mask: AttentionMask,
        cache: LayerCache | None = None,
        token_rng: TokenRng | None = None,
    ) -> Tensor:
        """hidden [sequences, length, hidden_size] → the same shape and dtype.

        Positions are learned, so there is no rotary embedding.
        """
        attended = self.attn(self.ln_1(hidden), mask, cache, token_rng)
        hidden = add_residual(hidden, attended, token_rng, 0)
        return add_residual(hidden, self.mlp(self.ln_2(hidden), token_rng), token_rng, 1)


class GPT2Backbone(nn.Module):
    """The modules under the name `transformer.`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.wpe = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.h = nn.ModuleList(GPT2Block(config) for _ in range(config.num_hidden_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)


class GPT2(LanguageModel):
    """GPT-2 without its loss."""

    embedding_names = ("transformer.wte", "transformer.wpe")
    blocks_name = "transformer.h"
    final_norm_name = "transformer.ln_f"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.transformer = GPT2Backbone(config)
        self.lm_head = LMHead(
            config.hidden_size, config.num_outputs, softcap=config.final_logit_softcapping
        )
        self.tie_weights()
