"""Smaller and larger models of the proportions of one: for the coordinate check and for ladders.

No torch here.
"""

from dataclasses import replace
from typing import Any

from lmforge.core.errors import UserError
from lmforge.core.model.config import ModelConfig
from lmforge.core.options.batch_plan import divisors


def in_proportion(
    config: ModelConfig, width: int, heads: int, head_dim: int, layers: int
) -> ModelConfig:
    """A model of this kind, hidden size and depth: feed-forward sizes and latents grow with the
    width, and as many query heads share a key. Raises UserError where the family has no such model.
    """
    if config.family.recurrent_type:
        raise UserError(
            f"model_type: smaller {config.model_type} models in proportion are not known; use a"
            " model without recurrent layers"
        )
    ratio = width / config.hidden_size

    def grown(size: int | None) -> int | None:
        return size and max(8, round(size * ratio / 8) * 8)

    keys = heads * config.num_key_value_heads // config.num_attention_heads
    sizes = ("intermediate_size", "moe_intermediate_size", "q_lora_rank", "kv_lora_rank")
    changes: dict[str, Any] = {name: grown(getattr(config, name)) for name in sizes}
    changes |= {"num_attention_heads": heads, "num_hidden_layers": layers, "layer_types": None}
    changes["num_key_value_heads"] = max(each for each in divisors(heads) if each <= max(1, keys))
    if not config.family.latent_attention:
        changes["head_dim"] = head_dim
    return replace(config, hidden_size=width, **changes)
