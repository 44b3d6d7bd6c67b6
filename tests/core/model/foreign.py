"""Small folders of families that lmforge does not compute itself, written by transformers."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import stored_buffers
from lmforge.core.model.layers import LanguageModel
from lmforge.core.model.resolve import model_config_from_json
from lmforge.hf.resolve import resolve_model_config
from lmforge.hf.weights import load_folder
from tests.core.model.conftest import shaken

# Widths are multiples of four: the kernel that multiplies experts wants rows of whole 16 bytes.
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    # Blocks whose halves run side by side, half of each head turned, one product for q, k and v,
    # biases, dropout.
    "gpt_neox": {"rotary_pct": 0.5, "hidden_dropout": 0.3, "attention_dropout": 0.3},
    # Norms around zero, a scaled embedding, two kinds of layers with angles of their own, a tied
    # head.
    "gemma3_text": {
        "num_key_value_heads": 1,
        "head_dim": 8,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "tie_word_embeddings": True,
    },
    # Experts, stored one by one and computed as a stack.
    "mixtral": {
        "num_key_value_heads": 2,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
    },
    # Logits divided by a number.
    "granite": {"num_key_value_heads": 2, "logits_scaling": 4.0},
    # Capped logits, and capped attention scores.
    "gemma2": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 5,
        "final_logit_softcapping": 2.0,
    },
    # A head with a bias.
    "phi": {"partial_rotary_factor": 0.5},
    # Slopes instead of positions, no sdpa.
    "bloom": {"n_head": 4, "n_layer": 3},
    # Learned positions, a base model within the base model.
    "opt": {"ffn_dim": 44, "word_embed_proj_dim": 32},
    # A number of each layer that is stored and not trained.
    "gemma4_text": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 8,
        "sliding_window": 5,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    # Biases of routers that are stored and not trained, with another name in folders.
    "minimax_m2": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    # An activation with trained and untrained numbers, without dimensions.
    "apertus": {"num_key_value_heads": 2},
}
# Whose first values transformers does not say.
WITHOUT_FIRST_VALUES = ("apertus",)


def theirs_of(kind: str, **fields: Any) -> Any:
    """A model of transformers with weights and buffers that all matter, without dropout."""
    config = CONFIG_MAPPING[kind](**{**SIZES, **FAMILIES.get(kind, {}), **fields})
    model = shaken(AutoModelForCausalLM.from_config(config, dtype=torch.float32)).eval()
    for _, buffer in stored_buffers(model):
        buffer.add_(0.25 * torch.rand_like(buffer))
    return model


def described(kind: str, **fields: Any) -> ModelConfig:
    """The shape of a family as a folder would tell it."""
    return model_config_from_json(
        {**SIZES, **FAMILIES[kind], **fields, "model_type": kind}, "here", "transformers"
    )


def wrapped(folder: Path) -> LanguageModel:
    """The model of a folder as transformers computes it, in our hands."""
    model = build_model(resolve_model_config(folder, {}, implementation="transformers"))
    load_folder(folder, model)
    return model


def saved(kind: str, folder: Path, **fields: Any) -> tuple[nn.Module, LanguageModel]:
    """transformers' own model, and the same one read back from the folder that it wrote."""
    theirs = theirs_of(kind, **fields)
    theirs.save_pretrained(folder)
    return theirs, wrapped(folder)
