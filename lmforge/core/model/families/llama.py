"""Llama 2 and 3, CodeLlama, SmolLM (arXiv 2302.13971)."""

from lmforge.core.model.family import ROTARY_FIELDS, Family

FAMILY = Family(
    architecture="LlamaForCausalLM",
    classifier="LlamaForSequenceClassification",
    attention_biases=((False, False), (True, True)),
    mlp_biases=True,
    heads_divide_width=True,
    fields=(*ROTARY_FIELDS, "attention_bias", "mlp_bias"),
    defaults={"intermediate_size": 11008, "max_position_embeddings": 2048},
)
