"""Hashes of runs of words, by which near duplicates and evaluation texts are recognised."""

import re

import numpy as np
import xxhash

from lmforge.core.data.order import splitmix64

WORD = re.compile(r"\w+")
# The step of splitmix64 (Steele et al. 2014), without which 0 would be mixed to 0.
COUNTER_STEP = np.uint64(0x9E3779B97F4A7C15)


def word_hashes(text: str) -> np.ndarray:
    """A hash of each word of a text, uint64 [words].

    Case, and what is between words, make no difference.
    """
    words = WORD.findall(text.lower())
    return np.array([xxhash.xxh3_64_intdigest(word.encode()) for word in words], np.uint64)


def ngram_hashes(words: np.ndarray, n: int) -> np.ndarray:
    """A hash of each run of `n` words, uint64 [words − n + 1]; none if there are fewer words."""
    count = max(0, len(words) - n + 1)
    hashes = np.zeros(count, np.uint64)
    for place in range(n):
        hashes = mix(hashes) + words[place : place + count]
    return mix(hashes)


def mix(values: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit numbers (splitmix64).

    Each bit of a result depends on each bit of the value.
    """
    return splitmix64(values + COUNTER_STEP)
