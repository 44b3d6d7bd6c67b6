"""The checkpoints of other trainers: which of their stored tensors make up each of ours, as the families describe them.

nanoGPT (a torch.save file: GPT-2 with linear maps that are not transposed), torchtitan (a DCP folder: Llama under Meta's
names) and fms-fsdp (a DCP folder or a file: Llama under the names of IBM's foundation-model-stack, some matrices fused).
The last two rotate neighbouring pairs of a head's channels, as Meta's code does; ours and Hugging Face's pair a channel of the
first half with one of the second. So the rows of their query and key matrices are reordered.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmforge.core.errors import UserError
from lmforge.core.model import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.family import load_family
from lmforge.core.options.builtin_names import FAMILIES
from lmforge.hf.torch_checkpoints import TensorSource

# Keys under which trainers store the model in a checkpoint, and prefixes that wrappers add to its names.
_PREFIXES = ("", "model.", "model_state.", "state_dict.", "module.")
_WRAPPER_NAMES = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.|_fsdp_wrapped_module\.")
# Stored but not learned: causal masks and rotary tables.
_NOT_LEARNED = re.compile(r"(\.attn\.bias|freqs_cis|rot_emb\..*|rope\.\w+|rotary_emb\.\w+)$")
# Layers whose shapes tell the sizes of a model.
_SIZING_LAYERS = ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")
_BLOCK_PREFIX = r"layers\.(\d+)\."

_TRANSPOSED = re.compile(r"(c_attn|c_proj|c_fc)\.weight$")


# Each known layout: its model_type, and its description.
LAYOUTS = {
    name: (model_type, layout) for model_type in FAMILIES for name, layout in load_family(model_type).foreign_layouts.items()
}


@dataclass(frozen=True)
class LayoutHints:
    """Values that a checkpoint lacks and the user must give; None where not given."""

    num_attention_heads: int | None = None
    rope_theta: float | None = None
    rope_scaling: Any = None
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096
    hidden_act: str = "gelu"


@dataclass(frozen=True)
class ConvertedCheckpoint:
    """Another trainer's checkpoint as a model of ours: its config, its tensors on the meta device, and each one's value."""

    layout: str
    config: ModelConfig
    tensors: dict[str, Tensor]
    read: Callable[[str], Tensor]


@dataclass(frozen=True)
class _StoredSlice:
    """The rows of a stored tensor that are one of ours, reordered where `num_heads` is set, and transposed."""

    stored_name: str
    rows: slice
    num_heads: int = 0
    transposed: bool = False

    def extract(self, full: Tensor) -> Tensor:
        value = full[self.rows]
        if self.num_heads:
            value = value.unflatten(0, (self.num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return value.t() if self.transposed else value


# Which part of which stored tensor each of ours is, by our names; None is a bias of zeros, which is not stored.
_Parts = dict[str, _StoredSlice | None]


def convert_checkpoint(path: Path, checkpoint: TensorSource, layout: str, hints: LayoutHints) -> ConvertedCheckpoint:
    """Another trainer's checkpoint as a model of ours. Raises UserError where it is not of the layout, or a hint is wrong.

    layout: nanogpt, torchtitan or fms, or auto for the one whose tensor names it has.
    """
    source = _without_wrappers(checkpoint)
    if layout == "auto":
        layouts = [each for each, (_, described) in LAYOUTS.items() if described.marker in source.tensors]
        if not layouts:
            some = ", ".join(sorted(source.tensors)[:3]) or "no tensors"
            raise UserError(f"{path}: not of a known layout ({', '.join(LAYOUTS)}); it has {some}")
        layout = layouts[0]
    model_type, (marker, names) = LAYOUTS[layout]
    if marker not in source.tensors:
        close = get_close_matches(marker, source.tensors, n=1)
        raise UserError(f"{path}: not of layout {layout}: has no {marker}" + (f", but {close[0]}" if close else ""))
    convert = _convert_renamed if names else _convert_transposed
    config, parts = convert(path, source, model_type, names, hints)
    tensors = _check_tensors(path, config, parts, source)

    def read(name: str) -> Tensor:
        part = parts[name]
        return torch.zeros_like(tensors[name], device="cpu") if part is None else part.extract(source.read(part.stored_name))

    return ConvertedCheckpoint(layout, config, tensors, read)


def _without_wrappers(checkpoint: TensorSource) -> TensorSource:
    """The tensors of the model, by their names in the model."""
    for root in _PREFIXES:
        names = {}
        for name in checkpoint.tensors:
            short = _WRAPPER_NAMES.sub("", name)
            if short.startswith(root):
                names[short.removeprefix(root).removeprefix("base_model.")] = name
        if any(layout.marker in names for _, layout in LAYOUTS.values()):
            break
    else:
        names = {name: name for name in checkpoint.tensors}
    # The optimizer's tensors may lie beside the model's.
    ignored = re.compile(f"^optimizer|{_NOT_LEARNED.pattern}")
    tensors = {short: checkpoint.tensors[name] for short, name in names.items() if not ignored.search(short)}
    return TensorSource(tensors, lambda short: checkpoint.read(names[short]), checkpoint.non_tensors)


def _convert_transposed(
    path: Path, source: TensorSource, model_type: str, names: Mapping[str, str], hints: LayoutHints
) -> tuple[ModelConfig, _Parts]:
    """nanoGPT's: our names, with linear maps that are not transposed."""
    heads = hints.num_attention_heads or source.non_tensors.get("model_args.n_head")
    if not isinstance(heads, int):
        raise UserError(f"{path}: does not say how many heads it has (model_args.n_head); give --num_attention_heads")
    vocabulary, width = source.tensors["transformer.wte.weight"].shape
    positions = source.tensors.get("transformer.wpe.weight")
    if positions is None:
        raise UserError(f"{path}: has no transformer.wpe.weight; only nanoGPT with learned positions can be imported")
    config = ModelConfig(
        model_type=model_type,
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=_count_layers(source, r"transformer\.h\.(\d+)\."),
        num_attention_heads=heads,
        max_position_embeddings=len(positions),
        hidden_act=hints.hidden_act,
        tie_word_embeddings=True,
    )
    everything = slice(None)
    parts: _Parts = {name: _StoredSlice(name, everything, transposed=bool(_TRANSPOSED.search(name))) for name in source.tensors}
    parts.pop("lm_head.weight", None)  # the embedding under another name
    if source.non_tensors.get("model_args.bias") is False:
        biases = [name for name in build_model(config, "meta").state_dict() if name.endswith(".bias")]
        parts = {**dict.fromkeys(biases), **parts}
    return config, parts


