"""SmolLM3: Llama with layers that have no positions, every fourth one if nothing else is said."""

from typing import Any

from lmforge.core.model.family import Family, read_rope
from lmforge.core.model.fields import ModelFields


def _read(content: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions, no_rope_layers, which may be given as a period, and windows, which layers
    without positions have where layer_types does not say.
    """
    layers = content["num_hidden_layers"]
    every = content.get("no_rope_layer_interval", 4)
    rotated = content.get("no_rope_layers")
    if rotated is None:
        rotated = [int(layer % every > 0) for layer in range(1, layers + 1)]
    fields = {"no_rope_layers": rotated, "sliding_window": None, **read_rope(content)}
    types = content.get("layer_types")
    if not content.get("use_sliding_window") or content.get("sliding_window") is None:
        # A type with a window is then refused.
        return fields | ({"layer_types": types} if "sliding_attention" in (types or ()) else {})
    types = types or ["full_attention" if each else "sliding_attention" for each in rotated]
    return fields | {"sliding_window": content["sliding_window"], "layer_types": types}


def _write(config: ModelFields) -> dict[str, Any]:
    return {
        "no_rope_layers": [*(config.no_rope_layers or ())],
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "layer_types": config.written_layer_types,
    }


FAMILY = Family(
    architecture="SmolLM3ForCausalLM",
    classifier="SmolLM3ForSequenceClassification",
    rotates="three of four",
    windows="by layer",
    attention_biases=((False, False), (True, True)),
    mlp_biases=True,
    heads_divide_width=True,
    fields=(
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_theta",
        "attention_bias",
        "mlp_bias",
        "no_rope_layers",
    ),
    defaults={
        "intermediate_size": 11008,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
    },
    read=_read,
    write=_write,
)
