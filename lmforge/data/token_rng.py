"""The source of randomness within a batch: a key for each token, computed from integers; there is no state.

What is drawn for a token is a function of (seed, sample number, column). It does not depend on ranks, micro-batches, activation
checkpointing or restarts. A sequence that comes again in another epoch is another sample, with other draws.
"""

import numpy as np

from lmforge.data.order import derive_key, splitmix64


def token_rng_keys(seed: int, start: int, stop: int, sequence_length: int) -> np.ndarray:
    """Keys of the tokens of samples `start` … `stop` − 1: int64 [samples, sequence_length], all bits random."""
    samples = np.arange(start, stop, dtype=np.uint64)
    columns = np.arange(sequence_length, dtype=np.uint64)
    samples = splitmix64(splitmix64(np.full(1, derive_key(seed, "noise"), np.uint64)) + samples)
    return splitmix64(samples[:, None] + columns).view(np.int64)
