"""How other trainers lay out a checkpoint, and what each of our tensors is made of there.

nanoGPT (a file of torch.save: GPT-2 with linear maps that are not transposed), torchtitan (a DCP folder: Llama under Meta's
names) and fms-fsdp (a DCP folder or a file: Llama under the names of IBM's foundation-model-stack, some matrices fused).
The last two turn neighbouring pairs of a head's channels, as Meta's code does, where ours and Hugging Face's turn a channel
of the first half with one of the second: the rows of their query and key matrices are put in the other order.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmforge.errors import Mistake
from lmforge.model import build
from lmforge.model.shapes import ModelConfig
from lmforge.model.stored import Stored

LAYOUTS = ("nanogpt", "torchtitan", "fms")
# Where trainers put the model among what else they save, and what wrappers put before its names.
_ROOTS = ("", "model.", "model_state.", "state_dict.", "module.")
_WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.|_fsdp_wrapped_module\.")
# What is stored and not learned: causal masks and rotary tables.
_CONSTANTS = re.compile(r"(\.attn\.bias|freqs_cis|rot_emb\..*|rope\.\w+|rotary_emb\.\w+)$")
_BLOCK = r"layers\.(\d+)\."

_TORCHTITAN = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_FMS = {
    "shared.emb": "model.embed_tokens",
    "embedding": "model.embed_tokens",
    "dec_norm": "model.norm",
    "shared.head": "lm_head",
    "head": "lm_head",
    "attn.query": "self_attn.q_proj",
    "attn.key": "self_attn.k_proj",
    "attn.value": "self_attn.v_proj",
    "attn.in_proj.query": "self_attn.q_proj",
    "attn.in_proj.key": "self_attn.k_proj",
    "attn.in_proj.value": "self_attn.v_proj",
    "attn.in_proj.qkv_fused": "self_attn.q_proj + self_attn.k_proj + self_attn.v_proj",
    "attn.dense": "self_attn.o_proj",
    "ff_sub_layer.wg": "mlp.gate_proj",
    "ff_sub_layer.w1": "mlp.up_proj",
    "ff_sub_layer.wg1_fused": "mlp.gate_proj + mlp.up_proj",
    "ff_sub_layer.w2": "mlp.down_proj",
    "ln": "input_layernorm",
    "ff_ln": "post_attention_layernorm",
}
_MARKS = {
    "nanogpt": "transformer.wte.weight",
    "torchtitan": "tok_embeddings.weight",
    "fms": r"layers.0.ff_sub_layer.w2.weight",
}
_TRANSPOSED = re.compile(r"(c_attn|c_proj|c_fc)\.weight$")


@dataclass(frozen=True)
class Known:
    """What a checkpoint does not tell and somebody has to; None where nobody did."""

    num_attention_heads: int | None = None
    rope_theta: float | None = None
    rope_scaling: Any = None
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096
    activation: str = "gelu"


@dataclass(frozen=True)
class Laid:
    """A foreign checkpoint as a model of ours: its shape, its tensors on the meta device, and each when it is asked for."""

    layout: str
    config: ModelConfig
    tensors: dict[str, Tensor]
    read: Callable[[str], Tensor]


@dataclass(frozen=True)
class _Part:
    """Rows of a stored tensor: all, or of `rows` and `start` where several are fused; then put in our order."""

    stored: str
    rows: slice
    heads: int = 0
    transposed: bool = False

    def of(self, whole: Tensor) -> Tensor:
        value = whole[self.rows]
        if self.heads:
            value = value.unflatten(0, (self.heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return value.t() if self.transposed else value


def lay_out(path: Path, stored: Stored, layout: str, known: Known) -> Laid:
    """A foreign checkpoint as a model of ours. Raises Mistake for what is not such a checkpoint, or is told wrongly.

    layout: one of LAYOUTS, or "auto" for the one whose names are there.
    """
    names = _model_names(stored)
    if layout == "auto":
        found = [each for each, mark in _MARKS.items() if mark in names]
        if not found:
            some = ", ".join(sorted(names)[:3]) or "no tensors"
            raise Mistake(f"{path}: not of a layout that is known here ({', '.join(LAYOUTS)}); it has {some}")
        layout = found[0]
    if _MARKS[layout] not in names:
        close = get_close_matches(_MARKS[layout], names, n=1)
        raise Mistake(f"{path}: not of layout {layout}: has no {_MARKS[layout]}" + (f", but {close[0]}" if close else ""))
    tensors = {short: stored.tensors[name] for short, name in names.items()}

    def read(short: str) -> Tensor:
        return stored.read(names[short])

    if layout == "nanogpt":
        config, parts = _nanogpt(path, tensors, stored.beside, known)
    else:
        config, parts = _llama(path, tensors, read, _TORCHTITAN if layout == "torchtitan" else _FMS, known)
    return Laid(layout, config, *_checked(path, config, parts, tensors, read))


def _model_names(stored: Stored) -> dict[str, str]:
    """The stored name of each of the model's tensors, by its name in the model."""
    for root in _ROOTS:
        names = {}
        for name in stored.tensors:
            short = _WRAPPERS.sub("", name)
            if short.startswith(root):
                names[short.removeprefix(root).removeprefix("base_model.")] = name
        if any(mark in names for mark in _MARKS.values()):
            break
    else:
        names = {name: name for name in stored.tensors}
    # At the top, beside the model, lie the optimizer's.
    return {short: name for short, name in names.items() if not _CONSTANTS.search(short) and not short.startswith("optimizer")}


