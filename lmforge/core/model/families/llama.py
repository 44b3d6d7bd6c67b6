"""Llama 2 and 3, CodeLlama, SmolLM (arXiv 2302.13971)."""

from lmforge.core.model.family import ROTARY_FIELDS, Family, ForeignLayout

_TORCHTITAN = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_FMS = {
    "shared.emb": "model.embed_tokens",
    "embedding": "model.embed_tokens",
    "dec_norm": "model.norm",
    "shared.head": "lm_head",
    "head": "lm_head",
    "attn.query": "self_attn.q_proj",
    "attn.key": "self_attn.k_proj",
    "attn.value": "self_attn.v_proj",
    "attn.in_proj.query": "self_attn.q_proj",
    "attn.in_proj.key": "self_attn.k_proj",
    "attn.in_proj.value": "self_attn.v_proj",
    "attn.in_proj.qkv_fused": "self_attn.q_proj + self_attn.k_proj + self_attn.v_proj",
    "attn.dense": "self_attn.o_proj",
    "ff_sub_layer.wg": "mlp.gate_proj",
    "ff_sub_layer.w1": "mlp.up_proj",
    "ff_sub_layer.wg1_fused": "mlp.gate_proj + mlp.up_proj",
    "ff_sub_layer.w2": "mlp.down_proj",
    "ln": "input_layernorm",
    "ff_ln": "post_attention_layernorm",
}

FAMILY = Family(
    architecture="LlamaForCausalLM",
    classifier="LlamaForSequenceClassification",
    attention_biases=((False, False), (True, True)),
    mlp_biases=True,
    heads_divide_width=True,
    fields=(*ROTARY_FIELDS, "attention_bias", "mlp_bias"),
    defaults={"intermediate_size": 11008, "max_position_embeddings": 2048},
    foreign_layouts={
        "torchtitan": ForeignLayout("tok_embeddings.weight", _TORCHTITAN),
        "fms": ForeignLayout("layers.0.ff_sub_layer.w2.weight", _FMS),
    },
    foreign_fields=("num_attention_heads", "rope_theta", "rope_scaling", "rms_norm_eps", "max_position_embeddings"),
)
