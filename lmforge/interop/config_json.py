"""Between ModelConfig and the content of a Hugging Face config.json.

Reads the spelling of transformers 4 (`rope_theta`, `rope_scaling`) and of transformers 5 (`rope_parameters`); writes the
former, which both read. Refuses by name what lmforge cannot compute. model/config.py checks which values are valid together.
"""

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from lmforge import registry
from lmforge.config.ranges import MODEL_RANGES
from lmforge.errors import UserError
from lmforge.model.config import ModelConfig, base_model_type
from lmforge.model.family import load_family
from lmforge.untrusted import describe, quoted, read_json

NUM_EXPERTS_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts")
REQUIRED_FIELDS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_COMMON_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "hidden_act",
    "tie_word_embeddings",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
_CLASSIFIER_SUFFIX = "ForSequenceClassification"


class _ConfigJson(BaseModel, strict=True):
    """Types of the fields that are read before ModelConfig checks the numbers."""

    architectures: list[str] | None = None
    num_labels: int | None = None
    id2label: dict[str, Any] | None = None
    num_hidden_layers: int | None = None
    n_embd: int | None = None
    n_inner: int | None = None
    n_layer: int | None = None
    n_head: int | None = None
    n_positions: int | None = None
    layer_types: list[str] | None = None
    max_window_layers: int | None = None
    sliding_window_pattern: int | None = None
    use_sliding_window: bool | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None


def read_config_json(path: Path) -> dict[str, Any]:
    """The content of a config.json. Raises UserError where it cannot be read."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; give a folder in Hugging Face's layout, or the name of a preset")
    # Infinity is refused later, with the name of its field.
    return read_json(path, dict[str, Any], hint="copy the file again", allow_nan=True)


def to_config_json(config: ModelConfig) -> dict[str, Any]:
    """A model config as the content of a config.json that transformers 4 and 5 both read."""
    if config.implementation == "transformers":
        return dict(config.config_dict)  # type: ignore[attr-defined]
    family = config.family
    architecture = family.classifier if config.reward else family.architecture
    content: dict[str, Any] = {"architectures": [architecture], "model_type": config.model_type}
    if config.final_logit_softcapping is not None:  # export.py refuses it where transformers would not read it
        content["final_logit_softcapping"] = config.final_logit_softcapping
    if config.reward:
        content |= {"id2label": {"0": "reward"}, "label2id": {"reward": 0}}
    content |= {family.names.get(name, name): getattr(config, name) for name in (*_COMMON_FIELDS, *family.fields)}
    if not family.learned_positions:
        scaling = asdict(config.rope_scaling) if config.rope_scaling else {}
        content["rope_scaling"] = {name: value for name, value in scaling.items() if value is not None} or None
    return content | dict.fromkeys(family.dropouts, 0.0) | family.write(config)


def config_fields_from_json(content: dict[str, Any]) -> dict[str, Any]:
    """ModelConfig's fields out of a config.json. Raises UserError, naming the field, for what lmforge cannot compute."""
    name = str(content.get("model_type"))
    _reject_unsupported(content)
    if registry.find("model_family", name) is None:
        known = ", ".join(registry.names("model_family"))
        raise UserError(f'model_type: "{name}" is not supported; lmforge reads {known}; a plugin adds others (--plugins)')
    family = load_family(base_model_type(name))
    reject_extreme_sizes(content)
    try:
        _ConfigJson.model_validate(content)
    except ValidationError as problem:
        raise UserError(describe(problem)) from None
    for field, value in family.required_values.items():
        if content.get(field) not in (None, value):
            raise UserError(f"{field}: {content[field]} is not supported; use a {name} model with {value}")
    fields: dict[str, Any] = {"model_type": name, **family.defaults, "reward": _is_reward_model(content)}
    fields["final_logit_softcapping"] = content.get("final_logit_softcapping")
    for ours in (*_COMMON_FIELDS, *family.fields):
        theirs = family.names.get(ours, ours)
        # Null is a field left out, except where it is a value.
        if theirs in content and (content[theirs] is not None or getattr(ModelConfig, ours, None) is None):
            fields[ours] = content[theirs]
    for ours in REQUIRED_FIELDS:
        if fields.get(ours) is None:
            raise UserError(f"{family.names.get(ours, ours)}: missing; add it")
    if not family.learned_positions:
        # transformers 5 writes one table where transformers 4 wrote a number and, if frequencies are scaled, a table.
        rope = _rope_table(content)
        fields |= {"rope_scaling": rope, **{name: rope[name] for name in ("rope_theta",) if name in rope}}
    return fields | family.read(content)


def reject_extreme_sizes(content: dict[str, Any]) -> None:
    """Raise UserError, naming the field, for more layers or experts than any model has: each of them is built one by one."""
    most = MODEL_RANGES["num_hidden_layers"]["le"]
    for name, value in content.items():
        if isinstance(value, dict):
            reject_extreme_sizes(value)
        elif re.search("layers?$|experts$|^depth$", name) and isinstance(value, int | float) and not value <= most:
            raise UserError(f"{name}: expected at most {most:,}, got {quoted(value)}")


def _rope_table(content: dict[str, Any]) -> dict[str, Any]:
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UserError(f"rope_scaling: expected an object, got {quoted(rope)}")
    return rope


def _is_reward_model(content: dict[str, Any]) -> bool:
    """Whether it is a classifier with one label. Raises UserError for one with several."""
    if not any(str(name).endswith(_CLASSIFIER_SUFFIX) for name in content.get("architectures") or ()):
        return False
    labels = content.get("num_labels") or len(content.get("id2label") or (0, 1))  # transformers assumes two
    if labels != 1:
        raise UserError(f"num_labels: a classifier of {labels} labels is not supported; only reward models, which have one")
    return True


def is_supported_family(content: dict[str, Any]) -> bool:
    """Whether a config.json is of a family that lmforge computes itself; other fields may still be refused."""
    has_experts = any(content.get(name) for name in NUM_EXPERTS_FIELDS)
    return registry.find("model_family", str(content.get("model_type"))) is not None and not has_experts


def _reject_unsupported(content: dict[str, Any]) -> None:
    for name in NUM_EXPERTS_FIELDS:
        if content.get(name):
            raise UserError(f"{name}: mixtures of experts are not supported; use a dense model")
    rope = _rope_table(content)
    rotated = rope.get("partial_rotary_factor", content.get("partial_rotary_factor"))
    if rotated not in (None, 1):
        raise UserError(f"partial_rotary_factor: {rotated} is not supported; use a model that rotates whole heads")
    if content.get("quantization_config"):
        raise UserError("quantization_config: quantized weights cannot be trained; use the unquantized model")
