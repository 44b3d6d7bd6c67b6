"""The config of a model: its fields, and which values are valid together.

It does not import torch, so reading a config is fast. What the families have is described in
family.py, the modules that take these numbers are in modules/, their spelling in a config.json is
in core/model/config_json.py, where a recipe gets them from is in hf/resolve.py, and what a model
costs is in flops.py.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import Any, ClassVar, Self

from lmforge.core import registry
from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import quoted
from lmforge.core.model.blocks import Block, Vector
from lmforge.core.model.config_checks import (
    check_latent_attention,
    check_numbers,
    check_options,
    check_recurrent_layers,
    number_problem,
)
from lmforge.core.model.family import Family, load_family, name_layer_types
from lmforge.core.model.fields import UNROTATED, ModelFields, Multipliers, Rope, RopeScaling
from lmforge.core.options.ranges import MODEL_RANGES, ROPE_SCALING_RANGES


@dataclass(frozen=True)
class ModelConfig(ModelFields):
    """The config of a model, in Hugging Face's field names.

    Raises UserError for a model that cannot be built.

    Fields that are left out are derived: num_key_value_heads is num_attention_heads, head_dim is
    hidden_size / num_attention_heads, others are what the family has. rope_scaling may be a table
    as in a config.json.

    model_type decides which options exist, since a config must survive the trip through
    transformers: see family.Family.

    layer_types: "full_attention" or "sliding_attention" of each layer; the latter has the window,
    and its rotary positions have the base rope_local_base_freq, if there is one.
    query_pre_attn_scalar: attention scores are divided by its root instead of head_dim's.
    final_logit_softcapping: logits become c · tanh(logits / c).

    no_rope_layers: 1 for each layer with rotary positions, 0 for each other one.

    num_experts: of each mixture; a token goes to num_experts_per_tok of them, with weights that sum
    to 1 if norm_topk_prob. Every decoder_sparse_step-th layer is a mixture, but for
    mlp_only_layers. An expert has moe_intermediate_size channels, or intermediate_size where that
    is 0. Training adds an auxiliary loss (mixture/balance.py) of weight router_aux_loss_coef where
    output_router_logits is true, as transformers does.

    The first first_k_dense_replace layers are dense, too. n_shared_experts more experts are for
    each token. A token chooses among the experts of the best topk_group of n_group groups; its
    weights are multiplied by routed_scaling_factor. With latent attention, head_dim is derived: the
    wider of queries (qk_nope_head_dim channels and qk_rope_head_dim rotated ones, neighbours paired
    if rope_interleave) and values (v_head_dim); the narrower are padded. q_lora_rank 0: queries do
    not come from a latent.

    With `reward` the head returns one number for a text, its reward, instead of one for each token:
    transformers calls this sequence classification with one label. Such a head is never tied nor
    capped, and no end-of-text token is its padding token.
    """

    # What computes it, as in the option model.implementation.
    implementation: ClassVar[str] = "lmforge"

    def __post_init__(self) -> None:
        if registry.find("model_family", self.model_type) is None:
            known = ", ".join(registry.names("model_family"))
            raise UserError(
                f'model_type: "{self.model_type}" is not supported; choose one of {known}, or load'
                " its plugin"
            )
        if isinstance(self.rope_scaling, dict):
            self._set(
                "rope_scaling", _parse_rope_scaling(self.rope_scaling, self.max_position_embeddings)
            )
        for name in (
            "layer_types",
            "no_rope_layers",
            "eos_token_id",
            "mlp_only_layers",
            "time_step_limit",
        ):
            if isinstance(getattr(self, name), list):
                self._set(name, tuple(getattr(self, name)))
        check_numbers(self, ("hidden_size", "num_attention_heads"))
        family = self.family
        if family.recurrent_type:
            check_recurrent_layers(self, family)
        if family.latent_attention:
            check_latent_attention(self)
            self._set("head_dim", max(self.qk_head_dim, self.v_head_dim))
        left_over = self.hidden_size % self.num_attention_heads  # then head_dim has no default
        for name, derived in (
            ("intermediate_size", self.hidden_size * family.intermediate_ratio),
            ("num_key_value_heads", self.num_attention_heads),
            ("head_dim", None if left_over else self.hidden_size // self.num_attention_heads),
            ("hidden_act", family.activations[0]),
        ):
            if not getattr(self, name):
                self._set(name, derived)
        for name, value in (
            ("attention_bias", family.attention_biases[0][0]),
            ("qk_norm", family.qk_norm is not None and not family.optional_qk_norm),
            ("rope_local_base_freq", family.local_rope_theta),
            ("sliding_window", family.default_window),
            ("query_pre_attn_scalar", self.head_dim if family.scales_scores else None),
        ):
            if getattr(self, name) is None:
                self._set(name, value)
        other = family.recurrent_type
        if self.sliding_window is not None and family.windows == "by layer":
            other = "sliding_attention"
        if self.layer_types is None and other:
            self._set(
                "layer_types",
                name_layer_types(self.num_hidden_layers, family.window_pattern, other),
            )
        if self.multipliers is None and family.has_multipliers:
            self._set("multipliers", Multipliers())
        if self.no_rope_layers is None and family.rotates == "three of four":
            rotated = (int(layer % 4 > 0) for layer in range(1, self.num_hidden_layers + 1))
            self._set("no_rope_layers", tuple(rotated))
        if self.attention_output_bias is None:
            self._set(
                "attention_output_bias",
                self.attention_bias and (True, False) not in family.attention_biases,
            )
        if self.reward:
            self._set("tie_word_embeddings", False)
            self._set("final_logit_softcapping", None)
            # transformers reads the reward at the last token that is not padding, so padding must
            # not be an end-of-text token.
            ends = (
                self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)
            )
            if self.pad_token_id in ends:
                self._set("pad_token_id", None)
        check_numbers(self, MODEL_RANGES)
        check_options(self, family)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def family(self) -> Family:
        """The description of its model_type; for a plugin's family, of the one that it extends."""
        return load_family(base_model_type(self.model_type))

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The ids that end a text, as transformers reads them: generation_config.json's, else
        config.json's.
        """
        ids = (
            self.eos_token_id
            if self.generation_config is None
            else self.generation_config.get("eos_token_id")
        )
        return frozenset(
            id for id in ([ids] if isinstance(ids, int) else ids or ()) if 0 <= id < self.vocab_size
        )

    @property
    def num_outputs(self) -> int:
        """The number of outputs of the head per token."""
        return 1 if self.reward else self.vocab_size

    @property
    def blocks(self) -> tuple[Block, ...]:
        """What each layer is made of."""
        return _blocks(self)

    @property
    def block_kinds(self) -> tuple[Block, ...]:
        """The different ones among `blocks`, in the order of the layers."""
        return _block_kinds(self)

    @property
    def residual_linears(self) -> tuple[str, ...]:
        """The names of the linear layers that write into the residual stream."""
        linears = (each for block in self.block_kinds for each in block.linears)
        return tuple(each.name for each in linears if each.residual)

    @property
    def scoring_linears(self) -> tuple[str, ...]:
        """The names of the linear layers that score experts or what is added of them."""
        mixtures = (block.mixture for block in self.block_kinds)
        return tuple(
            f"{each.name}.{name}"
            for each in mixtures
            if each is not None
            for name in (each.router, each.shared_gate)
            if name
        )

    def vector(self, name: str) -> Vector | None:
        """The description of the parameter of this name, if it is a vector of a mixer."""
        vectors = (each for block in self.block_kinds for each in block.vectors)
        return next((each for each in vectors if name.endswith(f".{each.name}")), None)

    def norm_offset(self, name: str) -> float:
        """What is added to the weights of the norm of this name."""
        norms = (norm for block in self.block_kinds for norm in block.norms(self.hidden_size))
        plain = tuple(f".{norm.name}.weight" for norm in norms if not norm.has_offset)
        return 0.0 if name.endswith(plain) else self.family.norm_offset or 0.0

    def with_layers(self, count: int, like: int = 0) -> Self:
        """This model with `count` layers, all as layer number `like` of it."""
        types = self.layer_types and (self.layer_types[like],) * count
        becomes_dense = not self.sparse_layers[like]
        model = replace(
            self,
            num_hidden_layers=count,
            layer_types=types,
            no_rope_layers=self.no_rope_layers and (self.no_rope_layers[like],) * count,
            decoder_sparse_step=1,
            mlp_only_layers=(),
            first_k_dense_replace=0,
            num_experts=0 if becomes_dense and self.family.may_lack_experts else self.num_experts,
        )
        if not model.num_experts or not becomes_dense:
            return model
        if "first_k_dense_replace" in self.family.fields:
            return replace(model, first_k_dense_replace=count)
        return replace(model, mlp_only_layers=tuple(range(count)))

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """For each layer, how many tokens back attention reaches, the token itself included; None
        is all of them.
        """
        if self.layer_types is None:
            return (self.sliding_window,) * self.num_hidden_layers
        return tuple(
            self.sliding_window if each == "sliding_attention" else None
            for each in self.layer_types
        )

    @property
    def layer_ropes(self) -> tuple[Rope | None, ...]:
        """The rotary positions of each layer; None where positions are learned."""
        if self.family.learned_positions:
            return (None,) * self.num_hidden_layers
        rope = UNROTATED
        if self.rope_theta is not None:
            rope = Rope(self.rope_theta, self.rope_scaling)
        local = self.rope_local_base_freq
        windowed = rope if local is None else Rope(local)
        ropes = [
            windowed if each == "sliding_attention" else rope for each in self.written_layer_types
        ]
        return tuple(
            each if is_rotated else UNROTATED
            for each, is_rotated in zip(ropes, self.rotated_layers, strict=True)
        )

    @property
    def rotated_layers(self) -> tuple[bool, ...]:
        """Whether each layer has rotary positions."""
        if not self.family.has_rotary(self):
            return (False,) * self.num_hidden_layers
        if self.no_rope_layers is not None:
            return tuple(map(bool, self.no_rope_layers))
        if self.family.rotates == "windows" and self.sliding_window is not None:
            return tuple(each == "sliding_attention" for each in self.written_layer_types)
        return (True,) * self.num_hidden_layers

    @property
    def max_sequence_length(self) -> int | None:
        """The longest sequence that this model can compute, in tokens; None where there is no bound
        (positions that are not learned).
        """
        return self.max_position_embeddings if self.family.learned_positions else None

    @property
    def rotary_positions(self) -> int | None:
        """For how many tokens its rotary positions are made; None where it has none."""
        return self.max_position_embeddings if self.family.has_rotary(self) else None

    def check_length(self, num_tokens: int) -> None:
        """Raise UserError where a sequence of `num_tokens` is longer than this model can
        compute.
        """
        limit = self.max_sequence_length
        if limit is not None and num_tokens > limit:
            raise UserError(
                f"this model reads at most {limit} tokens, not {num_tokens}: use shorter sequences"
                " (a prompt and its new tokens are one sequence)"
            )

    def new_module(self) -> Any:
        """The module that computes this model, on torch's default device."""
        return registry.get("model_family", self.model_type).build(self)

    def counted_parameters(self) -> tuple[int, int, int, int] | None:
        """flops.ParameterCount's fields where they can only be counted from the modules; None where
        flops.py derives them.
        """
        return None


