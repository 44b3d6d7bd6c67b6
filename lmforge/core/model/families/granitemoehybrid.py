"""Granite 4: Mamba-2 in most layers, attention in the others, mostly without positions; then a mixture
beside a feed-forward for all tokens, or that alone; with Granite's constants.
"""

from typing import Any

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import quoted
from lmforge.core.model.blocks import Block, Branch, Linear, Mixer
from lmforge.core.model.config_checks import require_whole
from lmforge.core.model.families.granite import read_multipliers, write_multipliers
from lmforge.core.model.family import (
    EXPERT_FIELDS,
    Family,
    grouped_attention,
    mixture_of_experts,
    read_rope,
)
from lmforge.core.model.fields import ModelFields
from lmforge.core.model.state_space import (
    OLD_TYPES,
    mamba2,
    read_time_step_limit,
    write_time_step_limit,
)

RECURRENT = "linear_attention"


def _block(family: Family, config: ModelFields, layer: int) -> Block:
    mixer = grouped_attention(family, config)
    if config.written_layer_types[layer] == RECURRENT:
        mixer = mamba2(config, "mamba")
    width = config.hidden_size
    inner = config.shared_expert_size
    linears = (
        Linear("shared_mlp.input_linear", width, 2 * inner, whole=True),
        Linear("shared_mlp.output_linear", inner, width, residual=True, whole=True),
    )
    mixers = [Mixer("shared_mlp", "fused-feed-forward", linears)]
    if config.num_experts:
        mixture = mixture_of_experts(config, shared="", name="block_sparse_moe", router="router")
        mixers.insert(0, mixture)
    return Block(
        (
            Branch((mixer,), "input_layernorm"),
            Branch(tuple(mixers), "post_attention_layernorm"),
        )
    )


def _read(content: dict[str, Any]) -> dict[str, Any]:
    """layer_types (all Mamba-2, if nothing is said), the width of Mamba-2's heads, which may follow
    from others, and positions.
    """
    types = content.get("layer_types") or content.get("layers_block_type")
    types = types or [RECURRENT] * content["num_hidden_layers"]
    heads = content.get("mamba_n_heads", 128)
    expand = content.get("mamba_expand", 2)
    require_whole("mamba_n_heads", heads, "linear_num_value_heads")
    require_whole("mamba_expand", expand, "linear_num_value_heads")
    require_whole("hidden_size", content["hidden_size"])
    values = expand * content["hidden_size"]
    head_dim = content.get("mamba_d_head", "auto")
    if values % heads or head_dim not in ("auto", values // heads):
        raise UserError(
            f"mamba_d_head: {quoted(head_dim)} times mamba_n_heads {heads} is not mamba_expand times"
            f" hidden_size, {values}"
        )
    positions = content.get("position_embedding_type")
    if positions not in (None, "nope", "rope"):
        raise UserError(
            f'position_embedding_type: {quoted(positions)} is not supported; use "rope" or "nope"'
        )
    rope = {"rope_theta": None}
    if positions == "rope":
        rope = {"rope_theta": content.get("rope_theta", 10000.0), **read_rope(content)}
        if rope["rope_theta"] is None:
            raise UserError("rope_theta: null is not supported; give a value, or remove it")
    return {
        "layer_types": [OLD_TYPES.get(each, each) for each in types],
        "linear_value_head_dim": values // heads,
        **rope,
        **read_multipliers(content),
        **read_time_step_limit(content),
    }


def _write(config: ModelFields) -> dict[str, Any]:
    old = {new: old for old, new in OLD_TYPES.items()}
    values = config.linear_num_value_heads * config.linear_value_head_dim
    if values % config.hidden_size:
        raise UserError(
            f"mamba_expand: {values} channels of Mamba-2 are no multiple of hidden_size"
            f" {config.hidden_size}; choose other heads"
        )
    rope: dict[str, Any] = {"position_embedding_type": "nope"}
    if config.rope_theta is not None:
        rope = {"position_embedding_type": "rope", "rope_theta": config.rope_theta}
    return {
        "layer_types": [old[each] for each in config.written_layer_types],
        "mamba_expand": values // config.hidden_size,
        **write_time_step_limit(config),
        **rope,
        **write_multipliers(config),
    }


FAMILY = Family(
    architecture="GraniteMoeHybridForCausalLM",
    classifier="",
    block=_block,
    has_multipliers=True,
    rotates="all or none",
    attention_biases=((False, False), (True, True)),
    heads_divide_width=True,
    recurrent_type=RECURRENT,
    may_lack_experts=True,
    stored_experts={
        "block_sparse_moe.experts.gate_up_proj": ("block_sparse_moe.input_linear.weight",),
        "block_sparse_moe.experts.down_proj": ("block_sparse_moe.output_linear.weight",),
        "block_sparse_moe.router.weight": ("block_sparse_moe.router.layer.weight",),
    },
    fields=(
        "num_key_value_heads",
        "rms_norm_eps",
        "attention_bias",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
        "conv_bias",
        "time_step_limit",
        *EXPERT_FIELDS,
        "shared_expert_intermediate_size",
    ),
    names={
        "linear_num_key_heads": "mamba_n_groups",
        "linear_num_value_heads": "mamba_n_heads",
        "linear_key_head_dim": "mamba_d_state",
        "linear_value_head_dim": "mamba_d_head",
        "linear_conv_kernel_dim": "mamba_d_conv",
        "conv_bias": "mamba_conv_bias",
        "num_experts": "num_local_experts",
        "shared_expert_intermediate_size": "shared_intermediate_size",
    },
    defaults={
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 128,
        "linear_key_head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "conv_bias": True,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 1024,
        "norm_topk_prob": True,
    },
    required_values={"mamba_proj_bias": False, "norm_topk_prob": True},
    read=_read,
    write=_write,
)
