"""Which examples share a packed sequence: best fit, the longest first (Ding et al., "Fewer Truncations", arXiv 2404.10830).

No example is truncated; the rest of a sequence is padding.
"""

import numpy as np


def best_fit(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Put items of these sizes (int [n], each from 1 to `capacity`) into bins: each into the fullest bin with enough space.

    Returns (items int64 [n] in the order of bins, starts int64 [bins + 1] of each bin among them). Deterministic.
    """
    bins: list[list[int]] = []
    with_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    # Bit s is set if a bin has space s: the lowest set bit at or above a size is the best fit.
    spaces = 0
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        fitting = spaces >> size
        if fitting:
            space = size + (fitting & -fitting).bit_length() - 1
            number = with_space[space].pop()
            if not with_space[space]:
                spaces ^= 1 << space
            bins[number].append(item)
        else:
            space, number = capacity, len(bins)
            bins.append([item])
        left = space - size
        with_space[left].append(number)
        spaces |= 1 << left
    starts = np.concatenate(([0], np.cumsum([len(each) for each in bins]))).astype(np.int64)
    return np.array([item for each in bins for item in each], np.int64), starts
