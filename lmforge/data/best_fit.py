"""Which examples share a row: best fit, the longest first (Ding et al., "Fewer Truncations", arXiv 2404.10830).

Whole examples only: none is cut, and what a row has left over is padding.
"""

import numpy as np


def best_fit(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Bins of `capacity` for things of these sizes (int [n], each from 1 to `capacity`), the fullest that has room first.

    Returns (things int64 [n] in the order of bins, starts int64 [bins + 1] of each bin among them). A function of its
    arguments only.
    """
    bins: list[list[int]] = []
    with_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    # Bit s is set where a bin has space s: the lowest bit from a size on is the best fit.
    spaces = 0
    for thing in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[thing])
        fitting = spaces >> size
        if fitting:
            space = size + (fitting & -fitting).bit_length() - 1
            number = with_space[space].pop()
            if not with_space[space]:
                spaces ^= 1 << space
            bins[number].append(thing)
        else:
            space, number = capacity, len(bins)
            bins.append([thing])
        left = space - size
        with_space[left].append(number)
        spaces |= 1 << left
    starts = np.concatenate(([0], np.cumsum([len(each) for each in bins]))).astype(np.int64)
    return np.array([thing for each in bins for thing in each], np.int64), starts
