"""Qwen 2 and 2.5 (arXiv 2407.10671): biases on queries, keys and values, and windows in the last
layers.
"""

from typing import Any

from lmforge.core.model.family import Family, read_rope
from lmforge.core.model.fields import ModelFields

DEFAULTS = {"intermediate_size": 22016, "max_position_embeddings": 32768, "num_key_value_heads": 32}


def read(content: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions, sliding_window and layer_types, of which transformers derives the last from
    max_window_layers.
    """
    window = content.get("sliding_window", 4096)
    rope = read_rope(content)
    types = content.get("layer_types")
    # A type with a window is then refused.
    if not content.get("use_sliding_window") or window is None:
        return rope | ({"layer_types": types} if "sliding_attention" in (types or ()) else {})
    first = content.get("max_window_layers", 28)
    types = types or [
        "sliding_attention" if layer >= first else "full_attention"
        for layer in range(content["num_hidden_layers"])
    ]
    return {"sliding_window": window, "layer_types": types, **rope}


def write_windows(config: ModelFields) -> dict[str, Any]:
    """The reverse of `read`, for windows."""
    window = config.sliding_window
    types = config.written_layer_types
    first = types.index("sliding_attention") if "sliding_attention" in types else len(types)
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": types,
        "max_window_layers": first,
    }


FAMILY = Family(
    architecture="Qwen2ForCausalLM",
    classifier="Qwen2ForSequenceClassification",
    attention_biases=((True, False),),
    windows="by layer",
    defaults=DEFAULTS,
    read=read,
    write=write_windows,
)
