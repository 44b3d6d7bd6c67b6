"""Gemma 3, its text models (arXiv 2503.19786): norms on both sides of attention and feed-forward,
whose weights are added to 1; scaled embeddings; five layers with a window and rotary positions of
another base, then one that sees everything.
"""

from functools import partial
from typing import Any

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import quoted
from lmforge.core.model.family import (
    ROTARY_FIELDS,
    Family,
    decoder_block,
    read_layer_types,
    read_rope,
)


def read(content: dict[str, Any]) -> dict[str, Any]:
    """layer_types, which may be given as a period; and rotary positions, of which transformers 5
    writes a table for each type.

    A table `rope_scaling` is added to that of full attention, whose rope_type remains.
    """
    ropes = content.get("rope_parameters") or {}
    full: dict[str, Any] = {}
    local: dict[str, Any] = {}
    if isinstance(ropes, dict):
        full, local = (
            ropes.get(each) or {"rope_type": "default"}
            for each in ("full_attention", "sliding_attention")
        )
    more = content.get("rope_scaling") or {}
    for name, tables in (("rope_parameters", [ropes, full, local]), ("rope_scaling", [more])):
        if not all(isinstance(table, dict) for table in tables):
            raise UserError(f"{name}: expected an object, got {quoted(tables[0])}")
    if local.get("rope_type", local.get("type", "default")) != "default":
        raise UserError(
            f"rope_parameters: {quoted(ropes)} is not supported; use unscaled positions in"
            " sliding_attention"
        )
    theta = local.get("rope_theta")
    return {
        "layer_types": read_layer_types(content),
        **read_rope(content, full | more | {"truncate": ropes.get("truncate", True)}),
        **({} if theta is None else {"rope_local_base_freq": theta}),
    }


FAMILY = Family(
    architecture="Gemma3ForCausalLM",
    classifier="Gemma3TextForSequenceClassification",
    block=partial(
        decoder_block,
        attention_norms=("input_layernorm", "post_attention_layernorm"),
        mlp_norms=("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    norm_offset=1.0,
    qk_norm="heads",
    activations=("gelu_pytorch_tanh",),
    scaled_embeddings=True,
    attention_biases=((False, False), (True, True)),
    heads_divide_width=True,
    windows="by layer",
    default_window=4096,
    window_pattern=6,
    local_rope_theta=10_000.0,
    scales_scores=True,
    caps_logits=True,
    fields=(
        *ROTARY_FIELDS,
        "attention_bias",
        "sliding_window",
        "rope_local_base_freq",
        "query_pre_attn_scalar",
    ),
    names={"hidden_act": "hidden_activation"},
    defaults={
        "intermediate_size": 9216,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rope_theta": 1e6,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
    },
    required_values={"attn_logit_softcapping": None, "use_bidirectional_attention": False},
    read=read,
    write=lambda config: {"layer_types": config.written_layer_types},
)
