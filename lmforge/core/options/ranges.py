"""How large each kind of number may be, in options and in model configs: larger than any machine
needs, but always bounded. An unbounded number could be a job that never ends, or a size that
overflows in a product. Each range is a dict of pydantic's bounds: `steps: int = option(1000, "…",
**COUNT)`. Whether sizes fit together into memory is checked later, by core/distributed/memory.py
and lab/plan/out_of_memory.py.
"""

from typing import Any

Range = dict[str, Any]

# Steps, examples, files: numbers that cost time but little memory.
COUNT: Range = {"gt": 0, "le": 10**9}
COUNT_OR_0: Range = {"ge": 0, "le": 10**9}
SEQUENCES: Range = {"gt": 0, "le": 2**24}  # in one batch, of all ranks
LENGTH: Range = {"gt": 0, "le": 2**26}  # tokens of a sequence
TOKENS: Range = {"gt": 0, "le": 2**36}  # of a batch, or of a file
BYTES: Range = {"gt": 0, "le": 2**40}
RANKS: Range = {"gt": 0, "le": 2**20}
THREADS: Range = {"gt": 0, "le": 2**12}  # of a process; worker processes of a machine
TOKEN_ID: Range = {"ge": 0, "lt": 2**24}
# Seeds of sequences, samples and steps are added to it, and torch takes 64 bits.
SEED: Range = {"ge": 0, "le": 2**62}

FRACTION: Range = {"ge": 0, "le": 1}
PROBABILITY: Range = {"ge": 0, "lt": 1}  # probabilities that must be below 1, such as dropout
NONZERO_FRACTION: Range = {"gt": 0, "le": 1}
# Learning rates, weights of losses, temperatures: what fp32 holds.
SCALE: Range = {"gt": 0, "le": 1e36}
SCALE_OR_0: Range = {"ge": 0, "le": 1e36}
RATIO: Range = {"gt": 0, "le": 1e6}  # tokens for each parameter; a model's constants
# Seconds, minutes, passes over the data; longer ones overflow timers.
DURATION: Range = {"gt": 0, "le": 1e6}

# A smaller one makes logits infinite.
REPETITION_PENALTY: Range = {"ge": 0.01, "le": 100}

# Fields of a model config, by their Hugging Face names.
MODEL_RANGES: dict[str, Range] = {
    "vocab_size": {"gt": 0, "le": 2**24},
    "hidden_size": {"gt": 0, "le": 2**20},
    "intermediate_size": {"gt": 0, "le": 2**22},
    "num_hidden_layers": {"gt": 0, "le": 2**12},
    "num_attention_heads": {"gt": 0, "le": 2**16},
    "num_key_value_heads": {"gt": 0, "le": 2**16},
    "head_dim": {"gt": 0, "le": 2**16},
    "max_position_embeddings": {"gt": 0, "le": 2**30},
    "sliding_window": {"gt": 0, "le": 2**30},
    "rope_theta": {"gt": 0, "le": 1e15},
    "rope_local_base_freq": {"gt": 0, "le": 1e15},
    "query_pre_attn_scalar": {"gt": 0, "le": 1e6},
    "rms_norm_eps": {"gt": 0, "le": 1.0},
    "layer_norm_epsilon": {"gt": 0, "le": 1.0},
    "initializer_range": {"gt": 0, "le": 1e3},
    "final_logit_softcapping": {"gt": 0, "le": 1e6},
    "num_experts": {"gt": 0, "le": 2**16},
    "num_experts_per_tok": {"gt": 0, "le": 2**16},
    "moe_intermediate_size": {"gt": 0, "le": 2**22},
    "shared_expert_intermediate_size": {"gt": 0, "le": 2**22},
    "router_aux_loss_coef": {"gt": 0, "le": 1e6},
    "decoder_sparse_step": {"gt": 0, "le": 2**12},
    "routed_scaling_factor": {"gt": 0, "le": 1e6},
    **dict.fromkeys(
        ("first_k_dense_replace", "n_shared_experts", "n_group", "topk_group"),
        Range(gt=0, le=2**12),
    ),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "moe_latent_size"), Range(gt=0, le=2**20)),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), Range(gt=0, le=2**16)),
    "partial_rotary_factor": {"gt": 0, "le": 1.0},
    **dict.fromkeys(
        (
            "linear_num_key_heads",
            "linear_num_value_heads",
            "linear_key_head_dim",
            "linear_value_head_dim",
        ),
        Range(gt=0, le=2**16),
    ),
    "linear_conv_kernel_dim": {"gt": 0, "le": 64},
}
# Fields of rope_scaling.
ROPE_SCALING_RANGES: dict[str, Range] = {
    "factor": {"gt": 0, "le": 1e6},
    "low_freq_factor": {"gt": 0, "le": 1e6},
    "high_freq_factor": {"gt": 0, "le": 1e6},
    "original_max_position_embeddings": MODEL_RANGES["max_position_embeddings"],
    **dict.fromkeys(
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
        Range(gt=0, le=1e6),
    ),
}
