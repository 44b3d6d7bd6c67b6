"""gpt-oss (arXiv 2508.10925): attention with sinks, with a window in every other layer, and mixtures
whose experts have biases and a clamped activation.

Published folders are in MXFP4 (hf/turned_experts.py).
"""

from dataclasses import replace
from typing import Any

from lmforge.core.model.blocks import Block, Branch, Vector
from lmforge.core.model.family import (
    EXPERT_FIELDS,
    ROTARY_FIELDS,
    Family,
    grouped_attention,
    mixture_of_experts,
    read_rope,
)
from lmforge.core.model.fields import ModelFields

# Of a config.json that says nothing of it.
_ROPE_SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _block(family: Family, config: ModelFields, layer: int) -> Block:
    experts = config.num_experts
    mixture = mixture_of_experts(config)
    router, *stacks = mixture.linears
    mixture = replace(
        mixture,
        kind="clamped-mixture",
        linears=(replace(router, bias=True), *stacks),
        vectors=tuple(Vector(f"{each.name}_bias", (experts, each.outputs), 0.0) for each in stacks),
    )
    attention = grouped_attention(family, config)
    return Block(
        (Branch((attention,), "input_layernorm"), Branch((mixture,), "post_attention_layernorm"))
    )


def _read(content: dict[str, Any]) -> dict[str, Any]:
    if not (content.get("rope_scaling") or content.get("rope_parameters")):
        content = {**content, "rope_scaling": _ROPE_SCALING}
    return {"layer_types": content.get("layer_types"), **read_rope(content)}


def _write(config: ModelFields) -> dict[str, Any]:
    # Where nothing is said, positions are scaled.
    rope = {} if config.rope_scaling else {"rope_scaling": {"rope_type": "default"}}
    return {"layer_types": config.written_layer_types, **rope}


FAMILY = Family(
    architecture="GptOssForCausalLM",
    classifier="GptOssForSequenceClassification",
    block=_block,
    norm_offset=0.0,
    attention_sinks=True,
    stored_experts={
        "mlp.gate.weight": ("mlp.router.weight",),
        "mlp.gate.bias": ("mlp.router.bias",),
    },
    interleaved_experts=True,
    activations=("silu",),
    attention_biases=((True, True), (False, False)),
    windows="by layer",
    default_window=128,
    window_pattern=2,
    fields=(*ROTARY_FIELDS, *EXPERT_FIELDS, "attention_bias", "sliding_window"),
    names={"num_experts": "num_local_experts"},
    defaults={
        "intermediate_size": 2880,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rope_theta": 150_000.0,
        "rms_norm_eps": 1e-5,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "router_aux_loss_coef": 0.001,
        "norm_topk_prob": True,
    },
    required_values={"norm_topk_prob": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    read=_read,
    write=_write,
)
