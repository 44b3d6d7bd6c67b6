"""Finds documents that are copies of others, exactly or nearly.

The first in the order of the source is kept, whichever process read it.

Near duplicates are found by MinHash and locality-sensitive hashing (Broder 1997; Lee et al. 2022,
arXiv 2107.06499) with the settings of FineWeb (arXiv 2406.17557): runs of 5 words, 14 bands of 8
hashes. Two documents that share a fraction s of their runs are found with probability 1 − (1 −
s⁸)¹⁴: 0.92 at s = 0.8, 0.77 at 0.75, 0.05 at 0.5. What is near to something that is near is one
group.
"""

from collections.abc import Callable

import numpy as np

from lmforge.text.prepare.ngrams import mix, ngram_hashes, word_hashes

SHINGLE_WORDS = 5
BANDS = 14
HASHES_PER_BAND = 8
# Runs of words whose hashes are compared at once: 112 × 8 bytes each.
CHUNK_SHINGLES = 4096
_KEYS = mix(np.arange(BANDS * HASHES_PER_BAND, dtype=np.uint64))


def near_duplicate_keys(text: str, digest: int) -> np.ndarray:
    """A key for each band, uint64 [BANDS]; documents that share one of them are near duplicates.

    `digest` is the hash of the text, which stands for a document without words.
    """
    words = word_hashes(text)
    if len(words):
        shingles = ngram_hashes(words, min(SHINGLE_WORDS, len(words)))
    else:
        shingles = np.array([digest], np.uint64)
    least = np.full(len(_KEYS), np.iinfo(np.uint64).max)
    for start in range(0, len(shingles), CHUNK_SHINGLES):
        hashes = mix(shingles[start : start + CHUNK_SHINGLES, None] ^ _KEYS)
        least = np.minimum(least, hashes.min(axis=0))
    keys = np.zeros(BANDS, np.uint64)
    for column in least.reshape(BANDS, HASHES_PER_BAND).T:
        keys = mix(keys) + column
    return keys


def exact_duplicates(*columns: np.ndarray) -> np.ndarray:
    """A mask bool [documents] of those that have the values of an earlier one in all columns.

    The columns have equal lengths.
    """
    order = np.lexsort(columns[::-1])  # stable: of equal documents the first comes first
    repeats = np.ones(len(order), bool)
    repeats[:1] = False
    for column in columns:
        repeats[1:] &= column[order][1:] == column[order][:-1]
    duplicates = np.zeros(len(order), bool)
    duplicates[order] = repeats
    return duplicates


def near_duplicates(num_documents: int, load_band: Callable[[int], np.ndarray]) -> np.ndarray:
    """A mask bool [documents] of those that are in one group with an earlier one.

    load_band(band) gives that key of each document, uint64 [documents]. At any time one band is in
    memory: about 50 bytes a document together with what is computed from it.
    """
    groups = np.arange(num_documents)
    for band in range(BANDS):
        keys = load_band(band)
        order = np.argsort(keys, kind="stable")
        equal = np.flatnonzero(keys[order[1:]] == keys[order[:-1]])
        groups = _join(groups, order[equal], order[equal + 1])
    return groups != np.arange(num_documents)


def _join(groups: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The groups after those of first[i] and second[i] were joined for each i.

    A group is named by its first document.
    """
    while True:
        least = np.minimum(groups[first], groups[second])
        most = np.maximum(groups[first], groups[second])
        if (least == most).all():
            return groups
        np.minimum.at(groups, most, least)
        while (groups != (nearer := groups[groups])).any():
            groups = nearer
