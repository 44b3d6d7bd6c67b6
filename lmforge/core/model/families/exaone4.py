"""EXAONE 4 (arXiv 2507.11407): attention and feed-forward are normalized after they are computed,
queries and keys in each head; of layers with and without a window only the former have positions.
"""

from functools import partial
from typing import Any

from lmforge.core.errors import UserError
from lmforge.core.model.family import (
    ROTARY_FIELDS,
    Family,
    decoder_block,
    read_layer_types,
    read_rope,
)


def _read(content: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions and layer_types, of which a model without a window has one."""
    if content.get("sliding_window", 4096) is not None:
        return {"layer_types": read_layer_types(content, every=4), **read_rope(content)}
    if {*(content.get("layer_types") or ())} != {"full_attention"}:
        raise UserError("layer_types: without a sliding_window each is full_attention; name them")
    return read_rope(content)


FAMILY = Family(
    architecture="Exaone4ForCausalLM",
    classifier="Exaone4ForSequenceClassification",
    block=partial(
        decoder_block,
        attention_norms=(None, "post_attention_layernorm"),
        mlp_norms=(None, "post_feedforward_layernorm"),
    ),
    qk_norm="heads",
    rotates="windows",
    windows="by layer",
    window_pattern=4,
    fields=(*ROTARY_FIELDS, "sliding_window"),
    defaults={
        "intermediate_size": 16384,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
    },
    read=_read,
    write=lambda config: {"layer_types": config.written_layer_types},
)
