"""Which values of a ModelConfig are valid, and valid together. It does not import torch."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import quoted
from lmforge.core.model.family import (
    EXPERT_FIELDS,
    LINEAR_ATTENTION_FIELDS,
    OWN_FIELDS,
    Family,
    load_family,
)
from lmforge.core.model.fields import ModelFields
from lmforge.core.options.ranges import MODEL_RANGES, RATIO, Range

# Those that may be None.
OPTIONAL_NUMBERS = (
    "head_dim",
    "sliding_window",
    "final_logit_softcapping",
    "rope_local_base_freq",
    "query_pre_attn_scalar",
    "rope_theta",
)
_OR_ZERO = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "moe_latent_size",
    "router_aux_loss_coef",
    "first_k_dense_replace",
    "n_shared_experts",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    *LINEAR_ATTENTION_FIELDS,
)


def number_problem(value: Any, bounds: Range, whole: bool) -> str | None:
    """What is wrong with a number that is to be above zero and within `bounds`, in words; None
    where nothing is.
    """
    kinds = int if whole else int | float
    kind = "a whole number" if whole else "a number"
    if not isinstance(value, kinds) or isinstance(value, bool) or not value > 0:
        return f"expected {kind} above zero, got {quoted(value)}"
    return (
        f"expected {kind} of at most {bounds['le']:.16g}, got {quoted(value)}"
        if value > bounds["le"]
        else None
    )


def check_numbers(config: ModelFields, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(config, name)
        bounds = MODEL_RANGES[name]
        if (value is None and name in OPTIONAL_NUMBERS) or (value == 0 and name in _OR_ZERO):
            continue
        if problem := number_problem(value, bounds, whole=isinstance(bounds["le"], int)):
            raise UserError(f"{name}: {problem}")


def _check_experts(config: ModelFields, family: Family) -> None:
    experts = config.num_experts
    chosen = config.num_experts_per_tok
    model_type = config.model_type
    if not family.stored_experts:
        for name in EXPERT_FIELDS:
            if getattr(config, name):
                raise UserError(
                    f"{name}: a {model_type} model has no experts; leave it out, or use model_type"
                    " qwen3_moe"
                )
    for name in OWN_FIELDS:
        kept = family.defaults.get(name, getattr(type(config), name))
        if name not in family.fields and getattr(config, name) != kept:
            others = ("qwen3_moe", "deepseek_v3", "qwen3_next", "lfm2", "smollm3", "nemotron_h")
            other = next(each for each in others if name in load_family(each).fields)
            raise UserError(
                f"{name}: a {model_type} model has none to choose; use {quoted(kept)}, or"
                f" model_type {other}"
            )
    if not family.stored_experts:
        return
    if not experts and family.may_lack_experts:
        return
    if not experts:
        raise UserError(
            f"num_experts: a {config.model_type} model has some; begin from a preset or a folder"
            " that says how many"
        )
    if not experts >= chosen > 0:
        raise UserError(
            f"num_experts_per_tok: expected 1 to {experts}, the experts of a layer, got {chosen}"
        )
    groups = config.n_group
    kept_groups = config.topk_group
    if experts % groups or (groups > 1 and experts == groups):
        raise UserError(
            f"n_group: {groups} does not divide {experts} experts into equal groups of at least"
            " two; choose another"
        )
    if not kept_groups <= groups or chosen > kept_groups * (experts // groups):
        raise UserError(
            f"topk_group: {kept_groups} of {groups} groups cannot give {chosen} experts to a token;"
            " choose another"
        )
    for layer in config.mlp_only_layers:
        if layer not in range(config.num_hidden_layers):
            raise UserError(
                f"mlp_only_layers: there is no layer {quoted(layer)}; name those from 0 on"
            )


def require_whole(name: str, value: Any, like: str = "") -> None:
    """Raise UserError, which begins with the name, unless a field of a config.json is a whole number
    in the range of ModelConfig's field `like`, or of that name.
    """
    if problem := number_problem(value, MODEL_RANGES[like or name], whole=True):
        raise UserError(f"{name}: {problem}")


def check_latent_attention(config: ModelFields) -> None:
    for name in (
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "n_shared_experts",
    ):
        if problem := number_problem(getattr(config, name), MODEL_RANGES[name], whole=True):
            raise UserError(f"{name}: {problem}, as all {config.model_type} models have")
    if config.head_dim not in (0, None, derived := max(config.qk_head_dim, config.v_head_dim)):
        raise UserError(
            f"head_dim: {derived} follows from qk_nope_head_dim, qk_rope_head_dim and v_head_dim;"
            " leave it out"
        )
    if config.num_key_value_heads not in (0, config.num_attention_heads):
        raise UserError(
            f"num_key_value_heads: a {config.model_type} model has as many as query heads; leave"
            " it out"
        )


def check_recurrent_layers(config: ModelFields, family: Family) -> None:
    # By their names in a config.json, since no option sets them.
    names = {
        name: family.names.get(name, name)
        for name in LINEAR_ATTENTION_FIELDS
        if name in family.fields
    }
    for name, theirs in names.items():
        if problem := number_problem(getattr(config, name), MODEL_RANGES[name], whole=True):
            raise UserError(f"{theirs}: {problem}, as all {config.model_type} models have")
    keys = config.linear_num_key_heads
    if "linear_num_key_heads" in names and config.linear_num_value_heads % keys:
        raise UserError(
            f"{names['linear_num_key_heads']}: {keys} does not divide"
            f" {names['linear_num_value_heads']} {config.linear_num_value_heads}; choose a divisor"
        )
    match config.time_step_limit:
        case (int() | float() as low, int() | float() as high) if 0 <= low < high:
            return
    raise UserError(
        "time_step_limit: expected two numbers, of which the first is at least 0 and below the"
        f" second, got {quoted(config.time_step_limit)}"
    )


def check_options(config: ModelFields, family: Family) -> None:
    model_type = config.model_type
    if config.reward and not family.classifier:
        raise UserError(
            f"reward: transformers has no classifier of type {model_type}; use a model of another"
            " type"
        )
    heads = config.num_attention_heads
    groups = config.num_key_value_heads
    # transformers refuses some models whose heads do not divide their width even where head_dim is
    # given.
    if config.head_dim is None or (family.heads_divide_width and config.hidden_size % heads):
        advice = "change one of the two" + (
            ", or use model_type mistral with a head_dim" if family.grouped_heads else ""
        )
        raise UserError(
            f"num_attention_heads: {heads} heads do not divide hidden_size {config.hidden_size};"
            f" {advice}"
        )
    if heads % groups:
        raise UserError(
            f"num_key_value_heads: {groups} does not divide num_attention_heads {heads}; choose a"
            " divisor"
        )
    if config.hidden_act not in family.activations:
        use = family.activations[0]
        raise UserError(
            f'hidden_act: "{config.hidden_act}" is not supported in a {model_type} model; use'
            f' "{use}"'
        )
    if config.rope_theta is None and family.rotates != "all or none":
        raise UserError(f"rope_theta: a {model_type} model needs a base; give a number")
    if family.has_rotary(config) and config.rotary_dim % 2:
        name = "qk_rope_head_dim" if family.latent_attention else "head_dim"
        raise UserError(f"{name}: rotary positions need an even width, got {config.rotary_dim}")
    if not family.grouped_heads and (
        groups != heads or config.head_dim * heads != config.hidden_size
    ):
        raise UserError(
            f"num_key_value_heads, head_dim: a {model_type} model has neither; leave them out, or"
            " use model_type llama"
        )
    derived = (
        family.grouped_heads and "head_dim" not in family.fields and not family.latent_attention
    )
    if derived and config.head_dim * heads != config.hidden_size:
        raise UserError(
            f"head_dim: a {model_type} model has hidden_size / num_attention_heads; leave it out"
        )
    if config.rope_scaling is not None and not family.has_rotary(config):
        kind = "learned" if family.learned_positions else "no"
        raise UserError(
            f"rope_scaling: a {model_type} model has {kind} positions; leave it out, or use"
            " model_type llama"
        )
    if (
        config.rope_scaling is not None
        and config.rope_scaling.rope_type == "yarn"
        and config.rope_theta is not None
        and config.rope_theta <= 1
    ):
        raise UserError(f"rope_theta: yarn needs a base above 1, got {config.rope_theta}")
    biases = (config.attention_bias, config.attention_output_bias)
    if biases not in family.attention_biases:
        possible = " or ".join(map(str, family.attention_biases))
        raise UserError(
            f"attention_bias, attention_output_bias: {biases} cannot be written as a {model_type}"
            f" model; use {possible}"
        )
    if config.mlp_bias and not family.mlp_biases:
        raise UserError(
            f"mlp_bias: a {model_type} model has none; leave it out, or use model_type llama"
        )
    if config.tie_word_embeddings and not family.can_tie:
        raise UserError(
            f"tie_word_embeddings: a {model_type} model has a head of its own; use false"
        )
    if config.qk_norm != (family.qk_norm is not None) and not family.optional_qk_norm:
        raise UserError(
            f"qk_norm: {config.qk_norm} cannot be written as a {model_type} model; leave it out"
        )
    if config.rope_local_base_freq is not None and family.local_rope_theta is None:
        raise UserError(f"rope_local_base_freq: a {model_type} model has none; leave it out")
    if config.query_pre_attn_scalar is not None and not family.scales_scores:
        raise UserError(f"query_pre_attn_scalar: a {model_type} model has none; leave it out")
    if config.multipliers is not None and not family.has_multipliers:
        raise UserError(f"multipliers: a {model_type} model has none; leave them out")
    for name, value in asdict(config.multipliers).items() if config.multipliers else ():
        if problem := number_problem(value, RATIO, whole=False):
            raise UserError(f"{name}: {problem}")
    _check_experts(config, family)
    rotated = config.no_rope_layers
    if rotated is not None and len(rotated) != config.num_hidden_layers:
        raise UserError(
            f"no_rope_layers: names {len(rotated)} layers of {config.num_hidden_layers}; name each"
        )
    for name, value in family.required_values.items():
        if getattr(config, name, value) != value:
            raise UserError(
                f"{name}: {quoted(getattr(config, name))} is not supported in a {model_type} model;"
                f" use {quoted(value)}"
            )
    if config.sliding_window is not None and family.windows == "none":
        raise UserError(
            f"sliding_window: a {model_type} model has none; leave it out, or use model_type"
            " mistral"
        )
    if config.layer_types is None:
        return
    other = family.recurrent_type
    if family.windows == "by layer" and config.sliding_window is not None:
        other = "sliding_attention"
    if not other:
        raise UserError(
            "layer_types: needs sliding_window and a model_type with windows in some layers; leave"
            " it out"
        )
    if len(config.layer_types) != config.num_hidden_layers:
        raise UserError(
            f"layer_types: names {len(config.layer_types)} layers of {config.num_hidden_layers};"
            " name each"
        )
    possible_types = ("full_attention", other, *family.other_types)
    for entry in config.layer_types:
        if entry not in possible_types:
            *most, last = possible_types
            raise UserError(
                f'layer_types: "{entry}" is not supported; use {", ".join(most)} or {last}'
            )
    if "moe" in family.other_types and ("moe" in config.layer_types) != bool(config.num_experts):
        raise UserError(
            f"num_experts: {config.num_experts}, against the layers of type moe in layer_types;"
            " give experts where there is one, and 0 where there is none"
        )
