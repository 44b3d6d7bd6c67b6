"""OLMo 2 (arXiv 2501.00656): attention and feed-forward are normalized after they are computed, not
before; queries and keys are normalized over all heads together.
"""

from functools import partial

from lmforge.core.model.family import ROTARY_FIELDS, Family, decoder_block

FAMILY = Family(
    architecture="Olmo2ForCausalLM",
    classifier="Olmo2ForSequenceClassification",
    block=partial(
        decoder_block,
        attention_norms=(None, "post_attention_layernorm"),
        mlp_norms=(None, "post_feedforward_layernorm"),
    ),
    norm_offset=0.0,
    qk_norm="channels",
    attention_biases=((False, False), (True, True)),
    heads_divide_width=True,
    fields=(*ROTARY_FIELDS, "attention_bias"),
    defaults={
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
    },
)
