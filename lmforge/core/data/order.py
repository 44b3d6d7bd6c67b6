"""The order of samples, a keyed permutation, and the keys of random draws within a batch: computed
from integers, no state.

A permutation of N items needs no memory that grows with N and can be evaluated at any position, so
a resumed run has nothing to restore. Numpy's generators are not used: their streams may change
between versions, and then a run could not be resumed.

What is drawn for a token is a function of (seed, sample number, column). It does not depend on
ranks, micro-batches, activation checkpointing or restarts. A sequence that comes again in another
epoch is another sample, with other draws.
"""

import json
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash

# Up to this size a Feistel network is measurably non-uniform, and a table with two bytes per entry
# is small.
MAX_TABLE_SIZE = 65_536
FEISTEL_ROUNDS = 6

UInt64Array = np.ndarray[Any, np.dtype[np.uint64]]
Permutation = Callable[[np.ndarray], np.ndarray]


def derive_key(*parts: int | str) -> int:
    """A 64-bit key for a purpose, as in `derive_key(seed, "source", name, epoch)`.

    Every distinct tuple gives an independent key; with `seed + epoch`, seed 1 epoch 0 would have
    the order of seed 0 epoch 1.
    """
    return xxhash.xxh3_64_intdigest(json.dumps(parts).encode())


def splitmix64(x: UInt64Array) -> UInt64Array:
    """Mix uint64 values: the SplitMix64 finaliser (Steele, Lea, Flood 2014), a bijection of 64-bit
    integers.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _random_uint64(key: int, start: int, stop: int) -> UInt64Array:
    """Values `start` … `stop` − 1 of a key.

    The key is hashed first, or adjacent keys would give the same values, shifted.
    """
    first: UInt64Array = np.full(1, key, np.uint64)
    numbers: UInt64Array = np.arange(start, stop, dtype=np.uint64)
    return splitmix64(splitmix64(first) + numbers)


def token_rng_keys(seed: int, start: int, stop: int, sequence_length: int) -> np.ndarray:
    """Keys of the tokens of samples `start` … `stop` − 1: int64 [samples, sequence_length], all
    bits random.
    """
    samples = _random_uint64(derive_key(seed, "noise"), start, stop)
    columns: UInt64Array = np.arange(sequence_length, dtype=np.uint64)
    return splitmix64(samples[:, None] + columns).view(np.int64)


def permutation(n: int, key: int) -> Permutation:
    """A bijection of 0..n-1 chosen by a 64-bit key, as a function from int64 positions to int64
    values.

    Positions must be within 0..n-1. n may be up to 2**62. Raises ValueError for other n.
    """
    if not 1 <= n <= 2**62:
        raise ValueError(f"a permutation of {n} items: expected 1 to 2**62")
    if n > MAX_TABLE_SIZE:
        return _feistel_permutation(n, key)
    # Of hashed positions.
    table = np.argsort(_random_uint64(key, 0, n), kind="stable").astype(np.uint16)
    return lambda positions: table[positions].astype(np.int64)


def windowed_permutation(n: int, key: int, *, chunk: int, window: int) -> Permutation:
    """A bijection of 0..n-1 as `permutation` gives one, whose neighbouring positions have values
    that are close together.

    The values are cut into chunks of `chunk`, and the chunks permuted. Each `window` of them that
    come after one another are permuted as a whole, so that `window` · `chunk` positions need only
    these. What is left over from whole chunks belongs to the last window. Where one window holds
    all, it is `permutation(n, key)` itself.
    """
    num_chunks = n // chunk
    if num_chunks <= window:
        return permutation(n, key)
    size = chunk * window
    last_window = -(-num_chunks // window) - 1
    chunk_order = permutation(num_chunks, derive_key(key, "chunks"))

    @lru_cache(maxsize=4)
    def within(number: int) -> Permutation:
        count = n - number * size if number == last_window else size
        return permutation(count, derive_key(key, "window", number))

    def permute(positions: np.ndarray) -> np.ndarray:
        values = np.empty_like(positions)
        windows = np.minimum(positions // size, last_window)
        for number in np.unique(windows).tolist():
            chosen = windows == number
            first = number * size
            values[chosen] = within(number)(positions[chosen] - first) + first
        in_full_chunks = values < num_chunks * chunk
        values[in_full_chunks] = (
            chunk_order(values[in_full_chunks] // chunk) * chunk + values[in_full_chunks] % chunk
        )
        return values

    return permute


def _feistel_permutation(n: int, key: int) -> Permutation:
    """A mixed-radix Feistel network on pairs (left < a, right < b) with ab ≥ n, with cycle walking
    back below n.

    After Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002). ab exceeds n by less
    than √n + 1, so a walk is almost never longer than one step.
    """
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    radix_a = np.uint64(a)
    radix_b = np.uint64(b)
    round_keys = _random_uint64(key, 0, 2 * FEISTEL_ROUNDS)

    def encipher(x: UInt64Array) -> UInt64Array:
        left = x // radix_b
        right = x % radix_b
        for even, odd in round_keys.reshape(-1, 2):
            left = (left + splitmix64(right + even) % radix_a) % radix_a
            right = (right + splitmix64(left + odd) % radix_b) % radix_b
        return left * radix_b + right

    def permute(positions: np.ndarray) -> np.ndarray:
        x = encipher(positions.astype(np.uint64))
        outside = np.flatnonzero(x >= n)
        while len(outside):
            walked = encipher(x[outside])
            x[outside] = walked
            outside = outside[walked >= n]
        return x.astype(np.int64)

    return permute
