"""Seed-OSS: Llama with biases on queries, keys and values, and others if the config says so."""

from lmforge.core.model.family import ROTARY_FIELDS, Family

FAMILY = Family(
    architecture="SeedOssForCausalLM",
    classifier="SeedOssForSequenceClassification",
    attention_biases=((True, False), (False, False), (True, True), (False, True)),
    mlp_biases=True,
    fields=(*ROTARY_FIELDS, "attention_bias", "attention_output_bias", "mlp_bias"),
    names={"attention_output_bias": "attention_out_bias"},
    defaults={
        "intermediate_size": 27648,
        "max_position_embeddings": 524_288,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    dropouts=("attention_dropout", "residual_dropout"),
)
