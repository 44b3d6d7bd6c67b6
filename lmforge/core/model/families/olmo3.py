"""OLMo 3 (arXiv 2512.13961): OLMo 2 with windows in three of four layers, whose rotary positions are
not stretched.
"""

from dataclasses import replace
from typing import Any

from lmforge.core.model.families import gemma3_text, olmo2
from lmforge.core.model.fields import ModelFields


def _write(config: ModelFields) -> dict[str, Any]:
    types = config.written_layer_types
    scaling = config.written_rope_scaling
    full = {"rope_type": "default", "rope_theta": config.rope_theta, **scaling}
    local = {"rope_type": "default", "rope_theta": config.rope_local_base_freq}
    return {
        "layer_types": types,
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


FAMILY = replace(
    olmo2.FAMILY,
    architecture="Olmo3ForCausalLM",
    classifier="Olmo3ForSequenceClassification",
    heads_divide_width=False,
    windows="by layer",
    default_window=4096,
    window_pattern=4,
    local_rope_theta=500_000.0,
    fields=(*olmo2.FAMILY.fields, "sliding_window"),
    defaults={**olmo2.FAMILY.defaults, "rope_theta": 500_000.0},
    read=gemma3_text.read,
    write=_write,
)
