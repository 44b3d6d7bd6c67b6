"""Checkpoints of torchtitan and fms-fsdp: `lmforge import STEP models/mine --plugins
examples/checkpoint_layouts/torchtitan_and_fms.py --num_attention_heads 32 --rope_theta 500000`.

torchtitan: a DCP folder, a dense Llama under Meta's names. fms-fsdp: a DCP folder or a file, Llama
under the names of IBM's foundation-model-stack, some matrices fused. Both rotate neighbouring pairs
of a head's channels. Not read are torchtitan's mixtures of experts and other families, and fms'
Mamba models and speculators.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import lmforge

if TYPE_CHECKING:
    from lmforge.core.model.config import ModelConfig
    from lmforge.hf.layouts import LayoutHints, Parts
    from lmforge.hf.torch_checkpoints import TensorSource

# Our names by theirs, of a block and of the ends; several joined by " + " where theirs fuses them.
TORCHTITAN = {
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
FMS = {
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

# Layers whose shapes tell the sizes of a model.
SIZING_LAYERS = ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")
BLOCK_PREFIX = r"layers\.(\d+)\."


@lmforge.register("checkpoint_layout", "torchtitan", marker="tok_embeddings.weight", like="llama")
def convert_torchtitan(source: "TensorSource", hints: "LayoutHints") -> tuple["ModelConfig", "Parts"]:
    """The config, and which part of which stored tensor each of ours is."""
    return _convert_renamed(source, TORCHTITAN, hints)


@lmforge.register("checkpoint_layout", "fms", marker="layers.0.ff_sub_layer.w2.weight", like="llama")
def convert_fms(source: "TensorSource", hints: "LayoutHints") -> tuple["ModelConfig", "Parts"]:
    """The config, and which part of which stored tensor each of ours is."""
    return _convert_renamed(source, FMS, hints)


def _convert_renamed(source: "TensorSource", names: Mapping[str, str], hints: "LayoutHints") -> tuple["ModelConfig", "Parts"]:
    import torch

    from lmforge.core.model.config import ModelConfig
    from lmforge.hf.layouts import count_layers

    for option in ("num_attention_heads", "rope_theta"):
        if getattr(hints, option) is None:
            raise lmforge.UserError(
                f"this layout does not say {option}; give --{option}, or --config_from a model that has the same"
            )
    our_names = _map_to_our_names(source, names)
    stored_name = {name: stored for stored, names in our_names.items() for name in names}
    q_proj, k_proj, down_proj = (f"model.layers.0.{name}.weight" for name in SIZING_LAYERS)
    for name in (q_proj, k_proj, down_proj):
        if name not in stored_name:
            raise lmforge.UserError(f"has nothing that could be {name}; it is incomplete")

    def shape(name: str) -> torch.Size:
        return source.tensors[stored_name[name]].shape

    (vocabulary, width), heads = shape("model.embed_tokens.weight"), hints.num_attention_heads or 0
    queries, keys = shape(q_proj)[0], shape(k_proj)[0]
    if stored_name[q_proj] == stored_name[k_proj]:
        queries, keys = width, (queries - width) // 2
    head = width // heads
    if width % (2 * heads) or queries != width or keys < head or keys % head:
        raise lmforge.UserError(
            f"{queries} query and {keys} key channels of width {width} are not {heads} heads;"
            " give the model's own --num_attention_heads"
        )
    output, embedding = stored_name.get("lm_head.weight"), stored_name["model.embed_tokens.weight"]
    tied = output is None or torch.equal(source.read(output), source.read(embedding))
    attention_bias = "model.layers.0.self_attn.o_proj.bias" in stored_name
    config = ModelConfig(
        model_type="llama",
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=shape(down_proj)[1],
        num_hidden_layers=count_layers(source, BLOCK_PREFIX),
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
    source: "TensorSource", our_names: Mapping[str, list[str]], rows: Mapping[str, int], rotated_heads: Mapping[str, int]
) -> "Parts":
    """Where each of our tensors is in what is stored; the matrices of a fused one follow each
    other.
    """
    from lmforge.hf.layouts import StoredSlice

    parts: Parts = {}
    for stored, names in our_names.items():
        start = 0
        for name in names:
            module = name.split(".")[-2]
            stop = start + rows.get(module, len(source.tensors[stored]) // len(names))
            parts[name] = StoredSlice(stored, slice(start, stop), rotated_heads.get(module, 0))
            start = stop
    return parts


def _map_to_our_names(source: "TensorSource", name_map: Mapping[str, str]) -> dict[str, list[str]]:
    """Our names of each stored tensor: one, or several that are fused.

    Raises UserError for an unknown tensor.
    """
    our_names = {}
    for stored in source.tensors:
        block = re.match(BLOCK_PREFIX, stored)
        short, _, parameter = stored[block.end() if block else 0 :].rpartition(".")
        if short not in name_map or parameter not in ("weight", "bias"):
            raise lmforge.UserError(f"holds {stored}, which is not part of a Llama model of this layout; it cannot be imported")
        prefix = f"model.layers.{block[1]}." if block else ""
        our_names[stored] = [f"{prefix}{each}.{parameter}" for each in name_map[short].split(" + ")]
    return our_names
