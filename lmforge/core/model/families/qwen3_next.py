"""Qwen3-Next: three layers of linear attention by the gated delta rule, then one of attention with
gates; mixtures with a shared expert in some layers or all. Its matrices are ordered by key heads.
"""

from functools import partial
from typing import Any

from lmforge.core.model.families.qwen3_5_text import (
    DEFAULTS,
    FIELDS,
    RECURRENT,
    hybrid_block,
    read,
)
from lmforge.core.model.family import EXPERT_FIELDS, STORED_EXPERTS, Family
from lmforge.core.model.fields import ModelFields


def _write(config: ModelFields) -> dict[str, Any]:
    return {
        "layer_types": config.written_layer_types,
        "mlp_only_layers": [*config.mlp_only_layers],
    }


FAMILY = Family(
    architecture="Qwen3NextForCausalLM",
    classifier="Qwen3NextForSequenceClassification",
    block=partial(hybrid_block, by_key_head=True),
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
        "norm_topk_prob",
        "decoder_sparse_step",
        "mlp_only_layers",
    ),
    defaults={
        **DEFAULTS,
        "intermediate_size": 5632,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
    },
    read=read,
    write=_write,
)
