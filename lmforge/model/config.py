"""The config of a model: its fields, and which values are valid together. It does not import torch, so reading a config is
fast. The modules that take these numbers are in llama.py and gpt2.py, their spelling in a config.json is in
interop/config_json.py, where a recipe gets them from is in interop/resolve.py, and what a model costs is in flops.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from lmforge import registry
from lmforge.config.ranges import MODEL_RANGES, ROPE_SCALING_RANGES, Range
from lmforge.errors import UserError
from lmforge.model.presets import PRESETS
from lmforge.untrusted import cut, quoted

# (attention_bias, attention_output_bias) that a config.json of each model_type can express.
_ATTENTION_BIASES = {
    "llama": ((False, False), (True, True)),
    "qwen3": ((False, False), (True, True)),
    "qwen2": ((True, False),),
    "mistral": ((False, False),),
    "gpt2": ((False, False),),
}


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the sequence length that a model was first trained on.

    `linear` divides every frequency by `factor`. `llama3` (Llama 3.1) divides the low frequencies, keeps the high ones and
    interpolates between; its bounds are the wavelengths original_max_position_embeddings / low_ and high_freq_factor.
    """

    rope_type: str
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None


@dataclass(frozen=True)
class ModelConfig:
    """The config of a model, in Hugging Face's field names. Raises UserError for a model that cannot be built.

    Fields that are left out are derived: intermediate_size (GPT-2 only) is 4 * hidden_size, num_key_value_heads is
    num_attention_heads, head_dim is hidden_size / num_attention_heads, hidden_act is the only one of the family.
    rope_scaling may be a table as in a config.json.

    model_type decides which options exist, since a config must survive the trip through transformers: q/k norm is
    qwen3's, a bias on q, k, v but not on the output is qwen2's, a sliding window is mistral's and the qwens'.

    final_logit_softcapping: logits become c · tanh(logits / c); of these model_types only lmforge does so.

    With `reward` the head returns one number for a text, its reward, instead of one for each token: transformers calls
    this sequence classification with one label. Such a head is never tied nor capped, and no end-of-text token is its
    padding token.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    model_type: str = "llama"
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    hidden_act: str = ""
    final_logit_softcapping: float | None = None
    reward: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if registry.find("model_family", self.model_type) is None:
            known = ", ".join(registry.names("model_family"))
            raise UserError(f'model_type: "{self.model_type}" is not supported; choose one of {known}, or load its plugin')
        if isinstance(self.rope_scaling, dict):
            self._set("rope_scaling", _parse_rope_scaling(self.rope_scaling))
        for name in ("layer_types", "eos_token_id"):
            if isinstance(getattr(self, name), list):
                self._set(name, tuple(getattr(self, name)))
        _check_numbers(self, ("hidden_size", "num_attention_heads"))
        for name, derived in (
            ("intermediate_size", 4 * self.hidden_size if self.family == "gpt2" else None),
            ("num_key_value_heads", self.num_attention_heads),
            ("head_dim", _default_head_dim(self.hidden_size, self.num_attention_heads)),
            ("hidden_act", "gelu_new" if self.family == "gpt2" else "silu"),
        ):
            if not getattr(self, name):
                self._set(name, derived)
        if self.reward:
            self._set("tie_word_embeddings", False)
            self._set("final_logit_softcapping", None)
            # transformers reads the reward at the last token that is not padding, so padding must not be an end-of-text token.
            ends = self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)
            if self.pad_token_id in ends:
                self._set("pad_token_id", None)
        _check_numbers(self, MODEL_RANGES)
        _check_options(self)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def family(self) -> str:
        """The family whose code computes this model: "llama" (llama.py), "gpt2" (gpt2.py) or "transformers" (interop/). For a
        plugin's family, the one that it extends."""
        return "gpt2" if self.base_type == "gpt2" else "llama"

    @property
    def base_type(self) -> str:
        """The model_type whose fields this config has: its own, or for a plugin's family the one that it extends."""
        return base_model_type(self.model_type)

    @property
    def num_outputs(self) -> int:
        """The number of outputs of the head per token."""
        return 1 if self.reward else self.vocab_size

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """For each layer, how many tokens back attention reaches, the token itself included; None is all of them."""
        if self.layer_types is None:
            return (self.sliding_window,) * self.num_hidden_layers
        return tuple(self.sliding_window if each == "sliding_attention" else None for each in self.layer_types)

    @property
    def max_sequence_length(self) -> int | None:
        """The longest sequence that this model can compute, in tokens; None where there is no bound (rotary positions)."""
        return self.max_position_embeddings if self.family == "gpt2" else None

    def check_length(self, num_tokens: int) -> None:
        """Raise UserError where a sequence of `num_tokens` is longer than this model can compute."""
        limit = self.max_sequence_length
        if limit is not None and num_tokens > limit:
            raise UserError(
                f"this model reads at most {limit} tokens, not {num_tokens}: use shorter sequences (a prompt and its new "
                "tokens are one sequence)"
            )

    def new_module(self) -> Any:
        """The module that computes this model, on torch's default device."""
        return registry.get("model_family", self.model_type).build(self)

    def counted_parameters(self) -> tuple[int, int, int, int] | None:
        """flops.ParameterCount's fields where they can only be counted from the modules; None where flops.py derives them."""
        return None


def base_model_type(model_type: str) -> str:
    """The model_type whose config.json a registered one has. Raises UserError for one that is not registered."""
    return str(registry.get("model_family", model_type).facts["like"])


