"""GLM-4.5 to 4.7 (arXiv 2508.06471): grouped attention of which half the channels are rotated, and
after a few dense layers mixtures as DeepSeek-V3 has them.

Layers that predict further tokens, which a folder may have, are not read.
"""

from lmforge.core.model.family import (
    EXPERT_FIELDS,
    ROTARY_FIELDS,
    STORED_EXPERTS,
    Family,
    read_partial_rope,
)

FAMILY = Family(
    architecture="Glm4MoeForCausalLM",
    classifier="",
    sigmoid_router=True,
    stored_experts=STORED_EXPERTS,
    qk_norm="heads",
    optional_qk_norm=True,
    attention_biases=((False, False), (True, False)),
    fields=(
        *ROTARY_FIELDS,
        *EXPERT_FIELDS,
        "attention_bias",
        "qk_norm",
        "partial_rotary_factor",
        "n_shared_experts",
        "moe_intermediate_size",
        "norm_topk_prob",
        "routed_scaling_factor",
        "n_group",
        "topk_group",
        "first_k_dense_replace",
    ),
    # transformers computes no auxiliary loss.
    names={
        "num_experts": "n_routed_experts",
        "qk_norm": "use_qk_norm",
        "router_aux_loss_coef": "aux_loss_alpha",
    },
    defaults={
        "intermediate_size": 10944,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 1408,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
    },
    unread_layers=("num_nextn_predict_layers", 1),
    read=read_partial_rope,
    write=lambda config: {"num_nextn_predict_layers": 0},
)
