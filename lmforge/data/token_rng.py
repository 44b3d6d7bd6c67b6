"""Where the randomness within a batch comes from: a key for each token, computed from integers and remembered nowhere.

What is drawn for a token is a function of (seed, sample number, column), so that it does not depend on ranks, micro-batches,
recomputation or restarts, and a row that comes again in another epoch, as another sample, is drawn for anew.
"""

import numpy as np

from lmforge.data.order import derive_key, splitmix64


def token_rng_keys(seed: int, start: int, stop: int, sequence_length: int) -> np.ndarray:
    """Keys of the tokens of samples `first` … `last` − 1, rows of `length`: int64 [samples, length], all bits random."""
    samples = np.arange(start, stop, dtype=np.uint64)
    columns = np.arange(sequence_length, dtype=np.uint64)
    rows = splitmix64(splitmix64(np.full(1, derive_key(seed, "noise"), np.uint64)) + samples)
    return splitmix64(rows[:, None] + columns).view(np.int64)
