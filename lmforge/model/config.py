"""What shape a model has: its fields, what may be asked of them, and where a recipe gets them from.

The room for numbers only: no torch here, so that reading a shape costs nothing. The modules that take these numbers are
in decoder.py and gpt2.py, their spelling in a config.json in config_json.py, and what a shape costs in flops.py.
"""

import json
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lmforge.config.sections import ModelOptions
from lmforge.errors import UserError
from lmforge.hub import resolve_model_folder
from lmforge.interop.config_json import (
    FAMILY_BY_MODEL_TYPE,
    config_fields_from_json,
    config_fields_to_json,
    is_supported_family,
)
from lmforge.model.presets import PRESETS


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length a model was first trained on.

    `linear` divides every frequency by `factor`; `llama3` (Llama 3.1) divides the low ones, keeps the high ones and
    blends between; its bounds are the wavelengths original_max_position_embeddings / low_ and high_freq_factor.
    """

    rope_type: str
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model, in Hugging Face's field names. Raises UserError for a shape that cannot be built.

    What is left out is derived on construction: intermediate_size (GPT-2 only) is 4 * hidden_size,
    num_key_value_heads is num_attention_heads, head_dim is hidden_size / num_attention_heads, hidden_act is the family's
    only one. rope_scaling may be given as a config.json's table.

    model_type decides which options exist, since a shape must survive the trip through transformers: q/k norm is
    qwen3's, a bias on q, k, v but not on the output is qwen2's, a sliding window is mistral's and the qwens'.

    With `reward` the head gives one number, what a text is worth, in place of one for each token: what transformers calls
    sequence classification with one label. Such a head is not tied to anything, and no token that ends texts is its padding.
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
    reward: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.model_type not in FAMILY_BY_MODEL_TYPE:
            raise UserError(
                f'model_type: "{self.model_type}" is not supported; choose one of {", ".join(FAMILY_BY_MODEL_TYPE)}'
            )
        if isinstance(self.rope_scaling, dict):
            object.__setattr__(self, "rope_scaling", _parse_rope_scaling(self.rope_scaling))
        for name in ("layer_types", "eos_token_id"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, derived in (
            ("intermediate_size", 4 * self.hidden_size if self.family == "gpt2" else None),
            ("num_key_value_heads", self.num_attention_heads),
            ("head_dim", _default_head_dim(self.hidden_size, self.num_attention_heads)),
            ("hidden_act", "gelu_new" if self.family == "gpt2" else "silu"),
        ):
            if not getattr(self, name):
                object.__setattr__(self, name, derived)
        if self.reward:
            object.__setattr__(self, "tie_word_embeddings", False)
            # transformers reads the reward at the last token that is no padding: none that ends a text may be called that.
            ends = self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)
            if self.pad_token_id in ends:
                object.__setattr__(self, "pad_token_id", None)
        _check_numbers(self)
        _check_options(self)

    @property
    def family(self) -> str:
        """Which module computes this shape: "llama" (decoder.py) or "gpt2" (gpt2.py)."""
        return FAMILY_BY_MODEL_TYPE[self.model_type]

    @property
    def num_outputs(self) -> int:
        """How many numbers the head gives."""
        return 1 if self.reward else self.vocab_size

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """For each layer, how many tokens back it sees, the token itself included; None is all of them."""
        if self.layer_types is None:
            return (self.sliding_window,) * self.num_hidden_layers
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in self.layer_types)

    @property
    def max_sequence_length(self) -> int | None:
        """The longest row that this shape can compute, in tokens; None where there is no such bound (rotary positions)."""
        return self.max_position_embeddings if self.family == "gpt2" else None

    def to_config_json(self) -> dict[str, Any]:
        """This shape as the content of a config.json that transformers 4 and 5 both read."""
        return config_fields_to_json(asdict(self))


def model_config_from_json(config_dict: dict[str, Any], where: str, implementation: str = "lmforge") -> ModelConfig:
    """The shape that a config.json describes. Raises UserError, beginning with `where`, for what cannot be computed.

    implementation: who is to compute it, "lmforge" or "transformers" (foreign_config.py).
    """
    if implementation == "transformers":
        from lmforge.interop.transformers_config import to_transformers_config

        return to_transformers_config(config_dict, where)
    try:
        return ModelConfig(**config_fields_from_json(config_dict))
    except UserError as mistake:
        raise UserError(f"{where}: {mistake}") from None


def get_preset(name: str) -> ModelConfig:
    """A ready-made shape by its name in presets.py. Raises UserError, with the nearest name, when there is none."""
    if name not in PRESETS:
        close = get_close_matches(name, PRESETS, n=1, cutoff=0.3)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UserError(f'"{name}" is neither a preset nor a folder; {hint}presets: {", ".join(PRESETS)}')
    return ModelConfig(**PRESETS[name])


def resolve_model_config(
    source: str | Path | None, overrides: dict[str, Any], vocab_size: int | None = None, implementation: str = "lmforge"
) -> ModelConfig:
    """The shape that a recipe asks for.

    Args:
        source: name of a preset, folder with a config.json, name on the Hugging Face hub, or None to take every field from
            `overrides`.
        overrides: fields of ModelConfig that replace the source's. What the source leaves to be derived (head_dim from
            hidden_size, say) is derived after that.
        vocab_size: entries of the tokenizer. It sets the vocabulary unless the shape comes from a folder, whose own
            stays: it may be larger (rows that no token uses) but not smaller.
        implementation: who is to compute a folder's model: "lmforge", "transformers" (foreign_config.py), or "auto", which
            is lmforge for the families that it speaks.
    """
    if source is not None and source not in PRESETS:
        source = resolve_model_folder(Path(source), "config.json")
    folder = Path(source) if source is not None and source not in PRESETS and Path(source).is_dir() else None
    if implementation == "auto" and folder is not None:
        implementation = "lmforge" if is_supported_family(read_config_json(folder / "config.json")) else "transformers"
    if implementation == "transformers":
        if folder is None:
            raise UserError(f"{source}: no such folder; model.implementation = transformers wraps a Hugging Face folder")
        from lmforge.interop.transformers_config import resolve_transformers_config

        return resolve_transformers_config(folder, overrides, vocab_size)
    known = [field.name for field in fields(ModelConfig)]
    for name in overrides:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            raise UserError(f"model.{name}: no such field" + (f"; did you mean {close[0]}?" if close else ""))
    where = "model"
    chosen: dict[str, Any] = {}
    if folder is not None:
        where = str(folder / "config.json")
        chosen = _read_config_fields(folder / "config.json")
    elif source is not None:
        get_preset(str(source))
        chosen = dict(PRESETS[str(source)])
    chosen |= overrides
    kind = chosen.get("model_type", "llama")
    if "model_type" in overrides:
        chosen |= {"qk_norm": kind == "qwen3", "attention_bias": overrides.get("attention_bias", kind == "qwen2")}
    if {"model_type", "attention_bias"} & overrides.keys() and "attention_output_bias" not in overrides:
        chosen["attention_output_bias"] = chosen["attention_bias"] and kind != "qwen2"
    if vocab_size is not None:
        if where == "model":
            chosen.setdefault("vocab_size", vocab_size)
            chosen |= {} if "vocab_size" in overrides else {"vocab_size": vocab_size}
        if chosen["vocab_size"] < vocab_size:
            raise UserError(
                f"{where}: vocab_size is {chosen['vocab_size']} and the tokenizer has {vocab_size} entries; "
                "use the tokenizer that belongs to this model"
            )
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        if name not in chosen:
            raise UserError(f"model.{name}: missing; give it, or begin from a preset ({', '.join(PRESETS)})")
    try:
        return ModelConfig(**chosen)
    except UserError as mistake:
        raise UserError(f"{where}: {mistake}") from None


def model_config_from_options(options: ModelOptions, vocab_size: int | None = None) -> ModelConfig:
    """The shape that the options of a recipe ask for; nano where they name none. Raises UserError (see `resolve`)."""
    return resolve_model_config(
        options.source or options.preset or "nano", options.overrides(), vocab_size, options.implementation
    )


def read_config_json(path: Path) -> dict[str, Any]:
    """The fields of a config.json. Raises UserError where there is none that can be read."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; give a folder in Hugging Face's layout, or the name of a preset")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); copy the file again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected an object of fields, got {type(content).__name__}; copy the file again")
    return content