def _nanogpt(
    path: Path, tensors: dict[str, Tensor], beside: dict[str, Any], known: Known
) -> tuple[ModelConfig, dict[str, _Part | None]]:
    arguments = {name.removeprefix("model_args."): value for name, value in beside.items() if name.startswith("model_args.")}
    heads = known.num_attention_heads or arguments.get("n_head")
    if not isinstance(heads, int):
        raise Mistake(f"{path}: does not say how many heads it has (model_args.n_head); give --num_attention_heads")
    vocabulary, width = tensors["transformer.wte.weight"].shape
    positions = tensors.get("transformer.wpe.weight")
    if positions is None:
        raise Mistake(f"{path}: has no transformer.wpe.weight; only nanoGPT with learned positions can be imported")
    config = ModelConfig(
        model_type="gpt2",
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=_layers(tensors, r"transformer\.h\.(\d+)\."),
        num_attention_heads=heads,
        max_position_embeddings=len(positions),
        hidden_act=known.activation,
        tie_word_embeddings=True,
    )
    parts: dict[str, _Part | None] = {
        name: _Part(name, slice(None), transposed=_TRANSPOSED.search(name) is not None)
        for name in tensors
        if name != "lm_head.weight"  # the embedding under another name
    }
    for name in build(config, seed=None, device="meta").state_dict():
        if name.endswith(".bias") and name not in parts and arguments.get("bias") is False:
            parts[name] = None  # nothing is added, which a bias of zeros does
    return config, parts


