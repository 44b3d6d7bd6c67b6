"""Kimi Linear (arXiv 2510.26692): three layers of Kimi delta attention, then one of latent attention
without rotary positions; after a few dense layers mixtures as DeepSeek-V3 has them.
"""

from typing import Any

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import quoted
from lmforge.core.model.blocks import Block, Branch, Linear, Mixer, Norm, Vector
from lmforge.core.model.families.olmo_hybrid import RECURRENT, stored_convolution
from lmforge.core.model.family import (
    EXPERT_FIELDS,
    Family,
    gated_feed_forward,
    latent_attention,
    mixture_of_experts,
)
from lmforge.core.model.fields import ModelFields
from lmforge.core.model.state_space import first_rates, first_step_biases

ATTENTION = "full_attention"


def _delta_attention(config: ModelFields) -> Mixer:
    name = "self_attn"
    width = config.hidden_size
    heads = config.linear_num_key_heads
    head_dim = config.linear_key_head_dim
    channels = heads * head_dim
    kernel = config.linear_conv_kernel_dim
    sizes = {
        "q_proj": (width, channels),
        "k_proj": (width, channels),
        "v_proj": (width, channels),
        "forget_gate.f_a_proj": (width, head_dim),
        "forget_gate.f_b_proj": (head_dim, channels),
        "b_proj": (width, heads),
        "g_a_proj": (width, head_dim),
        "g_b_proj": (head_dim, channels),
    }
    return Mixer(
        name,
        "kimi-delta-attention",
        (
            *(Linear(f"{name}.{each}", *size) for each, size in sizes.items()),
            Linear(f"{name}.o_proj", channels, width, residual=True),
        ),
        (Norm(f"{name}.o_norm", head_dim, "heads"),),
        (
            stored_convolution(name, channels, channels, channels, kernel),
            Vector(f"{name}.forget_gate.dt_bias", (channels,), first_step_biases(channels)),
            Vector(f"{name}.forget_gate.A_log", (1, 1, heads, 1), first_rates(heads)),
        ),
        mixes_tokens=True,
        states=((kernel - 1, 3 * channels), (heads, head_dim, head_dim)),
        state_flops=6 * channels * head_dim + 2 * kernel * 3 * channels,
    )


def _block(family: Family, config: ModelFields, layer: int) -> Block:
    mixer = latent_attention(config)
    if config.layer_types and config.layer_types[layer] == RECURRENT:
        mixer = _delta_attention(config)
    feed_forward = gated_feed_forward(config)
    if config.sparse_layers[layer]:
        feed_forward = mixture_of_experts(config)
    return Block(
        (Branch((mixer,), "input_layernorm"), Branch((feed_forward,), "post_attention_layernorm"))
    )


def _read(content: dict[str, Any]) -> dict[str, Any]:
    """What a config.json says by `linear_attn_config`, which counts layers from 1, and by
    `mlp_layer_types`.
    """
    layers = content["num_hidden_layers"]
    table = content.get("linear_attn_config") or {}
    spelled = {
        "linear_num_key_heads": "num_heads",
        "linear_key_head_dim": "head_dim",
        "linear_conv_kernel_dim": "short_conv_kernel_size",
    }
    fields = {ours: table[theirs] for ours, theirs in spelled.items() if theirs in table}
    types = content.get("layer_types")
    if not types and {"full_attn_layers", "kda_layers"} <= table.keys():
        attending = table["full_attn_layers"]
        if sorted([*attending, *table["kda_layers"]]) != [*range(1, layers + 1)]:
            raise UserError(
                "linear_attn_config: full_attn_layers and kda_layers do not name each layer from 1"
                f" to {layers} once"
            )
        types = [ATTENTION if layer in attending else RECURRENT for layer in range(1, layers + 1)]
    elif not types:
        # As transformers has it, which counts from 0 there.
        types = [ATTENTION if layer and layer % 4 == 0 else RECURRENT for layer in range(layers)]
    fields["layer_types"] = types
    if kinds := content.get("mlp_layer_types"):
        dense = kinds.count("dense")
        if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
            raise UserError(
                f"mlp_layer_types: {quoted(kinds)} is not supported; use a model of {layers} layers"
                ' whose "dense" ones come first, then "sparse" ones'
            )
        fields["first_k_dense_replace"] = dense
    return fields


