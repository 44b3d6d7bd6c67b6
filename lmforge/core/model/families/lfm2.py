"""LFM2 (arXiv 2511.23404): gated short convolutions in most layers, attention in the others."""

from typing import Any

from lmforge.core.model.blocks import Block, Branch
from lmforge.core.model.config_checks import require_whole
from lmforge.core.model.family import (
    Family,
    gated_feed_forward,
    grouped_attention,
    mixture_of_experts,
    read_rope,
    short_convolution,
)
from lmforge.core.model.fields import ModelFields

RECURRENT = "conv"


def block(family: Family, config: ModelFields, layer: int) -> Block:
    """A convolution or attention, then a feed-forward, or a mixture where the family has some."""
    mixer = grouped_attention(family, config, "out_proj", ("q_layernorm", "k_layernorm"))
    if config.layer_types and config.layer_types[layer] == RECURRENT:
        mixer = short_convolution(config)
    feed_forward = gated_feed_forward(config, "feed_forward", ("w1", "w3", "w2"))
    if config.sparse_layers[layer]:
        feed_forward = mixture_of_experts(config, name="feed_forward")
    return Block((Branch((mixer,), "operator_norm"), Branch((feed_forward,), "ffn_norm")))


def _read(content: dict[str, Any]) -> dict[str, Any]:
    """layer_types, which may be given by the layers that attend (all, if nothing is said); and the
    size of the feed-forward, of which a config.json may give what it is computed from.
    """
    layers = content["num_hidden_layers"]
    attending = content.get("full_attn_idxs")
    if attending is None:
        attending = range(layers)
    types = content.get("layer_types") or [
        "full_attention" if layer in attending else RECURRENT for layer in range(layers)
    ]
    inner = content.get("block_ff_dim", content.get("intermediate_size", 12288))
    require_whole("intermediate_size", inner)
    if content.get("block_auto_adjust_ff_dim", True):
        inner = int(2 * inner / 3)
        factor = content.get("block_ffn_dim_multiplier", 1.0)
        if factor is not None:
            multiple = content.get("block_multiple_of", 256)
            inner = multiple * -(-int(factor * inner) // multiple)
    tied = content.get("tie_embedding", content.get("tie_word_embeddings", True))
    return {
        "layer_types": types,
        "intermediate_size": inner,
        "tie_word_embeddings": tied,
        **read_rope(content),
    }


FAMILY = Family(
    architecture="Lfm2ForCausalLM",
    classifier="",
    block=block,
    qk_norm="heads",
    activations=("silu",),
    final_norm="embedding_norm",
    heads_divide_width=True,
    window_pattern=1,
    recurrent_type=RECURRENT,
    fields=(
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_theta",
        "linear_conv_kernel_dim",
        "conv_bias",
    ),
    names={"rms_norm_eps": "norm_eps", "linear_conv_kernel_dim": "conv_L_cache"},
    defaults={
        "intermediate_size": 12288,
        "max_position_embeddings": 128_000,
        "num_key_value_heads": 8,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "linear_conv_kernel_dim": 3,
        "tie_word_embeddings": True,
    },
    read=_read,
    write=lambda config: {
        "layer_types": config.written_layer_types,
        "block_auto_adjust_ff_dim": False,
    },
)
