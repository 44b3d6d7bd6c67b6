"""The language model of a folder whose model reads images too: its part of config.json, and which
tensors are its own.

What else such a folder has (vision tower, projector) is neither read nor trained; an export takes
it over (hf/multimodal.py).
"""

from collections.abc import Iterable
from typing import Any

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import quoted

# model_type of a folder → those of its text_config, with the family of lmforge that each is.
TEXT_TOWERS = {
    "gemma3": {"gemma3_text": "gemma3_text"},
    "mistral3": {"mistral": "mistral"},
    "qwen3_5": {"qwen3_5_text": "qwen3_5_text"},
    "qwen3_5_moe": {"qwen3_5_moe_text": "qwen3_5_moe_text"},
    "qwen3_vl": {"qwen3_vl_text": "qwen3"},
}
# What transformers assumes of such a text_config, and a published one leaves out.
_LEFT_OUT = {"gemma3": {"vocab_size": 262_208, "num_attention_heads": 8}}
# Whose head is the embedding where the outer config.json says nothing.
_TIED = ("gemma3", "mistral3")
# Of the language model's tensors, as transformers 5 and 4 write them.
_PREFIXES = ("model.language_model.", "language_model.model.")
_HEAD = "lm_head."
# Key of a config.json that `read_text_tower` has taken from a larger one: the model_type of that.
TOWER_OF = "text_tower_of"


def read_text_tower(content: dict[str, Any]) -> dict[str, Any]:
    """The config.json of the language model in that of a model that reads images too, if it is one
    of TEXT_TOWERS; any other as it is. Raises UserError where its text_config is none.
    """
    model_type = str(content.get("model_type"))
    towers = TEXT_TOWERS.get(model_type)
    if towers is None:
        return content
    text = content.get("text_config")
    if not isinstance(text, dict) or str(text.get("model_type")) not in towers:
        known = ", ".join(towers)
        given = text.get("model_type") if isinstance(text, dict) else text
        raise UserError(
            f"text_config: the language model of a {model_type} folder is one of {known}, got"
            f" {quoted(given)}"
        )
    if any(
        str(name).endswith("ForSequenceClassification")
        for name in content.get("architectures") or ()
    ):
        raise UserError(
            f"architectures: a classifier of type {model_type} is not supported; use the folder of"
            " its language model"
        )
    outer = ("eos_token_id", "bos_token_id", "pad_token_id", "quantization_config")
    return {
        **_LEFT_OUT.get(model_type, {}),
        **text,
        **{name: content[name] for name in outer if content.get(name) is not None},
        **{name: content[name] for name in ("generation_config",) if name in content},
        # Its own head is the outer model's.
        "tie_word_embeddings": content.get("tie_word_embeddings", model_type in _TIED),
        "model_type": towers[str(text["model_type"])],
        TOWER_OF: model_type,
    }


def has_tower_names(names: Iterable[str]) -> bool:
    """Whether tensors of these names are a multimodal model's, whatever the config.json is."""
    return any(name.startswith(_PREFIXES) for name in names)


def tower_tensor(stored: str) -> str | None:
    """Our name of a tensor of such a folder; None of one that is not the language model's."""
    for prefix in _PREFIXES:
        if stored.startswith(prefix):
            return f"model.{stored.removeprefix(prefix)}"
    if stored.removeprefix("language_model.").startswith(_HEAD):
        return stored.removeprefix("language_model.")
    return None


def full_model_name(name: str, like: str = _PREFIXES[0]) -> str:
    """The name in the full model of a tensor or module of ours; on disk in a folder that has a
    tensor called `like`.
    """
    prefix = next(each for each in _PREFIXES if like.startswith(each))
    if name.startswith(_HEAD):
        return f"language_model.{name}" if prefix == _PREFIXES[1] else name
    return prefix + name.removeprefix("model.")
