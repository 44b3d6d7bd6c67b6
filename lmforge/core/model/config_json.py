"""Between ModelConfig and the content of a Hugging Face config.json.

Reads the spelling of transformers 4 (`rope_theta`, `rope_scaling`) and of transformers 5
(`rope_parameters`); writes the former, which both read. Refuses by name what lmforge cannot
compute. core/model/config.py checks which values are valid together.
"""

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from lmforge.core import registry
from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import check_content, describe, quoted, read_json
from lmforge.core.model.config import ModelConfig, base_model_type
from lmforge.core.model.family import LINEAR_ATTENTION_FIELDS, ROUTER_VALUES, load_family
from lmforge.core.model.text_tower import read_text_tower
from lmforge.core.options.ranges import LENGTH, MODEL_RANGES, REPETITION_PENALTY

NUM_EXPERTS_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts")
REQUIRED_FIELDS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_SIZES = (*REQUIRED_FIELDS[1:], "max_position_embeddings")
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
# Of which null is a value, as in transformers: none at all, or one to be derived. A flag is then
# off, as the weights must say.
_NULLABLE = (
    "intermediate_size",
    "num_key_value_heads",
    "head_dim",
    "sliding_window",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "mlp_only_layers",
    "no_rope_layers",
    "attention_bias",
    "mlp_bias",
    "q_lora_rank",
    *LINEAR_ATTENTION_FIELDS,
    "moe_latent_size",
    *REQUIRED_FIELDS,
)
_CLASSIFIER_SUFFIX = "ForSequenceClassification"


TokenIds = Annotated[int, Field(ge=0)] | list[Annotated[int, Field(ge=0)]]
# How transformers samples, and the values that leave the model's distribution as it is. Further
# ones are not computed here.
NEUTRAL_SAMPLING: dict[str, Any] = {
    "num_beams": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "max_time": None,
    "typical_p": 1.0,
    "top_h": None,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "guidance_scale": 1,
    "watermarking_config": None,
    "penalty_alpha": None,
    "dola_layers": None,
    "constraints": None,
    "force_words_ids": None,
    "token_healing": False,
    "num_return_sequences": 1,
}


class GenerationConfig(BaseModel, strict=True, extra="allow", allow_inf_nan=False):
    """What is used of a generation_config.json; null is a field left out.

    Its other fields are kept.
    """

    eos_token_id: TokenIds | None = None
    do_sample: bool | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(**REPETITION_PENALTY)] | None = None
    max_new_tokens: Annotated[int, Field(gt=0, le=LENGTH["le"])] | None = None
    max_length: Annotated[int, Field(gt=0, le=LENGTH["le"])] | None = None
    stop_strings: str | list[str] | None = None


class _LinearAttention(BaseModel, strict=True):
    """What the Kimi delta attention of a config.json is."""

    num_heads: int = 1
    head_dim: int = 1
    short_conv_kernel_size: int = 1
    full_attn_layers: list[int] = []
    kda_layers: list[int] = []


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
    max_window_layers: int = 0
    sliding_window_pattern: int | str | None = None
    no_rope_layers: list[Annotated[int, Field(ge=0, le=1)]] | None = None
    no_rope_layer_interval: Annotated[int, Field(gt=0)] = 4
    use_sliding_window: bool = False
    tie_word_embeddings: bool = False
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    mlp_only_layers: list[int] | None = None
    norm_topk_prob: bool | None = None
    moe_renormalize: bool | None = None
    mamba_dt_limit: list[Any] | None = None
    output_router_logits: bool | None = None
    rope_interleave: bool | None = None
    conv_bias: bool | None = None
    use_conv_bias: bool = True
    mamba_conv_bias: bool = True
    hybrid_override_pattern: str = ""
    layers_block_type: list[str] | None = None
    time_step_limit: list[Any] | None = None
    block_auto_adjust_ff_dim: bool = True
    block_multiple_of: Annotated[int, Field(gt=0, le=2**20)] = 256
    block_ff_dim: Annotated[int, Field(gt=0, le=2**22)] = 1
    block_ffn_dim_multiplier: Annotated[float, Field(gt=0, le=1e3, allow_inf_nan=False)] | None = 1
    full_attn_idxs: list[Annotated[int, Field(ge=0)]] | None = None
    linear_attn_config: _LinearAttention | None = None
    mlp_layer_types: list[str] | None = None
    full_attention_interval: Annotated[int, Field(gt=0)] | None = None
    tie_embedding: bool = False
    num_experts: int | None = None
    num_local_experts: int | None = None


