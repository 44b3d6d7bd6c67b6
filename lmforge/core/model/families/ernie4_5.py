"""ERNIE 4.5, its dense models: Llama whose rotary positions pair neighbouring channels."""

from lmforge.core.model.family import ROTARY_FIELDS, Family

FAMILY = Family(
    architecture="Ernie4_5ForCausalLM",
    classifier="",
    rotates_neighbours=True,
    fields=ROTARY_FIELDS,
    defaults={
        "intermediate_size": 3072,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    },
    required_values={"use_bias": False},
)
