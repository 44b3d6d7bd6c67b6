"""Qwen 3.5's mixtures, their text models: Qwen 3.5 with a mixture in every layer, whose shared
expert is multiplied by a sigmoid.
"""

from lmforge.core.model.families.qwen3_5_text import (
    DEFAULTS,
    FIELDS,
    RECURRENT,
    hybrid_block,
    read,
)
from lmforge.core.model.family import EXPERT_FIELDS, STORED_EXPERTS, Family

FAMILY = Family(
    architecture="Qwen3_5MoeForCausalLM",
    classifier="",
    block=hybrid_block,
    norm_offset=1.0,
    qk_norm="heads",
    stored_experts=STORED_EXPERTS,
    attention_biases=((False, False), (True, True)),
    window_pattern=4,
    recurrent_type=RECURRENT,
    unread_names=("mtp.",),
    fields=(
        *FIELDS,
        *EXPERT_FIELDS,
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
    ),
    defaults={
        **DEFAULTS,
        "intermediate_size": 512,  # of no layer
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
    },
    read=read,
    write=lambda config: {"layer_types": config.written_layer_types},
)
