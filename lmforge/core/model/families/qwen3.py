"""Qwen 3 (arXiv 2505.09388): Qwen 2 with queries and keys that are normalized in each head, and
other biases.
"""

from lmforge.core.model.families.qwen2 import DEFAULTS, read, write_windows
from lmforge.core.model.family import ROTARY_FIELDS, Family

FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    classifier="Qwen3ForSequenceClassification",
    qk_norm="heads",
    attention_biases=((False, False), (True, True)),
    windows="by layer",
    fields=(*ROTARY_FIELDS, "attention_bias"),
    defaults={**DEFAULTS, "head_dim": 128},
    read=read,
    write=write_windows,
)
