"""Smaller and larger models of the proportions of one: for the coordinate check and for ladders.

No torch here.
"""

from dataclasses import replace
from typing import Any

from lmforge.core.model.config import ModelConfig
from lmforge.core.model.family import name_layer_types
from lmforge.core.options.batch_plan import divisors


def in_proportion(
    config: ModelConfig, width: int, heads: int, head_dim: int, layers: int
) -> ModelConfig:
    """A model of this kind, hidden size and depth: feed-forward sizes, latents and heads of linear
    attention grow with the width, and as many query heads share a key; a hybrid keeps its mix of
    layers. Raises UserError where the family has no such model.
    """
    ratio = width / config.hidden_size

    def grown(size: int | None) -> int | None:
        return size and max(8, round(size * ratio / 8) * 8)

    keys = heads * config.num_key_value_heads // config.num_attention_heads
    sizes = (
        "intermediate_size",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "moe_latent_size",
        "q_lora_rank",
        "kv_lora_rank",
    )
    changes: dict[str, Any] = {name: grown(getattr(config, name)) for name in sizes}
    changes |= {"num_attention_heads": heads, "num_hidden_layers": layers, "layer_types": None}
    # Then every fourth layer has no positions, as in published models that have such layers.
    changes["no_rope_layers"] = None
    changes["num_key_value_heads"] = max(each for each in divisors(heads) if each <= max(1, keys))
    if not config.family.latent_attention:
        changes["head_dim"] = head_dim
    if config.family.recurrent_type:
        changes["layer_types"] = types = _mixed_layers(config, layers)
        if config.family.may_lack_experts and "moe" in {*(config.layer_types or ())} - {*types}:
            changes["num_experts"] = 0
    if "time_step_limit" in config.family.fields:  # Mamba-2's, whose groups do not grow
        count = max(1, round(config.linear_num_value_heads * ratio))
        groups = (each for each in divisors(count) if each <= config.linear_num_key_heads)
        changes["linear_num_key_heads"] = max(groups)
        changes["linear_num_value_heads"] = count
    elif own_heads := config.linear_num_key_heads:
        changes["linear_num_key_heads"] = key_heads = max(1, round(own_heads * ratio))
        shared = config.linear_num_value_heads // own_heads
        changes["linear_num_value_heads"] = shared * key_heads
    return replace(config, hidden_size=width, **changes)


def _mixed_layers(config: ModelConfig, count: int) -> tuple[str, ...]:
    """The types of so many layers, as a hybrid mixes its own; at least one sees everything."""
    assert config.layer_types is not None
    own = config.layer_types
    recurrent = config.family.recurrent_type
    period = own.index("full_attention") + 1 if "full_attention" in own else len(own)
    if own == name_layer_types(len(own), period, recurrent):
        return name_layer_types(count, min(period, count), recurrent)
    places = (int((layer + 0.5) * len(own) / count) for layer in range(count - 1))
    return (*(own[place] for place in places), "full_attention")
