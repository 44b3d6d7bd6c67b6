"""The Llama family: Llama 2 and 3, CodeLlama, SmolLM, Mistral, Qwen 2, 2.5 and 3, by their Hugging Face tensor names.

RMSNorm before each half of a block, rotary positions, grouped key and value heads, SwiGLU (arXiv 2302.13971); options
are those of shapes.ModelConfig. No loss here: the objective applies the head.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.functional import silu

from lmforge.model.attention import Mask, attend, attention_mask
from lmforge.model.cache import LayerCache, Reading
from lmforge.model.dropout import Noise
from lmforge.model.layers import Head, LanguageModel, RMSNorm, project
from lmforge.model.neftune import disturbed
from lmforge.model.rope import Rotation, rotation
from lmforge.model.shapes import ModelConfig


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries = config.num_attention_heads * config.head_dim
        kept = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kept, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kept, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.attention_output_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.qk_norm = config.qk_norm

    def forward(
        self, x: torch.Tensor, turn: Rotation, mask: Mask, cache: LayerCache | None, noise: Noise | None = None
    ) -> torch.Tensor:
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (project(layer, x, noise).view(heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = turn.turn(q).transpose(1, 2), turn.turn(k).transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            k, v = cache.append(k, v)
        return project(self.o_proj, attend(q, k, v, mask).transpose(1, 2).flatten(2), noise)


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(width, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, width, bias=config.mlp_bias)

    def forward(self, x: torch.Tensor, noise: Noise | None = None) -> torch.Tensor:
        gated = silu(project(self.gate_proj, x, noise)) * project(self.up_proj, x, noise)
        return project(self.down_proj, gated, noise)


class Block(nn.Module):
    """One layer: hidden + attention(norm(hidden)), then the same with the feed-forward.

    Nothing in it differs from layer to layer but the weights, so that one compilation serves them all.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(
        self,
        hidden: torch.Tensor,
        turn: Rotation,
        mask: Mask,
        cache: LayerCache | None = None,
        noise: Noise | None = None,
    ) -> torch.Tensor:
        """hidden [rows, length, hidden_size] → the same shape and dtype."""
        attended = self.self_attn(self.input_layernorm(hidden), turn, mask, cache, noise=noise)
        hidden = hidden + (attended if noise is None else noise.drop(attended, 0))
        fed = self.mlp(self.post_attention_layernorm(hidden), noise=noise)
        return hidden + (fed if noise is None else noise.drop(fed, 1))


class Trunk(nn.Module):
    """Everything under the name `model.`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(LanguageModel):
    """A Llama-family language model without its loss."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = Head(config.hidden_size, config.outputs)
        self.tie()

    def tie(self) -> None:
        """Make the head's weight the embedding's, where the shape says so. Repeat after `to_empty`, which parts them."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight  # type: ignore[assignment]

    @property
    def embeddings(self) -> list[nn.Embedding]:
        return [self.model.embed_tokens]

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.layers

    @property
    def final_norm(self) -> nn.Module:
        return self.model.norm

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor, noise: Noise | None = None) -> torch.Tensor:
        return disturbed(self.model.embed_tokens(tokens), noise)

    def run_blocks(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        documents: torch.Tensor,
        cache: Reading | None = None,
        numbers: Iterable[int] | None = None,
        noise: Noise | None = None,
    ) -> torch.Tensor:
        masks = {
            window: attention_mask(documents, window, self.context) if cache is None else cache.mask(window)
            for window in set(self.config.windows)
        }
        turn = rotation(positions, self.config)
        for number in range(len(self.blocks)) if numbers is None else numbers:
            kept = None if cache is None else cache.layers[number]
            drawn = None if noise is None else noise.of_block(number)
            hidden = self.blocks[number](hidden, turn, masks[self.config.windows[number]], kept, drawn)
        return hidden
