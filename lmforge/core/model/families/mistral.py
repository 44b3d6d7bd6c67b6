"""Mistral 7B (arXiv 2310.06825): one window for all layers."""

from lmforge.core.model.family import ROTARY_FIELDS, Family

FAMILY = Family(
    architecture="MistralForCausalLM",
    classifier="MistralForSequenceClassification",
    windows="all layers",
    fields=(*ROTARY_FIELDS, "sliding_window"),
    defaults={
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    required_values={"layer_types": None},
)