def _write(config: ModelFields) -> dict[str, Any]:
    types = config.written_layer_types
    numbers = {
        kind: [layer for layer, each in enumerate(types, start=1) if each == kind]
        for kind in (ATTENTION, RECURRENT)
    }
    return {
        "q_lora_rank": config.q_lora_rank or None,
        "layer_types": types,
        "mlp_layer_types": ["sparse" if each else "dense" for each in config.sparse_layers],
        "linear_attn_config": {
            "num_heads": config.linear_num_key_heads,
            "head_dim": config.linear_key_head_dim,
            "short_conv_kernel_size": config.linear_conv_kernel_dim,
            "full_attn_layers": numbers[ATTENTION],
            "kda_layers": numbers[RECURRENT],
        },
        "moe_router_activation_func": "sigmoid",
        "moe_layer_freq": 1,
        "mla_use_nope": True,
        "use_grouped_topk": True,
        "num_nextn_predict_layers": 0,
    }


# Of a mixture; dense layers are published under mlp, and written by transformers beside these.
_SPARSE = "block_sparse_moe"
_FEED_FORWARD = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
_GATE = ("f_a_proj.weight", "f_b_proj.weight", "dt_bias", "A_log")

FAMILY = Family(
    architecture="KimiLinearForCausalLM",
    classifier="",
    block=_block,
    latent_attention=True,
    sigmoid_router=True,
    rotates="none",
    can_tie=False,
    stored_experts={
        "mlp.experts.gate_up_proj": (
            f"{_SPARSE}.experts.{{}}.w1.weight",
            f"{_SPARSE}.experts.{{}}.w3.weight",
        ),
        "mlp.experts.down_proj": (f"{_SPARSE}.experts.{{}}.w2.weight",),
        **{
            f"mlp.{name}": (f"{_SPARSE}.{name}",)
            for name in (
                "gate.weight",
                "gate.e_score_correction_bias",
                *(f"shared_experts.{each}" for each in _FEED_FORWARD),
            )
        },
        **{f"self_attn.forget_gate.{name}": (f"self_attn.{name}",) for name in _GATE},
    },
    other_names={f"mlp.{name}": f"{_SPARSE}.{name}" for name in _FEED_FORWARD},
    attention_biases=((False, False), (True, True)),
    window_pattern=4,
    recurrent_type=RECURRENT,
    fields=(
        "num_key_value_heads",
        "rms_norm_eps",
        "attention_bias",
        *EXPERT_FIELDS,
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "n_shared_experts",
        "moe_intermediate_size",
        "norm_topk_prob",
        "routed_scaling_factor",
        "n_group",
        "topk_group",
        "first_k_dense_replace",
        "linear_num_key_heads",
        "linear_key_head_dim",
        "linear_conv_kernel_dim",
    ),
    # transformers ignores the weight of the auxiliary loss, and computes none.
    names={
        "max_position_embeddings": "model_max_length",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
        "norm_topk_prob": "moe_renormalize",
        "n_group": "num_expert_group",
        "linear_num_key_heads": "linear_num_heads",
        "linear_key_head_dim": "linear_head_dim",
        "router_aux_loss_coef": "aux_loss_alpha",
    },
    defaults={
        "intermediate_size": 9216,
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1024,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.446,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "linear_num_key_heads": 32,
        "linear_key_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    required_values={
        "rope_scaling": None,
        "moe_router_activation_func": "sigmoid",
        "mla_use_nope": True,
        "use_grouped_topk": True,
        "tie_word_embeddings": False,
    },
    read=_read,
    write=_write,
)
