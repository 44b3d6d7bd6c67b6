"""Mixtral (arXiv 2401.04088): Mistral with a mixture of experts in every layer, under names of its
own on disk.
"""

from lmforge.core.model.family import EXPERT_FIELDS, ROTARY_FIELDS, Family

# The names on disk of a router and of experts.
STORED = {
    "mlp.gate.weight": ("block_sparse_moe.gate.weight",),
    "mlp.experts.gate_up_proj": (
        "block_sparse_moe.experts.{}.w1.weight",
        "block_sparse_moe.experts.{}.w3.weight",
    ),
    "mlp.experts.down_proj": ("block_sparse_moe.experts.{}.w2.weight",),
}
FAMILY = Family(
    architecture="MixtralForCausalLM",
    classifier="MixtralForSequenceClassification",
    stored_experts=STORED,
    windows="all layers",
    fields=(*ROTARY_FIELDS, *EXPERT_FIELDS, "sliding_window"),
    names={"num_experts": "num_local_experts"},
    defaults={
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
        "norm_topk_prob": True,
    },
    required_values={"layer_types": None, "norm_topk_prob": True},
)
