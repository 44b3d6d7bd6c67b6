"""What a forward pass leaves in memory for its backward pass, as arithmetic on a shape, without torch.

Of both families, in blocks that are not compiled and weights that are in the compute dtype (fp32, or bf16 under FSDP).
A compiler that fuses what is cheap keeps less, so that for compiled blocks this is what they hold at most. What it predicts
is measured by bench/activation_tracker.py.
"""

from lmforge.model.config import ModelConfig

RNG_KEY_BYTES = 8  # bytes of a token's key
FP32_BYTES = 4  # norms, angles, logarithms of sums and the head's gradient are in fp32 whatever is computed in


def activation_bytes(
    config: ModelConfig,
    batch_size: int,
    sequence_length: int,
    *,
    dtype_bytes: int,
    activation_checkpointing: str = "none",
    activation_checkpointing_every: int = 2,
    dense_mask: bool = True,
    has_dropout: bool = False,
) -> int:
    """Bytes of one micro-batch's activations on a rank between its forward and its backward pass.

    Args:
        rows, length: of the micro-batch; the rank's part of it, where rows or lengths are shared out.
        number_bytes: of the compute dtype: 4 for fp32, 2 for bf16.
        recompute, every: as in `parallel.activation_checkpointing` and `parallel.activation_checkpointing_every`.
        dense_mask: attention is given a mask of all scores, as on a CPU; FlexAttention's blocks weigh next to nothing.
        dropout: whether there is any: its masks are a byte a number, and what is recomputed holds the keys they are made of.

    While the backward pass recomputes, one block's `block_bytes` come on top. Raises ValueError for a wrapped model.
    """
    if config.family not in ("llama", "gpt2"):
        raise ValueError(f"no formula for the activations of {config.model_type}")
    tokens, width, layers = batch_size * sequence_length, config.hidden_size, config.num_hidden_layers
    stride = {"none": layers + 1, "selective-blocks": activation_checkpointing_every}.get(activation_checkpointing, 1)
    windows_again = config.layer_windows[stride - 1 :: stride]
    again = len(windows_again)
    of_again = _selective_ops_bytes(config, dtype_bytes) if activation_checkpointing == "selective-ops" else dtype_bytes * width
    angles = FP32_BYTES * config.head_dim if config.family == "llama" else 0
    total = tokens * (again * of_again + angles)
    total += (layers - again) * block_activation_bytes(
        config, batch_size, sequence_length, dtype_bytes=dtype_bytes, dense_mask=dense_mask
    )
    # In place of the last norm's output the head leaves the gradient of it, and its own weight's.
    total += tokens * _norm_activation_bytes(config, dtype_bytes) + FP32_BYTES * config.vocab_size * width
    if has_dropout:
        total += tokens * (width + (layers - again) * 2 * width + again * RNG_KEY_BYTES)
    if dense_mask:  # a byte a score, held to recompute with
        total += len(set(windows_again)) * tokens * sequence_length
    return total


def block_activation_bytes(
    config: ModelConfig, batch_size: int, sequence_length: int, *, dtype_bytes: int, dense_mask: bool = True
) -> int:
    """Bytes that a block leaves which is not recomputed: two norms, attention, and the feed-forward's width four times, or
    twice in GPT-2's, which has no gate."""
    heads, kept = config.num_attention_heads, config.num_key_value_heads
    queries, keys = heads * config.head_dim, kept * config.head_dim
    norms = 2 * _norm_activation_bytes(config, dtype_bytes)
    # Turned queries, turned keys, values; what comes out, and the logarithm of each query's sum.
    attention = dtype_bytes * (2 * queries + 2 * keys) + FP32_BYTES * heads
    if _num_query_chunks(sequence_length) > 1 and dense_mask:
        attention += dtype_bytes * queries  # the pieces, and what they are put together to
    if config.qk_norm:
        attention += (FP32_BYTES + dtype_bytes) * (queries + keys) + FP32_BYTES * (heads + kept)
    feed_forward = dtype_bytes * (4 if config.family == "llama" else 2) * config.intermediate_size
    scores = batch_size * _num_mask_elements(sequence_length) * dtype_bytes if dense_mask else 0
    return batch_size * sequence_length * (norms + attention + feed_forward) + scores


def _norm_activation_bytes(config: ModelConfig, dtype_bytes: int) -> int:
    """A token's bytes of an RMSNorm: its input in fp32, the root, the normed, and the output; of a LayerNorm input, mean,
    root and output."""
    width = config.hidden_size
    if config.family == "gpt2":
        return 2 * FP32_BYTES + 2 * dtype_bytes * width
    return FP32_BYTES * width + FP32_BYTES + 2 * dtype_bytes * width


def _selective_ops_bytes(config: ModelConfig, dtype_bytes: int) -> int:
    """A token's bytes of a block whose dear operators are kept: its input, attention, and every second product of seven
    (queries, values, gate, and what comes down), or of GPT-2's four (queries, keys and values in one, and what goes up)."""
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    products = queries + keys + config.intermediate_size + config.hidden_size
    if config.family == "gpt2":
        products = 3 * queries + config.intermediate_size
    return dtype_bytes * (config.hidden_size + queries + products) + FP32_BYTES * config.num_attention_heads


def _query_chunk_length(sequence_length: int) -> int:
    """attention.attend goes through long rows in pieces, each with the keys up to its own end."""
    return max(256, -(-sequence_length // 8))


def _num_query_chunks(sequence_length: int) -> int:
    return -(-sequence_length // _query_chunk_length(sequence_length))


def _num_mask_elements(sequence_length: int) -> int:
    """How many scores of a row the masks of all pieces cover."""
    piece = _query_chunk_length(sequence_length)
    ends = [min(start + piece, sequence_length) for start in range(0, sequence_length, piece)]
    return sum((end - start) * end for start, end in zip(range(0, sequence_length, piece), ends, strict=True))
