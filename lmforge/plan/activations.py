"""The bytes that a block and a norm save for their backward pass, computed from a model config, without torch.

For both families, with blocks that are not compiled and weights in the compute dtype (fp32, or bf16 under FSDP). A compiler
fuses cheap operators and keeps less: prediction/block.py. That of a whole model is the sum of what the operations of
prediction/program.py keep, which tests compare with what bench/activation_tracker.py measures.
"""

from itertools import pairwise

from lmforge.model.config import ModelConfig

RNG_KEY_BYTES = 8  # of a token's rng key
FP32_BYTES = 4  # norms, rotary angles, log-sum-exps and the head's gradient are in fp32, whatever the compute dtype


def has_formulas(config: ModelConfig) -> bool:
    """Whether the activations of a model can be counted: its norms are before attention and feed-forward."""
    return config.implementation == "lmforge" and config.family.attention_norms[1] is None


def block_activation_bytes(
    config: ModelConfig,
    batch_size: int,
    length: int,
    *,
    dtype_bytes: int,
    dense_mask: bool = True,
) -> int:
    """Bytes that a block saves without checkpointing: two norms, attention, and the feed-forward's width four times (twice in
    GPT-2, which has no gate)."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    queries, keys = heads * config.head_dim, kv_heads * config.head_dim
    norms = 2 * norm_activation_bytes(config, dtype_bytes)
    # Rotated queries, rotated keys, values; the output, and the log-sum-exp of each query.
    attention = dtype_bytes * (2 * queries + 2 * keys) + FP32_BYTES * heads
    if length > _query_chunk_length(length) and dense_mask:
        attention += dtype_bytes * queries  # the chunks, and their concatenation
    if config.qk_norm:
        attention += (FP32_BYTES + dtype_bytes) * (queries + keys) + FP32_BYTES * (heads + kv_heads)
    feed_forward = dtype_bytes * (2 if config.family.layer_norm else 4) * config.intermediate_size
    scores = score_bytes(length, heads, dtype_bytes, dense_mask=dense_mask, stores_weights=False)
    return batch_size * (length * (norms + attention + feed_forward) + scores)


def score_bytes(length: int, heads: int, dtype_bytes: int, *, dense_mask: bool, stores_weights: bool) -> int:
    """Bytes per attention score that a block saves for a sequence: for the mask, and for the weights of each head."""
    return num_mask_elements(length) * dtype_bytes * (dense_mask + (heads if stores_weights else 0))


def norm_activation_bytes(config: ModelConfig, dtype_bytes: int) -> int:
    """Bytes per token of an RMSNorm: its input in fp32, the root, the normalized input, and the output; of a LayerNorm: input,
    mean, root and output."""
    width = config.hidden_size
    if config.family.layer_norm:
        return 2 * FP32_BYTES + 2 * dtype_bytes * width
    return FP32_BYTES * width + FP32_BYTES + 2 * dtype_bytes * width


def _query_chunk_length(length: int) -> int:
    """attention.attend computes long sequences in chunks of queries, each with the keys up to its own end."""
    return max(256, -(-length // 8))


def num_mask_elements(length: int) -> int:
    """How many scores attention on a CPU computes for a sequence, which is also the size of the masks of all its chunks."""
    chunk = _query_chunk_length(length)
    ends = [min(start + chunk, length) for start in range(0, length, chunk)]
    return sum((end - start) * end for start, end in pairwise([0, *ends]))
