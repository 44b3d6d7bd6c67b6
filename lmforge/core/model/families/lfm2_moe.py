"""LFM2's mixtures of experts (arXiv 2511.23404): LFM2 with experts in all but the first layers, which
a router chooses by sigmoids and biases.
"""

from typing import Any

from lmforge.core.errors import UserError
from lmforge.core.model.families import lfm2
from lmforge.core.model.family import EXPERT_FIELDS, Family, read_rope


def _read(content: dict[str, Any]) -> dict[str, Any]:
    if not content.get("layer_types"):
        raise UserError("layer_types: missing; name each layer")
    tied = content.get("tie_embedding", content.get("tie_word_embeddings", True))
    return {
        "layer_types": content["layer_types"],
        "tie_word_embeddings": tied,
        **read_rope(content),
    }


FAMILY = Family(
    architecture="Lfm2MoeForCausalLM",
    classifier="",
    block=lfm2.block,
    qk_norm="heads",
    sigmoid_router=True,
    router_epsilon=1e-6,
    activations=("silu",),
    final_norm="embedding_norm",
    heads_divide_width=True,
    window_pattern=1,
    recurrent_type=lfm2.RECURRENT,
    stored_experts={
        "feed_forward.gate.e_score_correction_bias": ("feed_forward.expert_bias",),
        "feed_forward.experts.gate_up_proj": (
            "feed_forward.experts.{}.w1.weight",
            "feed_forward.experts.{}.w3.weight",
        ),
        "feed_forward.experts.down_proj": ("feed_forward.experts.{}.w2.weight",),
    },
    fields=(
        *lfm2.FAMILY.fields,
        *EXPERT_FIELDS,
        "moe_intermediate_size",
        "norm_topk_prob",
        "routed_scaling_factor",
        "first_k_dense_replace",
    ),
    names={**lfm2.FAMILY.names, "first_k_dense_replace": "num_dense_layers"},
    defaults={
        **lfm2.FAMILY.defaults,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 2,
        "norm_topk_prob": True,
    },
    required_values={"use_expert_bias": True},
    read=_read,
    write=lambda config: {"layer_types": config.written_layer_types},
)