def _read_config_fields(path: Path) -> dict[str, Any]:
    content = read_config_json(path)
    try:
        return config_fields_from_json(content)
    except UserError as mistake:
        way_out = (
            "" if is_supported_family(content) else "; or let transformers compute it: --model.implementation transformers"
        )
        raise UserError(f"{path}: {mistake}{way_out}") from None


def _parse_rope_scaling(rope_dict: dict[str, Any]) -> RopeScaling | None:
    kind = rope_dict.get("rope_type", rope_dict.get("type", "default"))
    needed = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
    if kind not in needed:
        raise UserError(f'rope_scaling: rope_type "{kind}" is not supported; choose one of {", ".join(needed)}')
    for name in needed[kind]:
        if not _is_positive(rope_dict.get(name)):
            raise UserError(f'rope_scaling: rope_type "{kind}" needs {name}, a number above zero; got {rope_dict.get(name)!r}')
    if kind == "llama3" and rope_dict["low_freq_factor"] >= rope_dict["high_freq_factor"]:
        raise UserError("rope_scaling: low_freq_factor must be below high_freq_factor")
    return RopeScaling(kind, **{name: rope_dict[name] for name in needed[kind]}) if needed[kind] else None


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _default_head_dim(hidden_size: Any, num_heads: Any) -> int | None:
    """head_dim when it is not given, None where the heads do not divide the width (or are no numbers at all)."""
    numbers = isinstance(hidden_size, int) and isinstance(num_heads, int) and num_heads > 0
    return hidden_size // num_heads if numbers and hidden_size % num_heads == 0 else None