def _llama(
    path: Path, tensors: dict[str, Tensor], read: Callable[[str], Tensor], ours: dict[str, str], known: Known
) -> tuple[ModelConfig, dict[str, _Part | None]]:
    for option in ("num_attention_heads", "rope_theta"):
        if getattr(known, option) is None:
            raise Mistake(f"{path}: this layout does not tell {option}; give --{option}, or --like a model that has the same")
    made = _made_of(path, tensors, ours)
    origin = {name: stored for stored, several in made.items() for name in several}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"):
        if f"model.layers.0.{name}.weight" not in origin:
            raise Mistake(f"{path}: has nothing that could be model.layers.0.{name}.weight; it is not whole")

    def shape(name: str) -> torch.Size:
        return tensors[origin[f"{name}.weight"]].shape

    (vocabulary, width), heads = shape("model.embed_tokens"), known.num_attention_heads or 0
    queries, keys = (shape(f"model.layers.0.self_attn.{each}_proj")[0] for each in "qk")
    if origin["model.layers.0.self_attn.q_proj.weight"] == origin["model.layers.0.self_attn.k_proj.weight"]:
        queries, keys = width, (queries - width) // 2
    head = width // heads
    if width % (2 * heads) or queries != width or keys < head or keys % head:
        raise Mistake(
            f"{path}: {queries} query and {keys} key channels of width {width} are not {heads} heads;"
            " give the model's own --num_attention_heads"
        )
    top, embedding = origin.get("lm_head.weight"), origin["model.embed_tokens.weight"]
    tied = top is None or torch.equal(read(top), read(embedding))
    attention_bias = "model.layers.0.self_attn.o_proj.bias" in origin
    config = ModelConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=shape("model.layers.0.mlp.down_proj")[1],
        num_hidden_layers=_layers(tensors, _BLOCK),
        num_attention_heads=heads,
        num_key_value_heads=keys // head,
        max_position_embeddings=known.max_position_embeddings,
        rope_theta=known.rope_theta or 0,
        rope_scaling=known.rope_scaling,
        rms_norm_eps=known.rms_norm_eps,
        attention_bias=attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias="model.layers.0.mlp.down_proj.bias" in origin,
        tie_word_embeddings=tied,
    )
    rows, turned = {"q_proj": queries, "k_proj": keys, "v_proj": keys}, {"q_proj": heads, "k_proj": keys // head}
    parts: dict[str, _Part | None] = {}
    for stored, several in made.items():
        start = 0
        for name in several:
            kind = name.split(".")[-2]
            stop = start + rows.get(kind, len(tensors[stored]) // len(several))
            parts[name] = _Part(stored, slice(start, stop), turned.get(kind, 0))
            start = stop
    if tied:
        parts.pop("lm_head.weight", None)
    return config, parts


def _made_of(path: Path, tensors: dict[str, Tensor], ours: dict[str, str]) -> dict[str, list[str]]:
    """Which of our tensors each stored one is: one, or several that are fused. Raises Mistake for one that is none."""
    made = {}
    for stored in tensors:
        block = re.match(_BLOCK, stored)
        short, _, kind = stored[block.end() if block else 0 :].rpartition(".")
        if short not in ours or kind not in ("weight", "bias"):
            raise Mistake(f"{path}: holds {stored}, which is no part of a Llama model of this layout; it cannot be imported")
        before = f"model.layers.{block[1]}." if block else ""
        made[stored] = [f"{before}{each}.{kind}" for each in ours[short].split(" + ")]
    return made


def _layers(tensors: dict[str, Tensor], block: str) -> int:
    return 1 + max((int(found[1]) for name in tensors if (found := re.match(block, name))), default=-1)


def _checked(
    path: Path,
    config: ModelConfig,
    parts: dict[str, _Part | None],
    tensors: dict[str, Tensor],
    read: Callable[[str], Tensor],
) -> tuple[dict[str, Tensor], Callable[[str], Tensor]]:
    """The model's tensors on the meta device, and a function that reads one. Raises Mistake where they are not all there."""
    wanted = dict(build(config, seed=None, device="meta").named_parameters())
    shown = {}
    dtype = next(iter(tensors.values())).dtype
    for name, parameter in wanted.items():
        if name not in parts:
            raise Mistake(f"{path}: has nothing that could be {name}; it is not whole, or of another layout")
        part = parts[name]
        shape = parameter.shape if part is None else part.of(tensors[part.stored]).shape
        if shape != parameter.shape:
            raise Mistake(f"{path}: {name} would be {list(shape)} and should be {list(parameter.shape)}")
        shown[name] = torch.empty(shape, dtype=dtype if part is None else tensors[part.stored].dtype, device="meta")
    if extra := sorted(parts.keys() - wanted.keys()):
        raise Mistake(f"{path}: holds {extra[0]}, which is no part of such a model; it cannot be imported")

    def read_ours(name: str) -> Tensor:
        part = parts[name]
        return torch.zeros_like(shown[name], device="cpu") if part is None else part.of(read(part.stored))

    return shown, read_ours