def get_preset(name: str) -> ModelConfig:
    """A ready-made config by its name in presets.py. Raises UserError, with the nearest name, when there is none."""
    if name not in PRESETS:
        close = get_close_matches(cut(name), PRESETS, n=1, cutoff=0.3)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UserError(f'"{cut(name)}" is neither a preset nor a folder; {hint}presets: {", ".join(PRESETS)}')
    return ModelConfig(**PRESETS[name])


def _parse_rope_scaling(table: dict[str, Any]) -> RopeScaling | None:
    rope_type = str(table.get("rope_type", table.get("type", "default")))
    needed = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
    if rope_type not in needed:
        raise UserError(f'rope_scaling: rope_type "{rope_type}" is not supported; choose one of {", ".join(needed)}')
    values: dict[str, Any] = {name: table.get(name) for name in needed[rope_type]}
    for name, value in values.items():
        if problem := number_problem(value, ROPE_SCALING_RANGES[name], whole=name == "original_max_position_embeddings"):
            raise UserError(f'rope_scaling: rope_type "{rope_type}" needs {name}: {problem}')
    if rope_type == "llama3" and table["low_freq_factor"] >= table["high_freq_factor"]:
        raise UserError("rope_scaling: low_freq_factor must be below high_freq_factor")
    return RopeScaling(rope_type, **values) if values else None


def number_problem(value: Any, bounds: Range, whole: bool) -> str | None:
    """What is wrong with a number that is to be above zero and within `bounds`, in words; None where nothing is."""
    kinds = int if whole else int | float
    kind = "a whole number" if whole else "a number"
    if not isinstance(value, kinds) or isinstance(value, bool) or not value > 0:
        return f"expected {kind} above zero, got {quoted(value)}"
    return f"expected {kind} of at most {bounds['le']:.16g}, got {quoted(value)}" if value > bounds["le"] else None


def _default_head_dim(hidden_size: int, num_heads: int) -> int | None:
    """head_dim where it is not given; None where the heads do not divide the width."""
    return hidden_size // num_heads if hidden_size % num_heads == 0 else None


def _check_numbers(config: ModelConfig, names: Iterable[str]) -> None:
    for name in names:
        value, bounds = getattr(config, name), MODEL_RANGES[name]
        if value is None and name in ("head_dim", "sliding_window", "final_logit_softcapping"):
            continue
        if problem := number_problem(value, bounds, whole=isinstance(bounds["le"], int)):
            raise UserError(f"{name}: {problem}")


def _check_options(config: ModelConfig) -> None:
    model_type, heads, groups = config.base_type, config.num_attention_heads, config.num_key_value_heads
    # transformers refuses a llama model whose heads do not divide its width even where head_dim is given.
    if config.head_dim is None or (model_type in ("llama", "gpt2") and config.hidden_size % heads):
        advice = "change one of the two" + ("" if model_type == "gpt2" else ", or use model_type mistral with a head_dim")
        raise UserError(f"num_attention_heads: {heads} heads do not divide hidden_size {config.hidden_size}; {advice}")
    if heads % groups:
        raise UserError(f"num_key_value_heads: {groups} does not divide num_attention_heads {heads}; choose a divisor")
    activations = ("gelu_new", "gelu_pytorch_tanh", "gelu") if config.family == "gpt2" else ("silu", "swish")
    if config.hidden_act not in activations:
        raise UserError(f'hidden_act: "{config.hidden_act}" is not supported in a {model_type} model; use "{activations[0]}"')
    if config.family == "llama" and config.head_dim % 2:
        raise UserError(f"head_dim: rotary positions need an even width, got {config.head_dim}")
    if config.family == "gpt2" and (groups != heads or config.head_dim * heads != config.hidden_size):
        raise UserError("num_key_value_heads, head_dim: a gpt2 model has neither; leave them out, or use model_type llama")
    if config.family == "gpt2" and config.rope_scaling is not None:
        raise UserError("rope_scaling: a gpt2 model has learned positions; leave it out, or use model_type llama")
    biases = (config.attention_bias, config.attention_output_bias)
    if biases not in _ATTENTION_BIASES[model_type]:
        raise UserError(
            f"attention_bias, attention_output_bias: {biases} cannot be written as a {model_type} model; llama and qwen3 have "
            "both or none, qwen2 the first alone, mistral and gpt2 neither (gpt2's own are not optional)"
        )
    if config.mlp_bias and model_type != "llama":
        raise UserError(f"mlp_bias: a {model_type} model has none; leave it out, or use model_type llama")
    if config.qk_norm != (model_type == "qwen3"):
        raise UserError(
            f"qk_norm: {config.qk_norm} cannot be written as a {model_type} model; qwen3 always has it, others never"
        )
    if config.sliding_window is not None and model_type in ("llama", "gpt2"):
        raise UserError(f"sliding_window: a {model_type} model has none; leave it out, or use model_type mistral")
    if config.layer_types is None:
        return
    if config.sliding_window is None or model_type == "mistral":
        raise UserError("layer_types: needs sliding_window and model_type qwen2 or qwen3; leave it out")
    if len(config.layer_types) != config.num_hidden_layers:
        raise UserError(f"layer_types: names {len(config.layer_types)} layers of {config.num_hidden_layers}; name each")
    for entry in config.layer_types:
        if entry not in ("full_attention", "sliding_attention"):
            raise UserError(f'layer_types: "{entry}" is not supported; use full_attention or sliding_attention')
