"""Qwen 3's mixtures of experts (arXiv 2505.09388): Qwen 3 with experts in some layers or all, and
one window for all layers.
"""

from typing import Any

from lmforge.core.model.family import (
    EXPERT_FIELDS,
    ROTARY_FIELDS,
    STORED_EXPERTS,
    Family,
    read_rope,
)
from lmforge.core.model.fields import ModelFields


def _read(content: dict[str, Any]) -> dict[str, Any]:
    window = content.get("sliding_window", 4096) if content.get("use_sliding_window") else None
    return {"sliding_window": window, **read_rope(content)}


def _write(config: ModelFields) -> dict[str, Any]:
    window = config.sliding_window
    layers = [*config.mlp_only_layers]
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "mlp_only_layers": layers,
    }


FAMILY = Family(
    architecture="Qwen3MoeForCausalLM",
    classifier="Qwen3MoeForSequenceClassification",
    stored_experts=STORED_EXPERTS,
    qk_norm="heads",
    attention_biases=((False, False), (True, True)),
    windows="all layers",
    fields=(
        *ROTARY_FIELDS,
        *EXPERT_FIELDS,
        "attention_bias",
        "moe_intermediate_size",
        "norm_topk_prob",
        "decoder_sparse_step",
        "mlp_only_layers",
    ),
    defaults={
        "intermediate_size": 6144,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "router_aux_loss_coef": 0.001,
    },
    read=_read,
    write=_write,
)