def _check_numbers(config: ModelConfig) -> None:
    whole = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"]
    whole += ["intermediate_size", "num_key_value_heads"]
    whole += ["head_dim"] if config.head_dim is not None else []
    whole += ["sliding_window"] if config.sliding_window is not None else []
    for name in whole:
        value = getattr(config, name)
        if not (isinstance(value, int) and _is_positive(value)):
            raise UserError(f"{name}: expected a whole number above zero, got {value!r}")
    for name in ("rope_theta", "rms_norm_eps", "layer_norm_epsilon", "initializer_range"):
        if not _is_positive(getattr(config, name)):
            raise UserError(f"{name}: expected a number above zero, got {getattr(config, name)!r}")


def _check_options(config: ModelConfig) -> None:
    kind, heads, groups = config.model_type, config.num_attention_heads, config.num_key_value_heads
    # transformers refuses a llama model whose heads do not divide its width even where head_dim is given.
    if config.head_dim is None or (kind in ("llama", "gpt2") and config.hidden_size % heads):
        way_out = "change one of the two" + ("" if kind == "gpt2" else ", or use model_type mistral with a head_dim")
        raise UserError(f"num_attention_heads: {heads} heads do not divide hidden_size {config.hidden_size}; {way_out}")
    if heads % groups:
        raise UserError(f"num_key_value_heads: {groups} does not divide num_attention_heads {heads}; choose a divisor")
    activations = ("gelu_new", "gelu_pytorch_tanh", "gelu") if config.family == "gpt2" else ("silu", "swish")
    if config.hidden_act not in activations:
        raise UserError(f'hidden_act: "{config.hidden_act}" is not supported in a {kind} model; use "{activations[0]}"')
    if config.family == "llama" and config.head_dim % 2:
        raise UserError(f"head_dim: rotary positions need an even width, got {config.head_dim}")
    if config.family == "gpt2" and (groups != heads or config.head_dim * heads != config.hidden_size):
        raise UserError("num_key_value_heads, head_dim: a gpt2 model has neither; leave them out, or use model_type llama")
    if config.family == "gpt2" and config.rope_scaling is not None:
        raise UserError("rope_scaling: a gpt2 model has learned positions; leave it out, or use model_type llama")
    biases = (config.attention_bias, config.attention_output_bias)
    written = {"mistral": [(False, False)], "qwen2": [(True, False)], "gpt2": [(False, False)]}
    if biases not in written.get(kind, [(False, False), (True, True)]):
        raise UserError(
            f"attention_bias, attention_output_bias: {biases} cannot be written as a {kind} model; llama and qwen3 have "
            "both or none, qwen2 the first alone, mistral and gpt2 neither (gpt2's own are not optional)"
        )
    if config.mlp_bias and kind != "llama":
        raise UserError(f"mlp_bias: a {kind} model has none; leave it out, or use model_type llama")
    if config.qk_norm != (kind == "qwen3"):
        raise UserError(f"qk_norm: {config.qk_norm} cannot be written as a {kind} model; qwen3 always has it, others never")
    if config.sliding_window is not None and kind in ("llama", "gpt2"):
        raise UserError(f"sliding_window: a {kind} model has none; leave it out, or use model_type mistral")
    if config.layer_types is None:
        return
    if config.sliding_window is None or kind == "mistral":
        raise UserError("layer_types: needs sliding_window and model_type qwen2 or qwen3; leave it out")
    if len(config.layer_types) != config.num_hidden_layers:
        raise UserError(f"layer_types: names {len(config.layer_types)} layers of {config.num_hidden_layers}; name each")
    for entry in config.layer_types:
        if entry not in ("full_attention", "sliding_attention"):
            raise UserError(f'layer_types: "{entry}" is not supported; use full_attention or sliding_attention')
