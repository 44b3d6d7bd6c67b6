"""Qwen 3.5, its dense text models: three layers of linear attention by the gated delta rule
(modules/gated_delta.py), then one of attention whose heads have gates and of whose channels a
quarter is rotated.
"""

from typing import Any

from lmforge.core.model.blocks import Block, Branch
from lmforge.core.model.family import (
    LINEAR_ATTENTION_FIELDS,
    ROTARY_FIELDS,
    Family,
    gated_delta_rule,
    gated_feed_forward,
    mixture_of_experts,
    name_layer_types,
    output_gated_attention,
    read_partial_rope,
)
from lmforge.core.model.fields import ModelFields

RECURRENT = "linear_attention"


def hybrid_block(
    family: Family, config: ModelFields, layer: int, by_key_head: bool = False
) -> Block:
    """Linear attention or attention, as layer_types says; then a feed-forward, or a mixture with a
    shared expert in sparse layers.
    """
    mixer = output_gated_attention(family, config)
    if config.layer_types and config.layer_types[layer] == RECURRENT:
        mixer = gated_delta_rule(config, by_key_head)
    feed_forward = gated_feed_forward(config)
    if config.sparse_layers[layer]:
        feed_forward = mixture_of_experts(config, "shared_expert", "shared_expert_gate")
    return Block(
        (
            Branch((mixer,), "input_layernorm"),
            Branch((feed_forward,), "post_attention_layernorm"),
        )
    )


def read(content: dict[str, Any]) -> dict[str, Any]:
    """layer_types, which may be given as a period; and rotary positions, whose three axes are one
    for text.
    """
    types = content.get("layer_types")
    every = content.get("full_attention_interval")
    if not types and every:
        types = name_layer_types(content["num_hidden_layers"], every, RECURRENT)
    return {"layer_types": types, **read_partial_rope(content)}


FIELDS = (
    *ROTARY_FIELDS,
    "attention_bias",
    "partial_rotary_factor",
    *LINEAR_ATTENTION_FIELDS,
)
DEFAULTS = {
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}

FAMILY = Family(
    architecture="Qwen3_5ForCausalLM",
    classifier="Qwen3_5TextForSequenceClassification",
    block=hybrid_block,
    norm_offset=1.0,
    qk_norm="heads",
    attention_biases=((False, False), (True, True)),
    window_pattern=4,
    recurrent_type=RECURRENT,
    unread_names=("mtp.",),
    fields=FIELDS,
    defaults={**DEFAULTS, "intermediate_size": 12288, "num_key_value_heads": 4},
    read=read,
    write=lambda config: {"layer_types": config.written_layer_types},
)
