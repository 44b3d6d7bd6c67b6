"""Translates between ModelConfig's fields and the content of a Hugging Face config.json, dictionary to dictionary.

Reads the spelling of transformers 4 (`rope_theta`, `rope_scaling`) and of transformers 5 (`rope_parameters`); writes the
former, which both read. Refuses by name what lmforge cannot compute. Which values make sense together is not decided
here but in shapes.py.
"""

from typing import Any

from lmforge.errors import UserError

# The model_types that can be read, and which of our modules computes each.
FAMILY_BY_MODEL_TYPE = {"llama": "llama", "mistral": "llama", "qwen2": "llama", "qwen3": "llama", "gpt2": "gpt2"}

# What transformers assumes where a config.json leaves a field out; it differs from one model_type to the next.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 11008, "max_position_embeddings": 2048},
    "mistral": {"intermediate_size": 14336, "max_position_embeddings": 131072, "num_key_value_heads": 8},
    "qwen2": {"intermediate_size": 22016, "max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {
        "intermediate_size": 22016,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
    },
    "gpt2": {"max_position_embeddings": 1024, "tie_word_embeddings": True, "hidden_act": "gelu_new"},
}
_NUM_EXPERTS_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts")
_REQUIRED_FIELDS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
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
_LLAMA_FIELDS = (*_COMMON_FIELDS, "num_key_value_heads", "head_dim", "rms_norm_eps")
_GPT2_FIELD_NAMES = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
_CLASSIFIER_SUFFIX = "ForSequenceClassification"
_REWARD_ARCHITECTURES = {
    "llama": f"Llama{_CLASSIFIER_SUFFIX}",
    "mistral": f"Mistral{_CLASSIFIER_SUFFIX}",
    "qwen2": f"Qwen2{_CLASSIFIER_SUFFIX}",
    "qwen3": f"Qwen3{_CLASSIFIER_SUFFIX}",
    "gpt2": f"GPT2{_CLASSIFIER_SUFFIX}",
}


def config_fields_from_json(config_dict: dict[str, Any]) -> dict[str, Any]:
    """ModelConfig's fields out of a config.json. Raises UserError, naming the field, for what lmforge cannot compute."""
    model_type = config_dict.get("model_type")
    _reject_unsupported(config_dict)
    if model_type not in FAMILY_BY_MODEL_TYPE:
        raise UserError(f'model_type: "{model_type}" is not supported; lmforge reads {", ".join(FAMILY_BY_MODEL_TYPE)}')
    gpt2 = model_type == "gpt2"
    found: dict[str, Any] = {"model_type": model_type, **_DEFAULTS[model_type], "reward": _is_reward_model(config_dict)}
    for ours in _COMMON_FIELDS if gpt2 else _LLAMA_FIELDS:
        theirs = _GPT2_FIELD_NAMES.get(ours, ours) if gpt2 else ours
        if theirs in config_dict:
            found[ours] = config_dict[theirs]
    for ours in _REQUIRED_FIELDS:
        if ours not in found:
            raise UserError(f"{_GPT2_FIELD_NAMES[ours] if gpt2 and ours in _GPT2_FIELD_NAMES else ours}: missing; add it")
    if gpt2:
        return {**found, "layer_norm_epsilon": config_dict.get("layer_norm_epsilon", 1e-5)}

    # transformers 5 writes one table where transformers 4 wrote a number and, if frequencies are scaled, a table.
    rope = config_dict.get("rope_parameters") or config_dict.get("rope_scaling") or {}
    found["rope_theta"] = rope.get("rope_theta", config_dict.get("rope_theta", 10000.0))
    found["rope_scaling"] = rope
    biased = {"mistral": False, "qwen2": True}.get(model_type, config_dict.get("attention_bias", False))
    found["attention_bias"] = biased
    found["attention_output_bias"] = biased and model_type != "qwen2"
    found["mlp_bias"] = model_type == "llama" and config_dict.get("mlp_bias", False)
    found["qk_norm"] = model_type == "qwen3"
    if model_type == "mistral":
        found["sliding_window"] = config_dict.get("sliding_window", 4096)
    elif model_type != "llama" and config_dict.get("use_sliding_window"):
        found["sliding_window"] = config_dict.get("sliding_window", 4096)
        if found["sliding_window"] is not None:
            first = config_dict.get("max_window_layers", 28)
            found["layer_types"] = config_dict.get("layer_types") or [
                "sliding_attention" if layer >= first else "full_attention" for layer in range(found["num_hidden_layers"])
            ]
    return found


