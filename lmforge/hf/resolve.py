"""The model config of a recipe: from a preset, a folder, or a name on the Hugging Face hub, with overrides. It imports torch
only if transformers computes the model.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

from lmforge.core.errors import UserError, did_you_mean, prefix_errors
from lmforge.core.model.config import ModelConfig, base_model_type, get_preset
from lmforge.core.model.family import load_family
from lmforge.core.model.presets import PRESETS
from lmforge.core.options.sections import BALANCE_OPTIONS, ModelOptions
from lmforge.core.records.manifests import Manifest
from lmforge.hf.config_json import REQUIRED_FIELDS, config_fields_from_json, is_supported_family, read_config_json
from lmforge.hf.hub import resolve_model_folder


def resolve_model_config(
    source: str | Path | None,
    overrides: dict[str, Any],
    vocab_size: int | None = None,
    implementation: str = "lmforge",
    vocab_multiple: int | None = None,
) -> ModelConfig:
    """The model config of a recipe. Raises UserError for one that cannot be computed.

    Args:
        source: name of a preset, folder with a config.json, name on the Hugging Face hub, or None to take every field from
            `overrides`.
        overrides: fields of ModelConfig that replace the source's. Fields that the source leaves to be derived (head_dim
            from hidden_size, say) are derived after that.
        vocab_size: entries of the tokenizer. It sets the vocabulary unless the config comes from a folder, whose own
            vocabulary stays: it may be larger (embeddings that no token uses) but not smaller, unless it may grow.
        vocab_multiple: a folder's vocabulary may grow to the tokenizer's, to a multiple of this; None: it may not.
        implementation: what is to compute a folder's model: "lmforge", "transformers" (transformers_model.py), or "auto",
            which is lmforge for the families that it supports.
    """
    path = None
    if source is not None and source not in PRESETS:
        folder = resolve_model_folder(Path(source), "config.json")
        path = folder / "config.json" if folder.is_dir() else None
        source = str(folder)
    if implementation == "auto" and path is not None:
        implementation = "lmforge" if is_supported_family(read_config_json(path)) else "transformers"
    if implementation == "transformers":
        if path is None:
            raise UserError(f"{source}: no such folder; model.implementation = transformers wraps a Hugging Face folder")
        return _resolve_transformers_config(path, overrides, vocab_size, vocab_multiple)
    where, chosen = str(path or "model"), {}
    if path is not None:
        chosen = _read_config_fields(path)
    elif source is not None:
        get_preset(str(source))
        chosen = dict(PRESETS[str(source)])
    chosen = _with_overrides(chosen, overrides)
    if vocab_size is not None and path is None and "vocab_size" not in overrides:
        chosen["vocab_size"] = vocab_size
    for name in REQUIRED_FIELDS:
        if name not in chosen:
            raise UserError(f"model.{name}: missing; give it, or begin from a preset ({', '.join(PRESETS)})")
    chosen["vocab_size"] = _fit_vocabulary(where, chosen["vocab_size"], vocab_size, vocab_multiple)
    with prefix_errors(where):
        return ModelConfig(**chosen)


def model_config_from_options(
    options: ModelOptions, vocab_size: int | None = None, changed: dict[str, Any] | None = None
) -> ModelConfig:
    """The model config from the options of a recipe, nano where they name none, with `changed` fields. Raises UserError."""
    source = options.source or options.preset or "nano"
    multiple = options.pad_vocab_to_multiple_of or 1 if options.resize_vocab else None
    config = resolve_model_config(source, options.overrides() | (changed or {}), vocab_size, options.implementation, multiple)
    check_balance(options, config)
    if options.router_aux_loss_coef and not config.output_router_logits:
        without = "the model trains without this loss (output_router_logits is false)"
        raise UserError(f"model.router_aux_loss_coef: {without}; add --model.output_router_logits true, or leave it out")
    return config


def check_balance(options: ModelOptions, config: ModelConfig) -> None:
    """Raise UserError for options that balance experts in a way that the model has not."""
    given = [name for name in BALANCE_OPTIONS if getattr(options, name) not in (None, 0, "row")]
    if given and not any(config.sparse_layers):
        raise UserError(f"model.{given[0]}: this model has no experts to balance; leave it out")
    if "bias_update_speed" in given and not config.family.sigmoid_router:
        why = f"a {config.model_type} model has no biases to choose by, so an export would compute other logits"
        raise UserError(f"model.bias_update_speed: {why}; leave it out, or use model.router_aux_loss_coef")
    if "router_aux_loss_scope" in given and not (config.output_router_logits and config.router_aux_loss_coef):
        way = "add --model.output_router_logits true and model.router_aux_loss_coef, or leave it out"
        raise UserError(f"model.router_aux_loss_scope: the model trains without this loss; {way}")


def _with_overrides(chosen: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    known = [field.name for field in fields(ModelConfig)]
    for name in overrides:
        if name not in known:
            raise UserError(f"model.{name}: no such field{did_you_mean(name, known)}")
    if "num_attention_heads" in overrides and chosen.get("num_key_value_heads") == chosen.get("num_attention_heads"):
        chosen = {**chosen, "num_key_value_heads": 0}  # as many, whatever their number
    # What depends on these is derived anew.
    dependent: tuple[str, ...] = ("attention_bias", "attention_output_bias", "qk_norm") if "model_type" in overrides else ()
    if "attention_bias" in overrides:
        dependent += ("attention_output_bias",)
    return {name: value for name, value in chosen.items() if name not in dependent} | overrides


def model_config_from_json(content: dict[str, Any], source: str, implementation: str = "lmforge") -> ModelConfig:
    """The config of the model that a config.json describes.

    implementation: what is to compute it, "lmforge" or "transformers" (transformers_model.py).
    Raises UserError, beginning with `source`, for what cannot be computed.
    """
    if implementation == "transformers":
        from lmforge.hf.transformers_model import to_transformers_config

        return to_transformers_config(content, source)
    with prefix_errors(source):
        return ModelConfig(**config_fields_from_json(content))


def stored_model_config(manifest: Manifest) -> ModelConfig:
    """The config of the model in a checkpoint. Raises UserError where it cannot be computed."""
    implementation = manifest.recipe.get("model", {}).get("implementation", "lmforge")
    return model_config_from_json(manifest.hf_config, "the checkpoint's manifest", implementation)


def _fit_vocabulary(where: str, model_size: Any, tokenizer_size: int | None, multiple: int | None) -> Any:
    """The size of the vocabulary, grown if it may. Raises UserError where the tokenizer does not fit it."""
    if tokenizer_size is None or not isinstance(model_size, int):
        return model_size
    if multiple is not None:
        return -(-max(model_size, tokenizer_size) // multiple) * multiple
    if model_size < tokenizer_size:
        raise UserError(
            f"{where}: vocab_size is {model_size} and the tokenizer has {tokenizer_size} entries; "
            "use the tokenizer that belongs to this model, or let it grow: --model.resize_vocab true"
        )
    return model_size


def _read_config_fields(path: Path) -> dict[str, Any]:
    content = read_config_json(path)
    try:
        fields = config_fields_from_json(content)
        if fields["final_logit_softcapping"] is not None and not load_family(base_model_type(fields["model_type"])).caps_logits:
            raise UserError(f"final_logit_softcapping: transformers' {fields['model_type']} models have none; remove it")
        return fields
    except UserError as error:
        advice = "; or let transformers compute it: --model.implementation transformers"
        raise UserError(f"{path}: {error}{'' if is_supported_family(content) else advice}") from None


def _resolve_transformers_config(
    path: Path, overrides: dict[str, Any], vocab_size: int | None, vocab_multiple: int | None
) -> ModelConfig:
    """The config of a Hugging Face folder, with `overrides` in the names of its config.json."""
    from lmforge.hf.transformers_causal_lm import read_pretrained_config
    from lmforge.hf.transformers_model import to_transformers_config

    content = {name: value for name, value in read_config_json(path).items() if name not in ("dtype", "torch_dtype")}
    theirs = read_pretrained_config(content, str(path))
    for name in overrides:
        if not hasattr(theirs, name):
            raise UserError(f"model.{name}: a {theirs.model_type} model has no such field; see {path}")
    heads, kv_heads = "num_attention_heads", "num_key_value_heads"
    if heads in overrides and getattr(theirs, kv_heads, None) == getattr(theirs, heads):  # as in _with_overrides
        overrides = {kv_heads: overrides[heads], **overrides}
    theirs_size = overrides.get("vocab_size", getattr(theirs, "vocab_size", None))
    overrides = overrides | {"vocab_size": _fit_vocabulary(str(path), theirs_size, vocab_size, vocab_multiple)}
    # Each family has its own spelling of some names.
    content |= {theirs.attribute_map.get(name, name): value for name, value in overrides.items()}
    config = to_transformers_config(content, str(path))
    try:
        config.counted_parameters()  # builds the model, and so refuses what cannot be wrapped
    except UserError as error:
        raise UserError(f"{path}: {str(error).removeprefix('model: ')}") from None
    return config
