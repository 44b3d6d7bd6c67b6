"""The fields of a model's config, and what follows from them alone. It does not import torch.

Which values a family has where none is given, and which are valid, is said in config.py.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the sequence length that a model was first
    trained on.

    `linear` divides every frequency by `factor`. `llama3` (Llama 3.1) divides the low frequencies,
    keeps the high ones and interpolates between; its bounds are the wavelengths
    original_max_position_embeddings / low_ and high_freq_factor. `yarn` (arXiv 2309.00071) does so
    between channel pairs that turn beta_fast and beta_slow times within
    original_max_position_embeddings, at whole pairs if `truncate`, and multiplies cosines and sines
    by attention_factor: where that is not given, by the paper's 0.1 ln(factor) + 1, or a ratio of
    two of these with mscale and mscale_all_dim.
    """

    rope_type: str
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None


@dataclass(frozen=True)
class Rope:
    """The rotary positions of a layer: frequencies are powers of `theta`."""

    theta: float
    scaling: RopeScaling | None = None


# Of layers without positions. All angles are 0, so that these layers compute as the others do.
UNROTATED = Rope(math.inf)


@dataclass(frozen=True)
class Multipliers:
    """Constants by which a model multiplies its embeddings, attention's scores (in place of 1 /
    sqrt(head_dim)) and what each branch adds to the residual stream, and by which it divides logits.
    """

    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0


@dataclass(frozen=True)
class ModelFields:
    """The fields of a ModelConfig, which says what they mean."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    model_type: str = "llama"
    max_position_embeddings: int = 2048
    # None: no rotary positions.
    rope_theta: float | None = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = False
    # None: as the family has it.
    attention_bias: bool = field(default=None)  # type: ignore[assignment]
    attention_output_bias: bool = field(default=None)  # type: ignore[assignment]
    mlp_bias: bool = False
    qk_norm: bool = field(default=None)  # type: ignore[assignment]
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    rope_local_base_freq: float | None = None
    query_pre_attn_scalar: float | None = None
    hidden_act: str = ""
    final_logit_softcapping: float | None = None
    multipliers: Multipliers | None = None
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    router_aux_loss_coef: float = 0.0
    output_router_logits: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    first_k_dense_replace: int = 0
    n_shared_experts: int = 0
    shared_expert_intermediate_size: int = 0
    moe_latent_size: int = 0
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    rope_interleave: bool = False
    partial_rotary_factor: float = 1.0
    no_rope_layers: tuple[int, ...] | None = None
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0
    conv_bias: bool = False
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    reward: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    # The content of a generation_config.json, if there was one.
    generation_config: dict[str, Any] | None = field(default=None, hash=False)

    @property
    def expert_size(self) -> int:
        """The channels of an expert."""
        return self.moe_intermediate_size or self.intermediate_size

    @property
    def shared_expert_size(self) -> int:
        """The channels of the experts that all tokens go to; 0 where there are none."""
        return self.shared_expert_intermediate_size or self.expert_size * self.n_shared_experts

    @property
    def qk_head_dim(self) -> int:
        """The channels of a head of queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim or self.head_dim

    @property
    def rotary_dim(self) -> int:
        """The channels of a head that are rotated."""
        return self.qk_rope_head_dim or int(self.head_dim * self.partial_rotary_factor)

    @property
    def written_layer_types(self) -> list[str]:
        """layer_types as a config.json names each layer."""
        one = "full_attention" if self.sliding_window is None else "sliding_attention"
        return [*(self.layer_types or (one,) * self.num_hidden_layers)]

    @property
    def written_rope_scaling(self) -> dict[str, Any]:
        """rope_scaling as a config.json has it; empty where positions are not stretched."""
        scaling = asdict(self.rope_scaling) if self.rope_scaling else {}
        return {name: value for name, value in scaling.items() if value is not None}

    @property
    def sparse_layers(self) -> tuple[bool, ...]:
        """Whether each layer is a mixture of experts."""
        if "moe" in (self.layer_types or ()):
            return tuple(each == "moe" for each in self.written_layer_types)
        sparse = {
            *range(self.decoder_sparse_step - 1, self.num_hidden_layers, self.decoder_sparse_step)
        }
        sparse -= {*self.mlp_only_layers, *range(self.first_k_dense_replace)}
        return tuple(
            bool(self.num_experts) and layer in sparse for layer in range(self.num_hidden_layers)
        )
