"""Conventions for labels: which value is not scored, and how many labels are scored at a time.

No torch.
"""

# torch's default: a label of this value does not contribute to a loss.
IGNORE_INDEX = -100
# Logits are computed for this many tokens at a time: [CHUNK_TOKENS, vocab_size] is the largest
# array of a loss.
CHUNK_TOKENS = 2048
# A CPU reads the logits of a chunk several times, which is a third faster if they stay in its cache
# (measured with 4,096 ids). With fewer tokens per chunk than this, the gradient of the head's
# weight would be accumulated too often.
CACHED_LOGITS_BYTES = 2**23
MIN_CACHED_TOKENS = 256
# The memory limit for a chunk's logits in compiled passes, which keep nothing else of that size.
# Larger chunks read the head's weight less often.
FUSED_LOGITS_BYTES = 2**30


def loss_chunk_tokens(vocab_size: int, hidden_bytes: int, *, on_gpu: bool, fused: bool) -> int:
    """How many tokens a loss scores at a time.

    Args:
        vocab_size: of this rank's part of the head.
        hidden_bytes: of a number of the hidden states. Fused passes keep logits in their dtype, all
        others in fp32 at least.
        fused: whether compiled passes score the chunk.
    """
    if fused:
        return max(1, FUSED_LOGITS_BYTES // (vocab_size * hidden_bytes))
    cached = CACHED_LOGITS_BYTES // (vocab_size * max(4, hidden_bytes))
    return min(cached, CHUNK_TOKENS) if cached >= MIN_CACHED_TOKENS and not on_gpu else CHUNK_TOKENS


def stores_exponentials(softcap: float | None, vocab_ranks: int) -> bool:
    """Whether a compiled loss on a CPU keeps the exponentials of a chunk: of all logits, which are
    not capped.
    """
    return softcap is None and vocab_ranks == 1
