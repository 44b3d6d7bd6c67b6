"""What a forward pass leaves in memory for its backward pass, as arithmetic on a shape, without torch.

Of both families, in blocks that are not compiled and weights that are in the compute dtype (fp32, or bf16 under FSDP).
A compiler that fuses what is cheap keeps less, so that for compiled blocks this is what they hold at most. What it predicts
is measured by train/memory.py.
"""

from lmforge.model.shapes import ModelConfig

KEY = 8  # bytes of a token's key
WIDE = 4  # norms, angles, logarithms of sums and the head's gradient are in fp32 whatever is computed in


def saved_bytes(
    config: ModelConfig,
    rows: int,
    length: int,
    *,
    number_bytes: int,
    recompute: str = "none",
    every: int = 2,
    dense_mask: bool = True,
    dropout: bool = False,
) -> int:
    """Bytes of one micro-batch's activations on a rank between its forward and its backward pass.

    Args:
        rows, length: of the micro-batch; the rank's part of it, where rows or lengths are shared out.
        number_bytes: of the compute dtype: 4 for fp32, 2 for bf16.
        recompute, every: as in `parallel.recompute` and `parallel.recompute_every`.
        dense_mask: attention is given a mask of all scores, as on a CPU; FlexAttention's blocks weigh next to nothing.
        dropout: whether there is any: its masks are a byte a number, and what is recomputed holds the keys they are made of.

    While the backward pass recomputes, one block's `block_bytes` come on top. Raises ValueError for a wrapped model.
    """
    if config.family not in ("llama", "gpt2"):
        raise ValueError(f"no formula for the activations of {config.model_type}")
    tokens, width, layers = rows * length, config.hidden_size, config.num_hidden_layers
    stride = {"none": layers + 1, "blocks": every}.get(recompute, 1)
    windows_again = config.windows[stride - 1 :: stride]
    again = len(windows_again)
    of_again = _kept_bytes(config, number_bytes) if recompute == "operators" else number_bytes * width
    angles = WIDE * config.head_dim if config.family == "llama" else 0
    total = tokens * (again * of_again + angles)
    total += (layers - again) * block_bytes(config, rows, length, number_bytes=number_bytes, dense_mask=dense_mask)
    # In place of the last norm's output the head leaves the gradient of it, and its own weight's.
    total += tokens * _norm_bytes(config, number_bytes) + WIDE * config.vocab_size * width
    if dropout:
        total += tokens * (width + (layers - again) * 2 * width + again * KEY)
    if dense_mask:  # a byte a score, held to recompute with
        total += len(set(windows_again)) * tokens * length
    return total


def block_bytes(config: ModelConfig, rows: int, length: int, *, number_bytes: int, dense_mask: bool = True) -> int:
    """Bytes that a block leaves which is not recomputed: two norms, attention, and the feed-forward's width four times, or
    twice in GPT-2's, which has no gate."""
    heads, kept = config.num_attention_heads, config.num_key_value_heads
    queries, keys = heads * config.head_dim, kept * config.head_dim
    norms = 2 * _norm_bytes(config, number_bytes)
    # Turned queries, turned keys, values; what comes out, and the logarithm of each query's sum.
    attention = number_bytes * (2 * queries + 2 * keys) + WIDE * heads
    if _pieces(length) > 1 and dense_mask:
        attention += number_bytes * queries  # the pieces, and what they are put together to
    if config.qk_norm:
        attention += (WIDE + number_bytes) * (queries + keys) + WIDE * (heads + kept)
    feed_forward = number_bytes * (4 if config.family == "llama" else 2) * config.intermediate_size
    scores = rows * _scores(length) * number_bytes if dense_mask else 0
    return rows * length * (norms + attention + feed_forward) + scores


def _norm_bytes(config: ModelConfig, number_bytes: int) -> int:
    """A token's bytes of an RMSNorm: its input in fp32, the root, the normed, and the output; of a LayerNorm input, mean,
    root and output."""
    width = config.hidden_size
    if config.family == "gpt2":
        return 2 * WIDE + 2 * number_bytes * width
    return WIDE * width + WIDE + 2 * number_bytes * width


def _kept_bytes(config: ModelConfig, number_bytes: int) -> int:
    """A token's bytes of a block whose dear operators are kept: its input, attention, and every second product of seven
    (queries, values, gate, and what comes down), or of GPT-2's four (queries, keys and values in one, and what goes up)."""
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    products = queries + keys + config.intermediate_size + config.hidden_size
    if config.family == "gpt2":
        products = 3 * queries + config.intermediate_size
    return number_bytes * (config.hidden_size + queries + products) + WIDE * config.num_attention_heads


def _piece(length: int) -> int:
    """attention.attend goes through long rows in pieces, each with the keys up to its own end."""
    return max(256, -(-length // 8))


def _pieces(length: int) -> int:
    return -(-length // _piece(length))


def _scores(length: int) -> int:
    """How many scores of a row the masks of all pieces cover."""
    piece = _piece(length)
    ends = [min(start + piece, length) for start in range(0, length, piece)]
    return sum((end - start) * end for start, end in zip(range(0, length, piece), ends, strict=True))
