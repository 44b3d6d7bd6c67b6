"""The model config of a recipe, with overrides.

It is that of a preset, a folder, or a name on the Hugging Face hub. This module imports torch only
if transformers computes the model.
"""

from pathlib import Path
from typing import Any

from lmforge.core.errors import UserError
from lmforge.core.model.config import ModelConfig, base_model_type
from lmforge.core.model.config_json import (
    config_fields_from_json,
    is_supported_family,
    read_config_json,
)
from lmforge.core.model.family import load_family
from lmforge.core.model.presets import PRESETS, get_preset
from lmforge.core.model.resolve import (
    build_model_config,
    check_model_options,
    fit_vocabulary,
)
from lmforge.core.model.text_tower import TOWER_OF
from lmforge.core.options.sections import ModelOptions
from lmforge.hf.hub import resolve_model_folder


def resolve_model_config(
    source: str | Path | None,
    overrides: dict[str, Any],
    vocab_size: int | None = None,
    implementation: str = "lmforge",
    may_grow: bool = False,
) -> ModelConfig:
    """The model config of a recipe. Raises UserError for one that cannot be computed.

    Args:
        source: name of a preset, folder with a config.json, name on the Hugging Face hub, or None
            to take every field from `overrides`.
        overrides: fields of ModelConfig that replace the source's. Fields that the source leaves to
            be derived (head_dim from hidden_size, say) are derived after that.
        vocab_size: entries of the tokenizer. It sets the vocabulary unless the config comes from a
            folder, whose own vocabulary stays: it may be larger (embeddings that no token uses) but
            not smaller, unless it may grow.
        may_grow: whether a folder's vocabulary may grow to the tokenizer's.
        implementation: what is to compute a folder's model: "lmforge", "transformers"
            (transformers_model.py), or "auto", which is lmforge for the families that it supports.
    """
    path = None
    if source is not None and source not in PRESETS:
        folder = resolve_model_folder(Path(source), "config.json")
        path = folder / "config.json" if folder.is_dir() else None
        source = str(folder)
    if implementation == "auto" and path is not None:
        implementation = "transformers"
        if is_supported_family(read_config_json(path)):
            implementation = "lmforge"
    if implementation == "transformers":
        if path is None:
            raise UserError(
                f"{source}: no such folder; model.implementation = transformers wraps a Hugging"
                " Face folder"
            )
        return _resolve_transformers_config(path, overrides, vocab_size, may_grow)
    chosen: dict[str, Any] = {}
    if path is not None:
        chosen = _read_config_fields(path)
    elif source is not None:
        get_preset(str(source))
        chosen = dict(PRESETS[str(source)])
    where = str(path or "model")
    return build_model_config(
        where, chosen, overrides, vocab_size, may_grow, keeps_vocabulary=path is not None
    )


def model_config_from_options(
    options: ModelOptions, vocab_size: int | None = None, changed: dict[str, Any] | None = None
) -> ModelConfig:
    """The model config from the options of a recipe, with `changed` fields. Raises UserError.

    It is nano where they name none.
    """
    source = options.source or options.preset or "nano"
    config = resolve_model_config(
        source,
        options.overrides() | (changed or {}),
        vocab_size,
        options.implementation,
        options.resize_vocab,
    )
    check_model_options(options, config)
    return config


def _read_config_fields(path: Path) -> dict[str, Any]:
    content = read_config_json(path)
    try:
        fields = config_fields_from_json(content)
        if fields["final_logit_softcapping"] is not None:
            family = load_family(base_model_type(fields["model_type"]))
            if not family.caps_logits:
                raise UserError(
                    f"final_logit_softcapping: transformers' {fields['model_type']} models have"
                    " none; remove it"
                )
        return fields
    except UserError as error:
        problem = f"{path}: {error}"
        if not is_supported_family(content):
            problem += f"; {_whether_transformers_can(path)}"
        raise UserError(problem) from None


def _whether_transformers_can(path: Path) -> str:
    """Whether the model of a config.json can be wrapped instead, and how, in words."""
    try:
        _resolve_transformers_config(path, {}, None, False)
    except UserError as error:
        reason = str(error).removeprefix(f"{path}: ")
        return f"nor can transformers compute it here: {reason}"
    return "or let transformers compute it: --model.implementation transformers"


def _resolve_transformers_config(
    path: Path, overrides: dict[str, Any], vocab_size: int | None, may_grow: bool
) -> ModelConfig:
    """The config of a Hugging Face folder, with `overrides` in the names of its config.json."""
    from lmforge.hf.transformers_causal_lm import read_pretrained_config
    from lmforge.hf.transformers_model import to_transformers_config

    content = {
        name: value
        for name, value in read_config_json(path).items()
        if name not in ("dtype", "torch_dtype")
    }
    if TOWER_OF in content:
        raise UserError(
            f"{path}: model.implementation = transformers: not of the language model in a"
            f" {content[TOWER_OF]} folder; leave it out"
        )
    theirs = read_pretrained_config(content, str(path))
    for name in overrides:
        if not hasattr(theirs, name):
            raise UserError(
                f"model.{name}: a {theirs.model_type} model has no such field; see {path}"
            )
    heads = "num_attention_heads"
    kv_heads = "num_key_value_heads"
    # As in with_overrides.
    if heads in overrides and getattr(theirs, kv_heads, None) == getattr(theirs, heads):
        overrides = {kv_heads: overrides[heads], **overrides}
    theirs_size = overrides.get("vocab_size", getattr(theirs, "vocab_size", None))
    overrides = overrides | {
        "vocab_size": fit_vocabulary(str(path), theirs_size, vocab_size, may_grow)
    }
    # Each family has its own spelling of some names.
    content |= {theirs.attribute_map.get(name, name): value for name, value in overrides.items()}
    config = to_transformers_config(content, str(path))
    try:
        config.counted_parameters()  # builds the model, and so refuses what cannot be wrapped
    except UserError as error:
        raise UserError(f"{path}: {str(error).removeprefix('model: ')}") from None
    return config
