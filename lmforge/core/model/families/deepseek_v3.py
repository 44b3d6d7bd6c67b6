"""DeepSeek-V3 (arXiv 2412.19437): latent attention, and after a few dense layers mixtures of many
small and shared experts.

Layers that predict further tokens, which a folder may have, are not read. Published folders are in
float8 (hf/weights.py).
"""

from typing import Any

from lmforge.core.model.family import EXPERT_FIELDS, STORED_EXPERTS, Family
from lmforge.core.model.fields import ModelFields


def _write(config: ModelFields) -> dict[str, Any]:
    router = {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "seq_aux": True,
        "moe_layer_freq": 1,
    }
    return {"q_lora_rank": config.q_lora_rank or None, "num_nextn_predict_layers": 0, **router}


FAMILY = Family(
    architecture="DeepseekV3ForCausalLM",
    classifier="DeepseekV3ForSequenceClassification",
    latent_attention=True,
    sigmoid_router=True,
    stored_experts=STORED_EXPERTS,
    attention_biases=((False, False), (True, True)),
    fields=(
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_theta",
        "attention_bias",
        *EXPERT_FIELDS,
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "rope_interleave",
        "n_shared_experts",
        "moe_intermediate_size",
        "norm_topk_prob",
        "routed_scaling_factor",
        "n_group",
        "topk_group",
        "first_k_dense_replace",
    ),
    # transformers ignores the weight of the auxiliary loss, and computes none.
    names={"num_experts": "n_routed_experts", "router_aux_loss_coef": "aux_loss_alpha"},
    defaults={
        "intermediate_size": 18432,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 2048,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_interleave": True,
    },
    required_values={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "seq_aux": True},
    unread_layers=("num_nextn_predict_layers", 1),
    write=_write,
)
