"""OLMoE (arXiv 2409.02060): a mixture of many small experts in every layer; queries and keys are
normalized over all heads together.
"""

from typing import Any

from lmforge.core.model.family import EXPERT_FIELDS, STORED_EXPERTS, Family, read_rope


def _read(content: dict[str, Any]) -> dict[str, Any]:
    # It has none, so one that is there must be what is derived.
    return {"head_dim": content.get("head_dim") or 0, **read_rope(content)}


FAMILY = Family(
    architecture="OlmoeForCausalLM",
    classifier="",
    stored_experts=STORED_EXPERTS,
    qk_norm="channels",
    attention_biases=((False, False), (True, True)),
    heads_divide_width=True,
    fields=(
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_theta",
        "attention_bias",
        *EXPERT_FIELDS,
        "norm_topk_prob",
    ),
    defaults={
        "intermediate_size": 2048,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "router_aux_loss_coef": 0.01,
    },
    read=_read,
    required_values={"clip_qkv": None},
)
