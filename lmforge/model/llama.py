"""The Llama family: Llama 2 and 3, CodeLlama, SmolLM, Mistral, Qwen 2, 2.5 and 3, by their Hugging Face tensor names.

RMSNorm before each half of a block, rotary positions, grouped key and value heads, SwiGLU (arXiv 2302.13971); the
options are those of ModelConfig. No loss here: the objective applies the head.
"""

from torch import Tensor, nn
from torch.nn.functional import silu

from lmforge.model.attention import AttentionMask, LayerKVCache, attend
from lmforge.model.config import ModelConfig
from lmforge.model.layers import LanguageModel, LMHead, RMSNorm, add_residual, apply_linear
from lmforge.model.rng.token_rng import TokenRng
from lmforge.model.rope import RotaryEmbedding


class LlamaAttention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.attention_output_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.qk_norm = config.qk_norm

    def forward(
        self,
        x: Tensor,
        rotary: RotaryEmbedding,
        mask: AttentionMask,
        cache: LayerKVCache | None,
        token_rng: TokenRng | None = None,
    ) -> Tensor:
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (apply_linear(layer, x, token_rng).view(heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = rotary.apply_rotary(q).transpose(1, 2), rotary.apply_rotary(k).transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v)
        return apply_linear(self.o_proj, attend(q, k, v, mask).transpose(1, 2).flatten(2), token_rng)


class LlamaMLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(width, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, width, bias=config.mlp_bias)

    def forward(self, x: Tensor, token_rng: TokenRng | None = None) -> Tensor:
        gated = silu(apply_linear(self.gate_proj, x, token_rng)) * apply_linear(self.up_proj, x, token_rng)
        return apply_linear(self.down_proj, gated, token_rng)


class LlamaBlock(nn.Module):
    """One layer: hidden + attention(norm(hidden)), then the same with the feed-forward.

    Only the weights differ from layer to layer, so that one compilation serves all blocks.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LlamaAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self,
        hidden: Tensor,
        rotary: RotaryEmbedding,
        mask: AttentionMask,
        cache: LayerKVCache | None = None,
        token_rng: TokenRng | None = None,
    ) -> Tensor:
        """hidden [sequences, length, hidden_size] → the same shape and dtype."""
        attended = self.self_attn(self.input_layernorm(hidden), rotary, mask, cache, token_rng=token_rng)
        hidden = add_residual(hidden, attended, token_rng, 0)
        fed = self.mlp(self.post_attention_layernorm(hidden), token_rng=token_rng)
        return add_residual(hidden, fed, token_rng, 1)


class LlamaBackbone(nn.Module):
    """The modules under the name `model.`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(LanguageModel):
    """A language model of the Llama family, without its loss."""

    embedding_names = ("model.embed_tokens",)
    blocks_name = "model.layers"
    final_norm_name = "model.norm"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.model = LlamaBackbone(config)
        self.lm_head = LMHead(config.hidden_size, config.num_outputs, softcap=config.final_logit_softcapping)
        self.tie_weights()
