"""GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019): learned
positions, LayerNorm, one matrix for queries, keys and values, no gate. Its modules are in
core/model/modules/gpt2.py.
"""

from lmforge.core.model.blocks import Block, Branch, Linear, Mixer
from lmforge.core.model.family import Family
from lmforge.core.model.fields import ModelFields


def _block(family: Family, config: ModelFields, layer: int) -> Block:
    width = config.hidden_size
    inner = config.intermediate_size
    attention = (
        Linear("attn.c_attn", width, 3 * width, bias=True),
        Linear("attn.c_proj", width, width, bias=True, residual=True),
    )
    feed_forward = (
        Linear("mlp.c_fc", width, inner, bias=True),
        Linear("mlp.c_proj", inner, width, bias=True, residual=True),
    )
    return Block(
        (
            Branch((Mixer("attn", "gpt2", attention, mixes_tokens=True),), "ln_1"),
            Branch((Mixer("mlp", "gpt2", feed_forward),), "ln_2"),
        )
    )


FAMILY = Family(
    architecture="GPT2LMHeadModel",
    classifier="GPT2ForSequenceClassification",
    module="lmforge.core.model.modules.gpt2:GPT2",
    block=_block,
    layer_norm=True,
    activations=("gelu_new", "gelu_pytorch_tanh", "gelu"),
    learned_positions=True,
    transposed=True,
    why_not_split="gpt2 keeps queries, keys and values in one matrix, which is not split",
    intermediate_ratio=4,
    grouped_heads=False,
    heads_divide_width=True,
    fields=("layer_norm_epsilon",),
    names={
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "hidden_act": "activation_function",
    },
    defaults={
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "hidden_act": "gelu_new",
    },
    required_values={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    read=lambda content: {},
    dropouts=("attn_pdrop", "embd_pdrop", "resid_pdrop"),
    optional_prefix="transformer.",
)
