"""A decoder with rotary positions and a gated feed-forward, by its Hugging Face tensor names: Llama, Mistral, Qwen and others.

What distinguishes them is in their descriptions (family.py): which norms there are, and over what they go. No loss here: the
objective applies the head.
"""

from torch import Tensor, nn

from lmforge.model.attention import AttentionMask, LayerKVCache, attend
from lmforge.model.config import ModelConfig
from lmforge.model.layers import ACTIVATIONS, LanguageModel, LMHead, RMSNorm, add_linears, add_residual, apply_linear
from lmforge.model.mixture.balance import Balance
from lmforge.model.mixture.experts import MixtureOfExperts
from lmforge.model.rng.token_rng import TokenRng
from lmforge.model.rope import RotaryEmbedding


class Attention(nn.Module):
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    q_norm: RMSNorm
    k_norm: RMSNorm

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim, self.qk_norm = config.head_dim, config.family.qk_norm
        self.scale = None if config.query_pre_attn_scalar is None else config.query_pre_attn_scalar**-0.5
        add_linears(self, "self_attn", config)
        for norm in config.family.norms(config):
            owner, _, name = norm.name.rpartition(".")
            if owner == "self_attn":
                self.add_module(name, _make_norm(config, norm.size))

    def forward(
        self,
        x: Tensor,
        rotary: RotaryEmbedding,
        mask: AttentionMask,
        cache: LayerKVCache | None,
        token_rng: TokenRng | None = None,
    ) -> Tensor:
        q, k, v = (apply_linear(layer, x, token_rng) for layer in (self.q_proj, self.k_proj, self.v_proj))
        if self.qk_norm == "channels":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)) for each in (q, k, v))
        if self.qk_norm == "heads":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = rotary.apply_rotary(q).transpose(1, 2), rotary.apply_rotary(k).transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v)
        return apply_linear(self.o_proj, attend(q, k, v, mask, self.scale).transpose(1, 2).flatten(2), token_rng)


class GatedMLP(nn.Module):
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.hidden_act]
        add_linears(self, "mlp", config)

    def forward(self, x: Tensor, token_rng: TokenRng | None = None) -> Tensor:
        gated = self.activation(apply_linear(self.gate_proj, x, token_rng)) * apply_linear(self.up_proj, x, token_rng)
        return apply_linear(self.down_proj, gated, token_rng)


class DecoderBlock(nn.Module):
    """One layer: hidden + norm(attention(norm(hidden))), then the same with the feed-forward. The family says which of the
    norms there are.

    Only the weights differ from layer to layer, so that one compilation serves all blocks; `sparse` ones, which have a mixture
    of experts as their feed-forward, need another.
    """

    def __init__(self, config: ModelConfig, sparse: bool = False) -> None:
        super().__init__()
        (self._before_attention, self._after_attention) = config.family.attention_norms
        (self._before_mlp, self._after_mlp) = config.family.mlp_norms
        self._is_sparse = sparse
        self._add_norm(self._before_attention, config)
        self.self_attn = Attention(config)
        self._add_norm(self._after_attention, config)
        self._add_norm(self._before_mlp, config)
        self.mlp = MixtureOfExperts(config) if sparse else GatedMLP(config)
        self._add_norm(self._after_mlp, config)

    def _add_norm(self, name: str | None, config: ModelConfig) -> None:
        if name is not None:
            self.add_module(name, _make_norm(config, config.hidden_size))

    def _norm(self, name: str | None, x: Tensor) -> Tensor:
        return x if name is None else getattr(self, name)(x)

    def forward(
        self,
        hidden: Tensor,
        rotary: RotaryEmbedding,
        mask: AttentionMask,
        cache: LayerKVCache | None = None,
        token_rng: TokenRng | None = None,
        **of_mixture: Tensor,
    ) -> Tensor:
        """hidden [sequences, length, hidden_size] → the same shape and dtype; `of_mixture`: what only a mixture is given."""
        attended = self.self_attn(self._norm(self._before_attention, hidden), rotary, mask, cache, token_rng=token_rng)
        hidden = add_residual(hidden, self._norm(self._after_attention, attended), token_rng, 0)
        fed = self.mlp(self._norm(self._before_mlp, hidden), token_rng=token_rng, **of_mixture if self._is_sparse else {})
        return add_residual(hidden, self._norm(self._after_mlp, fed), token_rng, 1)


class DecoderBackbone(nn.Module):
    """The modules under the name `model.`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderBlock(config, sparse) for sparse in config.sparse_layers)
        self.norm = _make_norm(config, config.hidden_size)


class Decoder(LanguageModel):
    """A language model of such a family, without its loss."""

    embedding_names = ("model.embed_tokens",)
    blocks_name = "model.layers"
    final_norm_name = "model.norm"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.model = DecoderBackbone(config)
        self.lm_head = LMHead(config.hidden_size, config.num_outputs, softcap=config.final_logit_softcapping)
        self.tie_weights()
        if config.output_router_logits and config.router_aux_loss_coef and any(config.sparse_layers):
            self.balance = Balance(config.router_aux_loss_coef, sum(config.sparse_layers))
            for mixture in (block.mlp for block in self.model.layers if isinstance(block.mlp, MixtureOfExperts)):
                mixture.balance = self.balance


def _make_norm(config: ModelConfig, size: int) -> RMSNorm:
    return RMSNorm(size, config.rms_norm_eps, config.family.norm_offset)
