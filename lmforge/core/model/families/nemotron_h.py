"""Nemotron-H (arXiv 2504.03624): one mixer a layer, which is Mamba-2, attention without positions,
a feed-forward by the square of relu, or a mixture of such experts with a sigmoid router.

Steps of Mamba-2 are limited by time_step_limit alone, as published code does (transformers raises
them to time_step_min as well, but not while it decodes). Layers that predict further tokens, which
a folder may have, are not read.
"""

from typing import Any

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import quoted
from lmforge.core.model.blocks import Block, Branch, Linear, Mixer
from lmforge.core.model.family import (
    EXPERT_FIELDS,
    Family,
    grouped_attention,
    mixture_of_experts,
)
from lmforge.core.model.fields import ModelFields
from lmforge.core.model.state_space import (
    OLD_TYPES,
    mamba2,
    read_time_step_limit,
    write_time_step_limit,
)

# By their letters in hybrid_override_pattern, in transformers' words.
_TYPES = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
# Older names of fields.
_OLD_NAMES = {
    "mamba_n_groups": "linear_num_key_heads",
    "mamba_d_conv": "linear_conv_kernel_dim",
    "mamba_conv_bias": "conv_bias",
}


def _block(family: Family, config: ModelFields, layer: int) -> Block:
    kind = config.written_layer_types[layer]
    if kind == "linear_attention":
        mixer = mamba2(config)
    elif kind == "full_attention":
        mixer = grouped_attention(family, config, name="mixer")
    elif kind == "moe":
        mixer = mixture_of_experts(config, name="mixer", gated=False)
    else:
        width = config.hidden_size
        inner = config.intermediate_size
        linears = (
            Linear("mixer.up_proj", width, inner),
            Linear("mixer.down_proj", inner, width, residual=True),
        )
        mixer = Mixer("mixer", "feed-forward", linears)
    return Block((Branch((mixer,), "norm"),))


def _read(content: dict[str, Any]) -> dict[str, Any]:
    """The types of layers, which say their number; no experts where none is a mixture."""
    types = content.get("layers_block_type") or content.get("layer_types")
    if not types:
        pattern = content.get("hybrid_override_pattern") or "ME*-"
        for letter in pattern:
            if letter not in _TYPES:
                raise UserError(
                    f"hybrid_override_pattern: {quoted(letter)} is not supported; use"
                    f" {', '.join(_TYPES)}"
                )
        types = [_TYPES[letter] for letter in pattern]
    types = [OLD_TYPES.get(each, each) for each in types]
    renamed = {ours: content[old] for old, ours in _OLD_NAMES.items() if old in content}
    return {
        **({} if "moe" in types else {"num_experts": 0}),
        "layer_types": types,
        "num_hidden_layers": len(types),
        **renamed,
        **read_time_step_limit(content),
    }


FAMILY = Family(
    architecture="NemotronHForCausalLM",
    classifier="",
    block=_block,
    norm_offset=0.0,
    activations=("relu2",),
    rotates="none",
    sigmoid_router=True,
    may_lack_experts=True,
    stored_experts={
        f"mixer.experts.{name}": (f"mixer.experts.{{}}.{name}.weight",)
        for name in ("up_proj", "down_proj")
    },
    embedding="embeddings",
    final_norm="norm_f",
    recurrent_type="linear_attention",
    other_types=("mlp", "moe"),
    fields=(
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
        "conv_bias",
        "time_step_limit",
        *EXPERT_FIELDS,
        "n_shared_experts",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "moe_latent_size",
        "norm_topk_prob",
        "routed_scaling_factor",
        "n_group",
        "topk_group",
    ),
    names={
        "hidden_act": "mlp_hidden_act",
        "rms_norm_eps": "layer_norm_epsilon",
        "linear_num_key_heads": "n_groups",
        "linear_num_value_heads": "mamba_num_heads",
        "linear_key_head_dim": "ssm_state_size",
        "linear_value_head_dim": "mamba_head_dim",
        "linear_conv_kernel_dim": "conv_kernel",
        "conv_bias": "use_conv_bias",
        "num_experts": "n_routed_experts",
        "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
        # transformers computes no auxiliary loss.
        "router_aux_loss_coef": "aux_loss_alpha",
    },
    defaults={
        "intermediate_size": 21504,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 128,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "conv_bias": True,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 7688,
        "shared_expert_intermediate_size": 7688,
        "norm_topk_prob": True,
    },
    required_values={
        "mamba_hidden_act": "silu",
        "use_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    dropouts=("attention_dropout", "hidden_dropout"),
    stored_prefix="backbone.",
    names_layers=True,
    unread_names=("mtp.",),
    read=_read,
    write=lambda config: {
        "hybrid_override_pattern": "".join(
            letter
            for each in config.written_layer_types
            for letter, kind in _TYPES.items()
            if kind == each
        ),
        "moe_latent_size": config.moe_latent_size or None,
        **write_time_step_limit(config),
    },
)
