"""OLMo Hybrid: three layers of linear attention by the gated delta rule, normalized before, then one
of attention as OLMo 2 has it, normalized after, with or without rotary positions.
"""

from dataclasses import replace
from typing import Any

from lmforge.core.model.blocks import Block, Branch, Linear, Mixer, Norm, Vector
from lmforge.core.model.config_checks import require_whole
from lmforge.core.model.family import (
    LINEAR_ATTENTION_FIELDS,
    Family,
    gated_delta_rule,
    gated_feed_forward,
    grouped_attention,
    name_layer_types,
    read_rope,
)
from lmforge.core.model.fields import ModelFields
from lmforge.core.model.state_space import first_step_biases

RECURRENT = "linear_attention"


def stored_convolution(name: str, q: int, k: int, v: int, width: int) -> Vector:
    """A convolution of so many channels of queries, keys and values, each stored by itself."""
    stored = tuple(
        (f"{name}.{part}_conv1d.weight", size) for part, size in zip("qkv", (q, k, v), strict=True)
    )
    return Vector(f"{name}.conv1d.weight", (q + k + v, 1, width), stored=stored)


def _linear_attention(config: ModelFields) -> Mixer:
    name = "linear_attn"
    mixer = gated_delta_rule(config)
    heads = config.linear_num_value_heads
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = heads * config.linear_value_head_dim
    sizes = {"q": keys, "k": keys, "v": values, "g": values, "b": heads, "a": heads}
    _, _, rates = mixer.vectors
    return replace(
        mixer,
        kind="reflecting-delta-rule",
        linears=(
            *(
                Linear(f"{name}.{each}_proj", config.hidden_size, size)
                for each, size in sizes.items()
            ),
            Linear(f"{name}.o_proj", values, config.hidden_size, residual=True),
        ),
        # Its eps is not rms_norm_eps.
        norms=(Norm(f"{name}.o_norm", config.linear_value_head_dim, "heads", 1e-5),),
        vectors=(
            stored_convolution(name, keys, keys, values, config.linear_conv_kernel_dim),
            Vector(f"{name}.dt_bias", (heads,), first_step_biases(heads)),
            rates,
        ),
    )


def _block(family: Family, config: ModelFields, layer: int) -> Block:
    feed_forward = gated_feed_forward(config)
    if config.layer_types and config.layer_types[layer] == RECURRENT:
        return Block(
            (
                Branch((_linear_attention(config),), "input_layernorm"),
                Branch((feed_forward,), "post_attention_layernorm"),
            )
        )
    return Block(
        (
            Branch((grouped_attention(family, config),), None, "post_attention_layernorm"),
            Branch((feed_forward,), None, "post_feedforward_layernorm"),
        )
    )


def _read(content: dict[str, Any]) -> dict[str, Any]:
    """What follows from the other fields where it is left out; and rotary positions, of which there
    are none where the table says null for their base.
    """
    for name in ("hidden_size", "num_attention_heads", *LINEAR_ATTENTION_FIELDS):
        if content.get(name) is not None:
            require_whole(name, content[name])
    layers = content["num_hidden_layers"]
    heads = content["num_attention_heads"]
    key_heads = content.get("linear_num_key_heads") or heads
    key_dim = content.get("linear_key_head_dim") or int(0.75 * content["hidden_size"] / key_heads)
    table = content.get("rope_scaling") or content.get("rope_parameters") or {}
    rope = read_rope(content)
    theta = content.get("rope_theta", 10000.0)
    if "rope_theta" in table:
        theta = table["rope_theta"]
    if theta is None:
        rope = {"rope_scaling": None}
    return {
        "layer_types": content.get("layer_types")
        or name_layer_types(layers, min(4, layers), RECURRENT),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": content.get("linear_num_value_heads") or heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": content.get("linear_value_head_dim") or 2 * key_dim,
        **rope,
        "rope_theta": theta,
    }


def _write(config: ModelFields) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": config.rope_theta}
    if config.rope_theta is None:
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
    return {"layer_types": config.written_layer_types, **rope}


FAMILY = Family(
    architecture="OlmoHybridForCausalLM",
    classifier="",
    block=_block,
    norm_offset=0.0,
    qk_norm="channels",
    rotates="all or none",
    attention_biases=((False, False), (True, True)),
    window_pattern=4,
    recurrent_type=RECURRENT,
    fields=(
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "attention_bias",
        *LINEAR_ATTENTION_FIELDS,
    ),
    defaults={
        "intermediate_size": 11008,
        "max_position_embeddings": 65536,
        "linear_conv_kernel_dim": 4,
    },
    required_values={"linear_allow_neg_eigval": True},
    read=_read,
    write=_write,
    other_names={
        "input_layernorm.weight": "attention_layer_norm.weight",
        "post_attention_layernorm.weight": "feedforward_layer_norm.weight",
    },
)
