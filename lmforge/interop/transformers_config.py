"""The shape of a model that transformers computes: a config.json as it is, and the few numbers that others ask of it.

No torch until a shape is asked for; then transformers, an extra, is imported. Its modules are wrapped in foreign.py.
"""

import json
import logging
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from lmforge.errors import UserError
from lmforge.model.config import ModelConfig, read_config_json

MIN_TRANSFORMERS_VERSION = (5, 20)
# Their positions are slopes on the distance of two tokens: nobody needs to tell them where a document begins or ends.
ALIBI_MODEL_TYPES = ("bloom", "mpt")


@dataclass(frozen=True)
class TransformersConfig(ModelConfig):
    """A shape of any causal model that transformers knows. `content` decides; the other fields repeat what it says.

    What a family does not have (head_dim, intermediate_size) is as near as its own numbers come.
    """

    config_dict: dict[str, Any] = field(default_factory=dict)
    max_learned_positions: int | None = None

    def __post_init__(self) -> None:
        """Nothing is derived and nothing refused: transformers has read the content."""

    @property
    def family(self) -> str:
        return "transformers"

    @property
    def max_sequence_length(self) -> int | None:
        return self.max_learned_positions

    def to_config_json(self) -> dict[str, Any]:
        return dict(self.config_dict)


def import_transformers() -> Any:
    """transformers, imported and silent. Raises UserError where it is not installed, or too old."""
    # It imports torchao in passing, if that is installed, and a user of another thing can act on none of what that says.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        import transformers
    except ImportError:
        raise UserError(
            "transformers, which is to compute this model, is not installed; pip install 'lmforge[transformers]'"
        ) from None
    if tuple(map(int, transformers.__version__.split(".")[:2])) < MIN_TRANSFORMERS_VERSION:
        raise UserError(
            f"transformers {transformers.__version__} is too old to be wrapped; pip install 'lmforge[transformers]'"
        )
    transformers.utils.logging.set_verbosity_error()
    return transformers


def resolve_transformers_config(folder: Path, overrides: dict[str, Any], vocab_size: int | None = None) -> TransformersConfig:
    """The shape of a Hugging Face folder, with `overrides` in the names of its config.json.

    Raises UserError where transformers cannot read it, and where it has fewer entries than a tokenizer's `vocab_size`.
    """
    path = folder / "config.json"
    content = {name: value for name, value in read_config_json(path).items() if name not in ("dtype", "torch_dtype")}
    theirs = read_pretrained_config(content, str(path))
    for name in overrides:
        if not hasattr(theirs, name):
            raise UserError(f"model.{name}: a {theirs.model_type} model has no such field; see {path}")
    # Each family has its own spelling of some names.
    content |= {theirs.attribute_map.get(name, name): value for name, value in overrides.items()}
    config = to_transformers_config(content, str(path))
    if vocab_size is not None and config.vocab_size < vocab_size:
        raise UserError(
            f"{path}: vocab_size is {config.vocab_size} and the tokenizer has {vocab_size} entries; "
            "use the tokenizer that belongs to this model"
        )
    try:
        wrapped_parameter_counts(config)  # builds it, and so refuses what cannot be wrapped
    except UserError as mistake:
        raise UserError(f"{path}: {str(mistake).removeprefix('model: ')}") from None
    return config


def to_transformers_config(config_dict: dict[str, Any], where: str) -> TransformersConfig:
    """The shape that a config.json describes. Raises UserError, beginning with `where`, for what cannot be wrapped."""
    theirs = read_pretrained_config(config_dict, where)

    def first(*names: str, default: Any = 0) -> Any:
        found = (getattr(theirs, name, None) for name in names)
        return next((value for value in found if value is not None), default)

    heads = first("num_attention_heads", default=1)
    width, layers = first("hidden_size"), first("num_hidden_layers")
    longest = first("max_position_embeddings")
    # Angles and slopes go on for ever; tables of learned positions end.
    slopes = theirs.model_type in ALIBI_MODEL_TYPES or first("alibi", default=False)
    endless = getattr(theirs, "rope_parameters", None) or slopes or not longest
    return TransformersConfig(
        vocab_size=first("vocab_size"),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=first("intermediate_size", "ffn_dim", default=4 * width),
        num_key_value_heads=first("num_key_value_heads", "num_kv_heads", default=heads),
        head_dim=first("head_dim", default=width // heads),
        model_type=theirs.model_type,
        max_position_embeddings=longest or 2048,
        tie_word_embeddings=bool(first("tie_word_embeddings", default=False)),
        initializer_range=first("initializer_range", "init_std", default=0.02),
        eos_token_id=_hashable(first("eos_token_id", default=None)),
        config_dict=config_dict,
        max_learned_positions=None if endless else longest,
    )


def read_pretrained_config(config_dict: dict[str, Any], where: str) -> Any:
    """transformers' own configuration object. Code that comes with a folder is never run."""
    transformers = import_transformers()
    kind = config_dict.get("model_type")
    if config_dict.get("quantization_config"):
        raise UserError(f"{where}: quantization_config: quantized weights cannot be trained; use the unquantized model")
    if kind not in transformers.CONFIG_MAPPING:
        why = "its code comes with the folder, and such code is not run" if "auto_map" in config_dict else "it is unknown to it"
        raise UserError(
            f'{where}: model_type: transformers {transformers.__version__} has no "{kind}" ({why}); use another model'
        )
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(dict(config_dict))
    except Exception as problem:  # whatever a family's own checks raise
        raise UserError(f"{where}: transformers cannot read it ({_one_line(problem)}); copy the file again") from None
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"{where}: transformers has no causal language model of type {kind}; use one that writes text")
    if config.get_text_config() is not config:
        raise UserError(f"{where}: a {kind} model reads more than text; use the folder of its text model")
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False
    return config


@cache
def _parameter_counts_of_json(config_json: str) -> tuple[int, int, int, int]:
    from lmforge.interop.transformers_model import count_wrapped_parameters

    return count_wrapped_parameters(to_transformers_config(json.loads(config_json), "model"))


def wrapped_parameter_counts(config: TransformersConfig) -> tuple[int, int, int, int]:
    """The fields of a ParameterCount (model/flops.py)."""
    return _parameter_counts_of_json(json.dumps(config.config_dict, sort_keys=True))


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _one_line(problem: BaseException) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return f"{type(problem).__name__}: {' '.join(lines)}"[:200]
