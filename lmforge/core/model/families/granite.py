"""Granite 3 (arXiv 2405.04324): Llama with four constants, by which embeddings, scores, what a branch
adds and logits are multiplied or divided.
"""

from dataclasses import asdict, fields
from typing import Any

from lmforge.core.errors import UserError
from lmforge.core.model.family import Family, read_rope
from lmforge.core.model.fields import ModelFields, Multipliers


def read_multipliers(content: dict[str, Any]) -> dict[str, Any]:
    names = [each.name for each in fields(Multipliers) if each.name in content]
    if nulls := [name for name in names if content[name] is None]:
        raise UserError(f"{nulls[0]}: null is not supported; give a value, or remove it")
    return {"multipliers": Multipliers(**{name: content[name] for name in names})}


def write_multipliers(config: ModelFields) -> dict[str, Any]:
    return asdict(config.multipliers or Multipliers())


FAMILY = Family(
    architecture="GraniteForCausalLM",
    classifier="",
    has_multipliers=True,
    attention_biases=((False, False), (True, True)),
    mlp_biases=True,
    heads_divide_width=True,
    fields=("num_key_value_heads", "rms_norm_eps", "rope_theta", "attention_bias", "mlp_bias"),
    defaults={"intermediate_size": 11008, "max_position_embeddings": 2048},
    read=lambda content: read_rope(content) | read_multipliers(content),
    write=write_multipliers,
)
