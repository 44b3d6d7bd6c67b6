"""The model config of a recipe that begins from nothing, and of a checkpoint.

That of a folder or of a name on the hub is read in hf/resolve.py. No torch here.
"""

from dataclasses import fields
from typing import Any

from lmforge.core import registry
from lmforge.core.errors import UserError, did_you_mean, prefix_errors
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.config_json import REQUIRED_FIELDS, config_fields_from_json
from lmforge.core.model.presets import PRESETS, get_preset
from lmforge.core.options.sections import BALANCE_OPTIONS, ModelOptions
from lmforge.core.records.manifests import Manifest


def preset_model_config(options: ModelOptions, vocab_size: int | None = None) -> ModelConfig:
    """The model config of options that name no source: a preset, nano by default, with their
    overrides. Raises UserError.
    """
    preset = options.preset or "nano"
    if options.implementation == "transformers":
        raise UserError(
            f"{preset}: no such folder; model.implementation = transformers wraps a Hugging Face"
            " folder"
        )
    get_preset(preset)
    config = build_model_config(
        "model", dict(PRESETS[preset]), options.overrides(), vocab_size, options.resize_vocab
    )
    check_model_options(options, config)
    return config


def build_model_config(
    where: str,
    chosen: dict[str, Any],
    overrides: dict[str, Any],
    vocab_size: int | None,
    may_grow: bool,
    *,
    keeps_vocabulary: bool = False,
) -> ModelConfig:
    """The config of `chosen` fields and `overrides`, for a tokenizer of `vocab_size` entries, whose
    size it takes unless it `keeps_vocabulary`, which `may_grow`.

    Raises UserError, beginning with `where`.
    """
    chosen = with_overrides(chosen, overrides)
    if vocab_size is not None and not keeps_vocabulary and "vocab_size" not in overrides:
        chosen["vocab_size"] = vocab_size
    for name in REQUIRED_FIELDS:
        if name not in chosen:
            raise UserError(
                f"model.{name}: missing; give it, or begin from a preset ({', '.join(PRESETS)})"
            )
    chosen["vocab_size"] = fit_vocabulary(where, chosen["vocab_size"], vocab_size, may_grow)
    with prefix_errors(where):
        return ModelConfig(**chosen)


def check_model_options(options: ModelOptions, config: ModelConfig) -> None:
    """Raise UserError for options that the model has no part for."""
    check_balance(options, config)
    if options.router_aux_loss_coef and not config.output_router_logits:
        without = "the model trains without this loss (output_router_logits is false)"
        raise UserError(
            f"model.router_aux_loss_coef: {without}; add --model.output_router_logits true, or"
            " leave it out"
        )


def check_balance(options: ModelOptions, config: ModelConfig) -> None:
    """Raise UserError for options that balance experts in a way that the model has not."""
    given = [name for name in BALANCE_OPTIONS if getattr(options, name) not in (None, 0, "row")]
    if given and not any(config.sparse_layers):
        raise UserError(f"model.{given[0]}: this model has no experts to balance; leave it out")
    if "bias_update_speed" in given and not config.family.sigmoid_router:
        why = (
            f"a {config.model_type} model has no biases to choose by, so an export would compute"
            " other logits"
        )
        raise UserError(
            f"model.bias_update_speed: {why}; leave it out, or use model.router_aux_loss_coef"
        )
    if "router_aux_loss_scope" in given and not (
        config.output_router_logits and config.router_aux_loss_coef
    ):
        way = (
            "add --model.output_router_logits true and model.router_aux_loss_coef, or leave it out"
        )
        raise UserError(f"model.router_aux_loss_scope: the model trains without this loss; {way}")


def with_overrides(chosen: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    known = [field.name for field in fields(ModelConfig)]
    for name in overrides:
        if name not in known:
            raise UserError(f"model.{name}: no such field{did_you_mean(name, known)}")
    if "num_attention_heads" in overrides and chosen.get("num_key_value_heads") == chosen.get(
        "num_attention_heads"
    ):
        chosen = {**chosen, "num_key_value_heads": 0}  # as many, whatever their number
    # What depends on these is derived anew.
    dependent: tuple[str, ...] = (
        ("attention_bias", "attention_output_bias", "qk_norm") if "model_type" in overrides else ()
    )
    if "attention_bias" in overrides:
        dependent += ("attention_output_bias",)
    return {name: value for name, value in chosen.items() if name not in dependent} | overrides


def model_config_from_json(
    content: dict[str, Any], source: str, implementation: str = "lmforge"
) -> ModelConfig:
    """The config of the model that a config.json describes.

    implementation: the registered name of what is to compute it, "lmforge" or "transformers".
    Raises UserError, beginning with `source`, for what cannot be computed.
    """
    config: ModelConfig = registry.get("implementation", implementation).build(content, source)
    return config


def build_from_json(content: dict[str, Any], source: str) -> ModelConfig:
    """The config of a model that lmforge computes itself.

    Raises UserError, beginning with `source`.
    """
    with prefix_errors(source):
        return ModelConfig(**config_fields_from_json(content))


def stored_model_config(manifest: Manifest) -> ModelConfig:
    """The config of the model in a checkpoint. Raises UserError where it cannot be computed."""
    implementation = manifest.recipe.get("model", {}).get("implementation", "lmforge")
    return model_config_from_json(manifest.hf_config, "the checkpoint's manifest", implementation)


def fit_vocabulary(where: str, model_size: Any, tokenizer_size: int | None, may_grow: bool) -> Any:
    """The size of the vocabulary, grown if it may.

    Raises UserError where the tokenizer does not fit it.
    """
    if tokenizer_size is None or not isinstance(model_size, int):
        return model_size
    if may_grow:
        return max(model_size, tokenizer_size)
    if model_size < tokenizer_size:
        raise UserError(
            f"{where}: vocab_size is {model_size} and the tokenizer has {tokenizer_size} entries;"
            " use the tokenizer that belongs to this model, or let it grow: --model.resize_vocab"
            " true"
        )
    return model_size
