"""MiniMax-M2: a mixture of experts in every layer, which a router chooses by sigmoids and biases;
queries and keys are normalized over all heads together, and rotated in part.
"""

from typing import Any

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import quoted
from lmforge.core.model.families.mixtral import STORED
from lmforge.core.model.family import EXPERT_FIELDS, ROTARY_FIELDS, Family, read_partial_rope
from lmforge.core.model.fields import ModelFields


def _read(content: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions; published folders say how many channels of a head are rotated."""
    fields = read_partial_rope(content)
    channels = content.get("rotary_dim")
    if channels is None or "partial_rotary_factor" in fields:
        return fields
    width = content.get("head_dim", 128)
    if not isinstance(channels, int) or not isinstance(width, int) or not 0 < channels <= width:
        raise UserError(
            f"rotary_dim: expected 1 to the {quoted(width)} channels of a head, got"
            f" {quoted(channels)}"
        )
    return fields | {"partial_rotary_factor": channels / width}


def _write(config: ModelFields) -> dict[str, Any]:
    return {"rotary_dim": config.rotary_dim, "scoring_func": "sigmoid"}


FAMILY = Family(
    architecture="MiniMaxM2ForCausalLM",
    classifier="MiniMaxM2ForSequenceClassification",
    sigmoid_router=True,
    qk_norm="channels",
    stored_experts={
        **STORED,
        "mlp.gate.e_score_correction_bias": ("block_sparse_moe.e_score_correction_bias",),
    },
    fields=(*ROTARY_FIELDS, *EXPERT_FIELDS, "partial_rotary_factor"),
    names={"num_experts": "num_local_experts"},
    defaults={
        "intermediate_size": 1536,
        "max_position_embeddings": 196_608,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 5_000_000.0,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "router_aux_loss_coef": 0.001,
        "norm_topk_prob": True,
    },
    required_values={"scoring_func": "sigmoid", "norm_topk_prob": True},
    read=_read,
    write=_write,
)
