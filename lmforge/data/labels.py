"""What the whole project agrees on about labels: which value is not scored, and how many are scored at a time. No torch."""

# torch's own default: a label of this value adds nothing to a loss.
IGNORE_INDEX = -100
# Logits are computed for this many tokens at a time: [CHUNK_TOKENS, vocab_size] is the largest array of a loss.
CHUNK_TOKENS = 2048
