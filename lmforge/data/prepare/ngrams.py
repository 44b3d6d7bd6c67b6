"""Hashes of runs of words, by which near duplicates and evaluation texts are recognised."""

import re

import numpy as np
import xxhash

WORD = re.compile(r"\w+")
# Odd, so that multiplying by it loses no bit (from splitmix64, Steele et al. 2014).
MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def word_hashes(text: str) -> np.ndarray:
    """A hash of each word of a text, uint64 [words], regardless of case and of what is between words."""
    return np.array([xxhash.xxh3_64_intdigest(word.encode()) for word in WORD.findall(text.lower())], np.uint64)


def ngram_hashes(words: np.ndarray, n: int) -> np.ndarray:
    """A hash of each run of `n` words, uint64 [words − n + 1]; none if there are fewer words."""
    count = max(0, len(words) - n + 1)
    hashes = np.zeros(count, np.uint64)
    for place in range(n if count else 0):
        hashes = mix(hashes) + words[place : place + count]
    return mix(hashes)


def mix(values: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit numbers in which each bit of a result depends on each bit of the value (splitmix64)."""
    values = values + np.uint64(MULTIPLIERS[0])
    values = (values ^ (values >> np.uint64(30))) * np.uint64(MULTIPLIERS[1])
    values = (values ^ (values >> np.uint64(27))) * np.uint64(MULTIPLIERS[2])
    return values ^ (values >> np.uint64(31))