def config_fields_to_json(fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a model with these fields (all of ModelConfig's, rope_scaling as a dictionary)."""
    model_type = fields["model_type"]
    architecture = (_REWARD_ARCHITECTURES if fields["reward"] else _ARCHITECTURES)[model_type]
    content: dict[str, Any] = {"architectures": [architecture], "model_type": model_type}
    if fields["reward"]:
        content |= {"id2label": {"0": "reward"}, "label2id": {"reward": 0}}
    if model_type == "gpt2":
        content |= {_GPT2_FIELD_NAMES.get(name, name): fields[name] for name in _COMMON_FIELDS}
        content["layer_norm_epsilon"] = fields["layer_norm_epsilon"]
        return content | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    content |= {name: fields[name] for name in _LLAMA_FIELDS}
    scaling = fields["rope_scaling"]
    content["rope_theta"] = fields["rope_theta"]
    content["rope_scaling"] = scaling and {name: value for name, value in scaling.items() if value is not None}
    content["attention_dropout"] = 0.0
    if model_type in ("llama", "qwen3"):
        content["attention_bias"] = fields["attention_bias"]
    if model_type == "llama":
        content["mlp_bias"] = fields["mlp_bias"]
    if model_type == "mistral":
        content["sliding_window"] = fields["sliding_window"]
    if model_type in ("qwen2", "qwen3"):
        window, layers = fields["sliding_window"], fields["num_hidden_layers"]
        kinds = fields["layer_types"] or ["full_attention" if window is None else "sliding_attention"] * layers
        content["use_sliding_window"] = window is not None
        content["sliding_window"] = window
        content["layer_types"] = list(kinds)
        content["max_window_layers"] = kinds.index("sliding_attention") if "sliding_attention" in kinds else layers
    return content


def _is_reward_model(config_dict: dict[str, Any]) -> bool:
    """Whether it is a model with one label. Raises UserError for one with several."""
    if not any(str(name).endswith(_CLASSIFIER_SUFFIX) for name in config_dict.get("architectures") or ()):
        return False
    labels = config_dict.get("num_labels") or len(config_dict.get("id2label") or (0, 1))  # two where nothing is said
    if labels != 1:
        raise UserError(f"num_labels: a classifier of {labels} labels is not supported; only reward models, which have one")
    return True


def is_supported_family(config_dict: dict[str, Any]) -> bool:
    """Whether a config.json is of a family that lmforge computes itself, whatever else it may lack."""
    return config_dict.get("model_type") in FAMILY_BY_MODEL_TYPE and not any(
        config_dict.get(name) for name in _NUM_EXPERTS_FIELDS
    )


def _reject_unsupported(config_dict: dict[str, Any]) -> None:
    for name in _NUM_EXPERTS_FIELDS:
        if config_dict.get(name):
            raise UserError(f"{name}: mixtures of experts are not supported; use a dense model")
    rope = config_dict.get("rope_parameters") or config_dict.get("rope_scaling") or {}
    rotated = rope.get("partial_rotary_factor", config_dict.get("partial_rotary_factor"))
    if rotated not in (None, 1):
        raise UserError(f"partial_rotary_factor: {rotated} is not supported; use a model that rotates whole heads")
    if config_dict.get("quantization_config"):
        raise UserError("quantization_config: quantized weights cannot be trained; use the unquantized model")
    for name, computed in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if config_dict.get(name, computed) != computed:
            raise UserError(f"{name}: {config_dict[name]} is not supported; use a gpt2 model with {computed}")
