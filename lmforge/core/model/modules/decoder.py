"""A decoder with rotary positions and a gated feed-forward, by its Hugging Face tensor names:
Llama, Mistral, Qwen and others.

What distinguishes them is in their descriptions (family.py): which branches a block has, and over
what norms go. No loss here: the objective applies the head.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lmforge.core import registry
from lmforge.core.model.attention import AttentionMask, LayerCache, attend
from lmforge.core.model.blocks import Block, Mixer
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.layers import (
    LanguageModel,
    LMHead,
    RMSNorm,
    add_linears,
    add_residual,
    apply_linear,
    local_weight,
)
from lmforge.core.model.rng.token_rng import TokenRng
from lmforge.core.model.rope import RotaryEmbedding, yarn_mscale


class Attention(nn.Module):
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear

    def __init__(self, config: ModelConfig, mixer: Mixer) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.value_dim = config.head_dim
        self.interleaved = config.family.rotates_neighbours
        self.qk_norm = config.family.qk_norm if config.qk_norm else None
        self.scale = (
            None if config.query_pre_attn_scalar is None else config.query_pre_attn_scalar**-0.5
        )
        if config.multipliers is not None:
            self.scale = config.multipliers.attention_multiplier
        self._output = add_linears(self, mixer)[-1]
        self._norms = [norm.name.removeprefix(f"{mixer.name}.") for norm in mixer.norms]
        for name, norm in zip(self._norms, mixer.norms, strict=True):
            self.add_module(name, _make_norm(config, norm.size, norm.eps))

    def forward(
        self,
        x: Tensor,
        rotary: RotaryEmbedding,
        mask: AttentionMask,
        cache: LayerCache | None,
        token_rng: TokenRng | None = None,
    ) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in self.heads(x, rotary, token_rng))
        attended = self.attend(q, k, v, mask, cache)
        return apply_linear(getattr(self, self._output), attended, token_rng)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, cache: LayerCache | None
    ) -> Tensor:
        """[sequences, length, channels of all heads]."""
        if cache is not None:
            k, v = cache.update(k, v)
        attended = attend(q, k, v, mask, self.scale)[..., : self.value_dim].transpose(1, 2)
        return attended.flatten(2)

    def heads(
        self, x: Tensor, rotary: RotaryEmbedding, token_rng: TokenRng | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of x [sequences, length, width]: [sequences, length, heads,
        head_dim] each.
        """
        q, k, v = (
            apply_linear(layer, x, token_rng) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.rotated(q, k, v, rotary)

    def rotated(
        self, q: Tensor, k: Tensor, v: Tensor, rotary: RotaryEmbedding
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same, of the channels of all heads, with norms and positions."""
        if self.qk_norm == "channels":
            q, k = self._normed(q, k)
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)) for each in (q, k, v))
        if self.qk_norm == "heads":
            q, k = self._normed(q, k)
        rotate = partial(rotary.apply_rotary, interleaved=self.interleaved)
        return rotate(q), rotate(k), v

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        of_queries, of_keys = self._norms
        return getattr(self, of_queries)(q), getattr(self, of_keys)(k)


class OutputGatedAttention(Attention):
    """Attention whose heads are multiplied by sigmoids of gates, which `q_proj` computes too."""

    def forward(
        self,
        x: Tensor,
        rotary: RotaryEmbedding,
        mask: AttentionMask,
        cache: LayerCache | None,
        token_rng: TokenRng | None = None,
    ) -> Tensor:
        q, k, v = (
            apply_linear(layer, x, token_rng) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, gate = (each.flatten(2) for each in q.unflatten(-1, (-1, 2, self.head_dim)).unbind(-2))
        q, k, v = (each.transpose(1, 2) for each in self.rotated(q, k, v, rotary))
        attended = self.attend(q, k, v, mask, cache)
        return apply_linear(getattr(self, self._output), attended * gate.sigmoid(), token_rng)


class LatentAttention(Attention):
    """Attention whose heads are computed from a few channels, the latents (DeepSeek-V2, arXiv
    2405.04434): each has its own `qk_nope_head_dim` channels of keys and queries, beside rotated
    ones, which are the same in all keys.

    The narrower of queries and values are padded with zeros, for kernels and caches of one width.
    """

    q_a_proj: nn.Linear
    q_b_proj: nn.Linear
    kv_a_proj_with_mqa: nn.Linear
    kv_b_proj: nn.Linear
    q_a_layernorm: RMSNorm
    kv_a_layernorm: RMSNorm

    def __init__(self, config: ModelConfig, mixer: Mixer) -> None:
        super().__init__(config, mixer)
        self.value_dim = config.v_head_dim
        self.interleaved = config.rope_interleave
        self.has_query_latent = config.q_lora_rank > 0
        self.latents = config.kv_lora_rank, config.qk_rope_head_dim
        self.query_parts = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.key_value_parts = config.qk_nope_head_dim, config.v_head_dim
        scaling = config.rope_scaling
        self.scale = (
            yarn_mscale(scaling, scaling.mscale_all_dim if scaling else None) ** 2
            * config.qk_head_dim**-0.5
        )

    def heads(
        self, x: Tensor, rotary: RotaryEmbedding, token_rng: TokenRng | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.has_query_latent:
            queries = self.q_a_layernorm(apply_linear(self.q_a_proj, x, token_rng))
            queries = apply_linear(self.q_b_proj, queries, token_rng)
        else:
            queries = apply_linear(self.q_proj, x, token_rng)
        latent, rotated = apply_linear(self.kv_a_proj_with_mqa, x, token_rng).split(
            self.latents, dim=-1
        )
        keys_values = apply_linear(self.kv_b_proj, self.kv_a_layernorm(latent), token_rng)
        q_nope, q_rotated = queries.unflatten(-1, (-1, sum(self.query_parts))).split(
            self.query_parts, dim=-1
        )
        k_nope, v = keys_values.unflatten(-1, (-1, sum(self.key_value_parts))).split(
            self.key_value_parts, dim=-1
        )
        q_rotated = rotary.apply_rotary(q_rotated, self.interleaved)
        # With tensor parallelism each rank has the latents whole, and the gradients from its own
        # heads.
        k_rotated = rotary.apply_rotary(local_weight(rotated).unsqueeze(2), self.interleaved)
        k_rotated = k_rotated.expand(-1, -1, k_nope.shape[2], -1)
        q = torch.cat((q_nope, q_rotated), dim=-1)
        k = torch.cat((k_nope, k_rotated), dim=-1)
        q, k, v = (pad(each, (0, self.head_dim - each.shape[-1])) for each in (q, k, v))
        return q, k, v


class DecoderBlock(nn.Module):
    """One layer, by its description: for each branch, hidden + norm(mixers(norm(hidden)))."""

    def __init__(self, config: ModelConfig, block: Block) -> None:
        super().__init__()
        self._branches = block.branches
        self._multiplier = 1.0
        if config.multipliers is not None:
            self._multiplier = config.multipliers.residual_multiplier
        for branch in block.branches:
            self._add_norm(branch.before, config)
            for mixer in branch.mixers:
                make = registry.get("mixer", mixer.kind).load()
                self.add_module(mixer.name, make(config, mixer))
            self._add_norm(branch.after, config)

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
        cache: LayerCache | None = None,
        token_rng: TokenRng | None = None,
        **of_mixture: Tensor,
    ) -> Tensor:
        """hidden [sequences, length, hidden_size] → the same shape and dtype; `of_mixture`: what
        only a mixture is given.
        """
        for site, branch in enumerate(self._branches):
            x = self._norm(branch.before, hidden)
            outputs = []
            for mixer in branch.mixers:
                module = getattr(self, mixer.name)
                if mixer.mixes_tokens:
                    outputs.append(module(x, rotary, mask, cache, token_rng=token_rng))
                elif mixer.is_mixture:
                    outputs.append(module(x, token_rng=token_rng, **of_mixture))
                else:
                    outputs.append(module(x, token_rng=token_rng))
            mixed = self._norm(branch.after, sum(outputs[1:], start=outputs[0]))
            if self._multiplier != 1:
                mixed = mixed * self._multiplier
            hidden = add_residual(hidden, mixed, token_rng, site)
        return hidden


class DividedNorm(RMSNorm):
    """The last norm of a model whose logits are divided by a number. Hidden states are, so that
    whatever scores them need not know it.
    """

    def __init__(self, norm: RMSNorm, divisor: float) -> None:
        super().__init__(len(norm.weight), norm.eps, norm.offset)
        self.divisor = divisor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.divisor


class DecoderBackbone(nn.Module):
    """The modules under the name `model.`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.add_module(
            config.family.embedding, nn.Embedding(config.vocab_size, config.hidden_size)
        )
        self.layers = nn.ModuleList(DecoderBlock(config, block) for block in config.blocks)
        norm = _make_norm(config, config.hidden_size)
        if config.multipliers is not None:
            norm = DividedNorm(norm, config.multipliers.logits_scaling)
        self.add_module(config.family.final_norm, norm)


class Decoder(LanguageModel):
    """A language model of such a family, without its loss."""

    blocks_name = "model.layers"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.embedding_names = (f"model.{config.family.embedding}",)
        self.final_norm_name = f"model.{config.family.final_norm}"
        self.model = DecoderBackbone(config)
        self.lm_head = LMHead(
            config.hidden_size, config.num_outputs, softcap=config.final_logit_softcapping
        )
        self.tie_weights()
        mixtures = [
            layer.get_submodule(block.mixture.name)
            for layer, block in zip(self.model.layers, config.blocks, strict=True)
            if block.mixture
        ]
        if mixtures:
            self.balance = registry.import_named("lmforge.core.model.mixture.balance:Balance")(
                config, mixtures
            )


def _make_norm(config: ModelConfig, size: int, eps: float | None = None) -> RMSNorm:
    return RMSNorm(size, eps or config.rms_norm_eps, config.family.norm_offset)
