"""What a forward pass leaves in memory for its backward pass, as arithmetic on a model config, without torch.

For both families, with blocks that are not compiled and weights in the compute dtype (fp32, or bf16 under FSDP). A compiler
fuses cheap operators and keeps less, so that for compiled blocks this is an upper bound. bench/activation_tracker.py measures
what this predicts.
"""

from itertools import pairwise

from lmforge.model.config import ModelConfig

RNG_KEY_BYTES = 8  # of a token's rng key
FP32_BYTES = 4  # norms, rotary angles, log-sum-exps and the head's gradient are in fp32, whatever the compute dtype


def activation_bytes(
    config: ModelConfig,
    batch_size: int,
    length: int,
    *,
    dtype_bytes: int,
    activation_checkpointing: str = "none",
    activation_checkpointing_every: int = 2,
    dense_mask: bool = True,
    stores_weights: bool = False,
    has_dropout: bool = False,
) -> int:
    """Bytes of one micro-batch's activations on a rank between its forward and its backward pass.

    Args:
        batch_size, length: of the rank's part of the micro-batch.
        dtype_bytes: of the compute dtype: 4 for fp32, 2 for bf16.
        activation_checkpointing, activation_checkpointing_every: the options of `[parallel]`.
        dense_mask: whether attention is given a mask of all scores, as on a CPU. What FlexAttention and variable-length flash
            attention take in its place is negligible.
        stores_weights: whether blocks keep the weights of attention, as compiled ones do in bf16 on a CPU.
        has_dropout: its masks are a byte a number; blocks that are recomputed hold the rng keys of the masks instead.

    While the backward pass recomputes a block, its `block_activation_bytes` are added. Raises ValueError for a wrapped model.
    """
    if config.family not in ("llama", "gpt2"):
        raise ValueError(f"no formula for the activations of {config.model_type}")
    tokens, width, layers = batch_size * length, config.hidden_size, config.num_hidden_layers
    stride = {"none": layers + 1, "selective-blocks": activation_checkpointing_every}.get(activation_checkpointing, 1)
    windows = config.layer_windows[stride - 1 :: stride]  # of the blocks that are recomputed
    recomputed, stored = len(windows), layers - len(windows)
    selects_ops = activation_checkpointing == "selective-ops"
    kept = _selective_ops_bytes(config, dtype_bytes) if selects_ops else dtype_bytes * width
    angles = FP32_BYTES * config.head_dim if config.family == "llama" else 0
    block = block_activation_bytes(
        config, batch_size, length, dtype_bytes=dtype_bytes, dense_mask=dense_mask, stores_weights=stores_weights
    )
    total = tokens * (recomputed * kept + angles) + stored * block
    # Instead of the last norm's output, the head keeps its gradient, and the gradient of its own weight.
    total += tokens * _norm_activation_bytes(config, dtype_bytes) + FP32_BYTES * config.vocab_size * width
    if has_dropout:
        total += tokens * (width + stored * 2 * width + recomputed * RNG_KEY_BYTES)
    if dense_mask:  # a byte a score, kept for the recomputation
        total += len(set(windows)) * tokens * length
    return total


def block_activation_bytes(
    config: ModelConfig,
    batch_size: int,
    length: int,
    *,
    dtype_bytes: int,
    dense_mask: bool = True,
    stores_weights: bool = False,
) -> int:
    """Bytes that a block leaves without checkpointing: two norms, attention, and the feed-forward's width four times (twice in
    GPT-2, which has no gate)."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    queries, keys = heads * config.head_dim, kv_heads * config.head_dim
    norms = 2 * _norm_activation_bytes(config, dtype_bytes)
    # Rotated queries, rotated keys, values; the output, and the log-sum-exp of each query.
    attention = dtype_bytes * (2 * queries + 2 * keys) + FP32_BYTES * heads
    if length > _query_chunk_length(length) and dense_mask:
        attention += dtype_bytes * queries  # the chunks, and their concatenation
    if config.qk_norm:
        attention += (FP32_BYTES + dtype_bytes) * (queries + keys) + FP32_BYTES * (heads + kv_heads)
    feed_forward = dtype_bytes * (4 if config.family == "llama" else 2) * config.intermediate_size
    scores = score_bytes(length, heads, dtype_bytes, dense_mask=dense_mask, stores_weights=stores_weights)
    return batch_size * (length * (norms + attention + feed_forward) + scores)


def score_bytes(length: int, heads: int, dtype_bytes: int, *, dense_mask: bool, stores_weights: bool) -> int:
    """Bytes a sequence that a block keeps of each score: of the mask, and of the weights of each head."""
    return num_mask_elements(length) * dtype_bytes * (dense_mask + (heads if stores_weights else 0))


def _norm_activation_bytes(config: ModelConfig, dtype_bytes: int) -> int:
    """Bytes a token of an RMSNorm: its input in fp32, the root, the normalized input, and the output; of a LayerNorm: input,
    mean, root and output."""
    width = config.hidden_size
    if config.family == "gpt2":
        return 2 * FP32_BYTES + 2 * dtype_bytes * width
    return FP32_BYTES * width + FP32_BYTES + 2 * dtype_bytes * width


def _selective_ops_bytes(config: ModelConfig, dtype_bytes: int) -> int:
    """Bytes a token of a block with selective-ops: its input, attention, and every second matrix product: of seven in Llama
    (queries, values, gate, down), of four in GPT-2 (queries, keys and values in one; up)."""
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    products = queries + keys + config.intermediate_size + config.hidden_size
    if config.family == "gpt2":
        products = 3 * queries + config.intermediate_size
    return dtype_bytes * (config.hidden_size + queries + products) + FP32_BYTES * config.num_attention_heads


def _query_chunk_length(length: int) -> int:
    """attention.attend computes long sequences in chunks of queries, each with the keys up to its own end."""
    return max(256, -(-length // 8))


def num_mask_elements(length: int) -> int:
    """How many scores of a sequence attention on a CPU computes, and the masks of all its chunks cover."""
    chunk = _query_chunk_length(length)
    ends = [min(start + chunk, length) for start in range(0, length, chunk)]
    return sum((end - start) * end for start, end in pairwise([0, *ends]))
