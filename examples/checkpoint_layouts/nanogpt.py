"""Checkpoints of nanoGPT: `lmforge import ckpt.pt models/mine --plugins
examples/checkpoint_layouts/nanogpt.py`.

A file of torch.save: GPT-2 under Hugging Face's names, with linear maps that are not transposed.
Not read are forks with other norms, activations or rotary positions.
"""

import re
from typing import TYPE_CHECKING

import lmforge

if TYPE_CHECKING:
    from lmforge.core.model.config import ModelConfig
    from lmforge.hf.layouts import LayoutHints, Parts
    from lmforge.hf.torch_checkpoints import TensorSource

TRANSPOSED = re.compile(r"(c_attn|c_proj|c_fc)\.weight$")


@lmforge.register("checkpoint_layout", "nanogpt", marker="transformer.wte.weight", like="gpt2")
def convert_nanogpt(source: "TensorSource", hints: "LayoutHints") -> tuple["ModelConfig", "Parts"]:
    """The config, and which stored tensor each of ours is. Biases that a model lacks are zeros."""
    from lmforge.core.model.build import build_model
    from lmforge.core.model.config import ModelConfig
    from lmforge.hf.layouts import StoredSlice, count_layers

    heads = source.non_tensors.get("model_args.n_head") or hints.num_attention_heads
    if not isinstance(heads, int):
        raise lmforge.UserError(
            "does not say how many heads it has (model_args.n_head); give --num_attention_heads"
        )
    vocabulary, width = source.tensors["transformer.wte.weight"].shape
    positions = source.tensors.get("transformer.wpe.weight")
    if positions is None:
        raise lmforge.UserError(
            "has no transformer.wpe.weight; only nanoGPT with learned positions can be imported"
        )
    config = ModelConfig(
        model_type="gpt2",
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=count_layers(source, r"transformer\.h\.(\d+)\."),
        num_attention_heads=heads,
        max_position_embeddings=len(positions),
        hidden_act=hints.hidden_act,
        tie_word_embeddings=True,
    )
    everything = slice(None)
    parts: Parts = {
        name: StoredSlice(name, everything, transposed=bool(TRANSPOSED.search(name)))
        for name in source.tensors
    }
    parts.pop("lm_head.weight", None)  # the embedding under another name
    if source.non_tensors.get("model_args.bias") is False:
        biases = [
            name for name in build_model(config, "meta").state_dict() if name.endswith(".bias")
        ]
        parts = {**dict.fromkeys(biases), **parts}
    return config, parts