@lru_cache(maxsize=256)
def _blocks(config: ModelConfig) -> tuple[Block, ...]:
    family = config.family
    return tuple(family.block(family, config, layer) for layer in range(config.num_hidden_layers))


@lru_cache(maxsize=256)
def _block_kinds(config: ModelConfig) -> tuple[Block, ...]:
    # Asked for each parameter of a model.
    return tuple(dict.fromkeys(config.blocks))


def base_model_type(model_type: str) -> str:
    """The model_type whose config.json a registered one has.

    Raises UserError for one that is not registered.
    """
    return str(registry.get("model_family", model_type).facts["like"])


def build_module(config: ModelConfig) -> Any:
    """The module that computes a model of a built-in family, on torch's default device."""
    module, _, name = config.family.module.partition(":")
    return getattr(import_module(module), name)(config)


# Of each rope_type: the fields that it needs, and those that it may have.
_ROPE_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
    ),
}


def _parse_rope_scaling(table: dict[str, Any], max_positions: int) -> RopeScaling | None:
    """A table of config.json. What it leaves out is derived as transformers does."""
    rope_type = str(table.get("rope_type", table.get("type", "default")))
    if rope_type not in _ROPE_FIELDS:
        raise UserError(
            f'rope_scaling: rope_type "{rope_type}" is not supported; choose one of'
            f" {', '.join(_ROPE_FIELDS)}"
        )
    needed, optional = _ROPE_FIELDS[rope_type]
    values: dict[str, Any] = {name: table.get(name) for name in needed} | {
        name: table[name]
        for name in optional
        if table.get(name) or (name, table.get(name)) == ("attention_factor", 0)
    }
    original = "original_max_position_embeddings"
    if original in needed and original not in table:
        values[original] = max_positions
    if rope_type == "yarn" and "factor" in table and table["factor"] is None:
        values["factor"] = max_positions / (values[original] or math.inf)
    for name, value in values.items():
        if problem := number_problem(value, ROPE_SCALING_RANGES[name], whole=name == original):
            raise UserError(f'rope_scaling: rope_type "{rope_type}" needs {name}: {problem}')
    if rope_type == "llama3" and table["low_freq_factor"] >= table["high_freq_factor"]:
        raise UserError("rope_scaling: low_freq_factor must be below high_freq_factor")
    if rope_type == "yarn":
        values["truncate"] = table.get("truncate", True)
        if not isinstance(values["truncate"], bool):
            raise UserError(
                f"rope_scaling: truncate: expected true or false, got {quoted(values['truncate'])}"
            )
    return RopeScaling(rope_type, **values) if values else None