def _convert_renamed(
    path: Path, source: TensorSource, model_type: str, names: Mapping[str, str], hints: LayoutHints
) -> tuple[ModelConfig, _Parts]:
    """Other names, some of several matrices in one, whose rotary positions turn neighbouring channels."""
    for option in ("num_attention_heads", "rope_theta"):
        if getattr(hints, option) is None:
            raise UserError(
                f"{path}: this layout does not say {option}; give --{option}, or --config_from a model that has the same"
            )
    our_names = _map_to_our_names(path, source, names)
    stored_name = {name: stored for stored, names in our_names.items() for name in names}
    q_proj, k_proj, down_proj = (f"model.layers.0.{name}.weight" for name in _SIZING_LAYERS)
    for name in (q_proj, k_proj, down_proj):
        if name not in stored_name:
            raise UserError(f"{path}: has nothing that could be {name}; it is incomplete")

    def shape(name: str) -> torch.Size:
        return source.tensors[stored_name[name]].shape

    (vocabulary, width), heads = shape("model.embed_tokens.weight"), hints.num_attention_heads or 0
    queries, keys = shape(q_proj)[0], shape(k_proj)[0]
    if stored_name[q_proj] == stored_name[k_proj]:
        queries, keys = width, (queries - width) // 2
    head = width // heads
    if width % (2 * heads) or queries != width or keys < head or keys % head:
        raise UserError(
            f"{path}: {queries} query and {keys} key channels of width {width} are not {heads} heads;"
            " give the model's own --num_attention_heads"
        )
    output, embedding = stored_name.get("lm_head.weight"), stored_name["model.embed_tokens.weight"]
    tied = output is None or torch.equal(source.read(output), source.read(embedding))
    attention_bias = "model.layers.0.self_attn.o_proj.bias" in stored_name
    config = ModelConfig(
        model_type=model_type,
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=shape(down_proj)[1],
        num_hidden_layers=_count_layers(source, _BLOCK_PREFIX),
        num_attention_heads=heads,
        num_key_value_heads=keys // head,
        max_position_embeddings=hints.max_position_embeddings,
        rope_theta=hints.rope_theta or 0,
        rope_scaling=hints.rope_scaling,
        rms_norm_eps=hints.rms_norm_eps,
        attention_bias=attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias="model.layers.0.mlp.down_proj.bias" in stored_name,
        tie_word_embeddings=tied,
    )
    rows, rotated_heads = {"q_proj": queries, "k_proj": keys, "v_proj": keys}, {"q_proj": heads, "k_proj": keys // head}
    parts = _slices(source, our_names, rows, rotated_heads)
    if tied:
        parts.pop("lm_head.weight", None)
    return config, parts


def _slices(
    source: TensorSource, our_names: Mapping[str, list[str]], rows: Mapping[str, int], rotated_heads: Mapping[str, int]
) -> _Parts:
    """Where each of our tensors is in what is stored; the matrices of a fused one follow each other."""
    parts: _Parts = {}
    for stored, names in our_names.items():
        start = 0
        for name in names:
            module = name.split(".")[-2]
            stop = start + rows.get(module, len(source.tensors[stored]) // len(names))
            parts[name] = _StoredSlice(stored, slice(start, stop), rotated_heads.get(module, 0))
            start = stop
    return parts


def _map_to_our_names(path: Path, source: TensorSource, name_map: Mapping[str, str]) -> dict[str, list[str]]:
    """Our names of each stored tensor: one, or several that are fused. Raises UserError for an unknown tensor."""
    our_names = {}
    for stored in source.tensors:
        block = re.match(_BLOCK_PREFIX, stored)
        short, _, parameter = stored[block.end() if block else 0 :].rpartition(".")
        if short not in name_map or parameter not in ("weight", "bias"):
            raise UserError(f"{path}: holds {stored}, which is not part of a Llama model of this layout; it cannot be imported")
        prefix = f"model.layers.{block[1]}." if block else ""
        our_names[stored] = [f"{prefix}{each}.{parameter}" for each in name_map[short].split(" + ")]
    return our_names


def _count_layers(source: TensorSource, block: str) -> int:
    return 1 + max((int(match[1]) for name in source.tensors if (match := re.match(block, name))), default=-1)


def _check_tensors(path: Path, config: ModelConfig, parts: _Parts, source: TensorSource) -> dict[str, Tensor]:
    """The model's tensors on the meta device. Raises UserError where one is missing, or of another shape."""
    expected = dict(build_model(config, "meta").named_parameters())
    dtype = next(iter(source.tensors.values())).dtype
    tensors = {}
    for name, parameter in expected.items():
        if name not in parts:
            raise UserError(f"{path}: has nothing that could be {name}; it is incomplete, or of another layout")
        part = parts[name]
        tensor = parameter.to(dtype) if part is None else part.extract(source.tensors[part.stored_name])
        if tensor.shape != parameter.shape:
            raise UserError(f"{path}: {name} would be {list(tensor.shape)} and should be {list(parameter.shape)}")
        tensors[name] = tensor
    if extra := sorted(parts.keys() - expected.keys()):
        raise UserError(f"{path}: holds {extra[0]}, which is not part of such a model; it cannot be imported")
    return tensors