def read_config_json(path: Path) -> dict[str, Any]:
    """The content of a config.json, and in `generation_config` that of the file beside it; of a
    model that reads images too, its language model's (text_tower.py).

    Raises UserError where it cannot be read.
    """
    content = _read_with_generation(path)
    try:
        return read_text_tower(content)
    except UserError as problem:
        raise UserError(f"{path}: {problem}") from None


def _read_with_generation(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(
            f"{path}: no such file; give a folder in Hugging Face's layout, or the name of a preset"
        )
    # Infinity is refused later, with the name of its field.
    content = read_json(path, dict[str, Any], hint="copy the file again", allow_nan=True)
    beside = path.parent / "generation_config.json"
    content.pop("generation_config", None)
    if beside.is_file():
        read = read_json(beside, GenerationConfig, hint="correct it, or copy the file again")
        content["generation_config"] = read.model_dump(exclude_unset=True)
        return content
    # Before there was that file, config.json said how to sample; transformers still reads it there.
    said = {
        name: content[name]
        for name in (*GenerationConfig.model_fields, *NEUTRAL_SAMPLING)
        if name in content
    }
    if said.keys() - {"eos_token_id"}:
        content["generation_config"] = check_content(said, GenerationConfig, str(path)).model_dump(
            exclude_unset=True
        )
    return content


def to_config_json(config: ModelConfig) -> dict[str, Any]:
    """A model config as the content of a config.json that transformers 4 and 5 both read; under
    `generation_config` that of the file beside it, if there was one.
    """
    generation = (
        {} if config.generation_config is None else {"generation_config": config.generation_config}
    )
    if config.implementation == "transformers":
        return config.config_dict | generation  # type: ignore[attr-defined]
    family = config.family
    architecture = family.classifier if config.reward else family.architecture
    content: dict[str, Any] = {"architectures": [architecture], "model_type": config.model_type}
    # export.py refuses it where transformers would not read it.
    if config.final_logit_softcapping is not None:
        content["final_logit_softcapping"] = config.final_logit_softcapping
    if config.reward:
        content |= {"id2label": {"0": "reward"}, "label2id": {"reward": 0}}
    content |= {
        family.names.get(name, name): getattr(config, name)
        for name in (*_COMMON_FIELDS, *family.fields)
        if name != "time_step_limit"  # which may be infinite: state_space.py writes it
    }
    if family.has_rotary(config):
        content["rope_scaling"] = config.written_rope_scaling or None
    return content | dict.fromkeys(family.dropouts, 0.0) | family.write(config) | generation


def config_fields_from_json(content: dict[str, Any]) -> dict[str, Any]:
    """ModelConfig's fields out of a config.json.

    Raises UserError, naming the field, for what lmforge cannot compute.
    """
    name = str(content.get("model_type"))
    _reject_unsupported(content, name)
    if registry.find("model_family", name) is None:
        known = ", ".join(registry.names("model_family"))
        raise UserError(
            f'model_type: "{name}" is not supported; lmforge reads {known}; a plugin adds others'
            " (--plugins)"
        )
    family = load_family(base_model_type(name))
    reject_extreme_sizes(content)
    try:
        _ConfigJson.model_validate(content)
    except ValidationError as problem:
        raise UserError(describe(problem)) from None
    router = {
        name: value
        for name, value in ROUTER_VALUES.items()
        if family.stored_experts and name not in family.fields
    }
    for field, value in {**router, **family.required_values}.items():
        if content.get(field) not in (None, value):
            advice = "a model without it" if value is None else f"a model with {quoted(value)}"
            raise UserError(
                f"{field}: {quoted(content[field])} is not supported for {name}; use {advice}"
            )
    fields: dict[str, Any] = {
        "model_type": name,
        **family.defaults,
        "reward": _is_reward_model(content),
    }
    fields |= {each: content.get(each) for each in ("final_logit_softcapping", "generation_config")}
    for ours in (*_COMMON_FIELDS, *family.fields):
        # Sizes under their common names win over the family's own.
        theirs = ours if ours in content and ours in _SIZES else family.names.get(ours, ours)
        if ours == "num_experts":  # which transformers 5 writes under another name than 4
            theirs = next((each for each in NUM_EXPERTS_FIELDS if each in content), theirs)
        if content.get(theirs) is not None:
            fields[ours] = content[theirs]
        elif theirs in content:
            if ours not in _NULLABLE or (ours == "sliding_window" and family.default_window):
                raise UserError(f"{theirs}: null is not supported; give a value, or remove it")
            fields[ours] = getattr(ModelConfig, ours, None)
    for ours in REQUIRED_FIELDS:
        if fields.get(ours) is None and not (ours == "num_hidden_layers" and family.names_layers):
            raise UserError(f"{family.names.get(ours, ours)}: missing; add it")
    return fields | family.read(content)


def reject_extreme_sizes(content: dict[str, Any]) -> None:
    """Raise UserError, naming the field, for more layers or experts than any model has: each of
    them is built one by one.
    """
    most = MODEL_RANGES["num_hidden_layers"]["le"]
    for name, value in content.items():
        if isinstance(value, dict):
            reject_extreme_sizes(value)
        elif (
            re.search("layers?$|experts$|^depth$", name)
            and isinstance(value, int | float)
            and not value <= most
        ):
            raise UserError(f"{name}: expected at most {most:,}, got {quoted(value)}")


def _is_reward_model(content: dict[str, Any]) -> bool:
    """Whether it is a classifier with one label. Raises UserError for one with several."""
    if not any(
        str(name).endswith(_CLASSIFIER_SUFFIX) for name in content.get("architectures") or ()
    ):
        return False
    # transformers assumes two.
    labels = content.get("num_labels") or len(content.get("id2label") or (0, 1))
    if labels != 1:
        raise UserError(
            f"num_labels: a classifier of {labels} labels is not supported; only reward models,"
            " which have one"
        )
    return True


def is_supported_family(content: dict[str, Any]) -> bool:
    """Whether a config.json is of a family that lmforge computes itself; other fields may still be
    refused.
    """
    if registry.find("model_family", name := str(content.get("model_type"))) is None:
        return False
    return bool(load_family(base_model_type(name)).stored_experts) or not any(
        content.get(each) for each in NUM_EXPERTS_FIELDS
    )


def _reject_unsupported(content: dict[str, Any], model_type: str) -> None:
    for name in NUM_EXPERTS_FIELDS:
        if content.get(name) and not is_supported_family(content):
            raise UserError(
                f"{name}: a mixture of experts of type {model_type} is not supported; use a dense"
                " model"
            )
    if content.get("per_layer_config"):
        raise UserError(
            "per_layer_config: layers that differ are not supported; use a model whose layers are"
            " alike"
        )
    if (
        content.get("quantization_config")
        and fp8_block(content) is None
        and not is_nf4_folder(content)
        and not is_mxfp4_folder(content)
    ):
        raise UserError(
            "quantization_config: quantized weights cannot be trained; use the unquantized model"
        )


def fp8_block(content: dict[str, Any]) -> tuple[int, int] | None:
    """(rows, columns) with one scale in a folder in DeepSeek-V3's float8, which is dequantized;
    None of any other folder.
    """
    quantization = content.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "fp8":
        return None
    match quantization.get("weight_block_size"):
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    return None


def is_mxfp4_folder(content: dict[str, Any]) -> bool:
    """Whether experts are in MXFP4, in which gpt-oss is published (hf/turned_experts.py)."""
    options = content.get("quantization_config")
    return (
        isinstance(options, dict)
        and options.get("quant_method") == "mxfp4"
        and is_supported_family(content)
        and load_family(base_model_type(str(content.get("model_type")))).interleaved_experts
    )


def is_nf4_folder(content: dict[str, Any]) -> bool:
    """Whether the weights are in NF4, as bitsandbytes stores them (hf/quantized/)."""
    options = content.get("quantization_config")
    if (
        not isinstance(options, dict)
        or options.get("quant_method", "bitsandbytes") != "bitsandbytes"
    ):
        return False
    return options.get("load_in_4bit") is True and options.get("bnb_4bit_quant_type") == "nf4"
