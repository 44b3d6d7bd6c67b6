"""Sample number → row: the only thing a trainer asks of its data.

There is no state. Sample n belongs to epoch n div rows_per_epoch, where a keyed permutation of that epoch says which
row it is. Ranks, batches and threads are not known here.
"""

import json
import warnings
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import xxhash

from lmforge.data.order import Order, key, permutation
from lmforge.data.packing import Concat, Row
from lmforge.data.shards import TokenFolder
from lmforge.errors import Mistake

# Raised whenever the same plan would give other rows, so that a run is never resumed on other data unnoticed.
ALGORITHM = 1


class Packing(Protocol):
    """How rows are made of what is stored: how many there are, and each of them by its number."""

    @property
    def rows(self) -> int: ...

    def row(self, index: int) -> Row:
        """Row `index`. A row at or beyond `rows` is all padding."""


class Rows:
    """The rows of a packing: shuffled anew each epoch without end, or (`shuffle=False`) once, in order.

    Unshuffled rows end in rows that are all padding, so that an evaluation may ask for whole batches and every row still
    counts once.
    """

    def __init__(
        self, packing: Packing, *, name: str, where: str, plan: list[Any], length: int, seed: int = 0, shuffle: bool = True
    ):
        """`length` in tokens; `plan` says all that rows depend on, but for the seed; `name` keys the order."""
        if length < 1:
            raise ValueError(f"rows of {length} tokens")
        self.length = length
        self.where = where
        self._name = name
        self._seed = seed
        self._shuffle = shuffle
        self.packing = packing
        self._order = lru_cache(maxsize=2)(self._order_of_epoch)
        self.plan_hash = xxhash.xxh3_128_hexdigest(json.dumps([*plan, seed if shuffle else None]).encode())

    @property
    def rows_per_epoch(self) -> int:
        return self.packing.rows

    def row(self, n: int) -> Row:
        """Sample `n`: a pure function of (data, length, seed, n)."""
        return self.rows(n, n + 1)[0]

    def rows(self, start: int, stop: int) -> list[Row]:
        """Samples start … stop − 1. Mistake naming shard, offset and sample if one cannot be read."""
        rows = []
        for n, index in zip(range(start, stop), self.indices(start, stop), strict=True):
            try:
                rows.append(self.packing.row(int(index)))
            except Mistake as mistake:
                raise Mistake(f"sample {n}: {mistake}") from mistake
        return rows

    def indices(self, start: int, stop: int) -> np.ndarray:
        """Which row of the split each of the samples start … stop − 1 is, int64."""
        if not 0 <= start <= stop:
            raise ValueError(f"samples {start} to {stop}")
        samples = np.arange(start, stop)
        if not self._shuffle:
            return samples
        epochs, offsets = np.divmod(samples, self.rows_per_epoch)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            samples[here] = self._order(int(epoch))(offsets[here])
        return samples

    def _order_of_epoch(self, epoch: int) -> Order:
        return permutation(self.rows_per_epoch, key(self._seed, "source", self._name, epoch))


class Stream(Rows):
    """The rows of one split of a folder of token shards."""

    def __init__(self, folder: TokenFolder, *, split: str = "train", length: int, seed: int = 0, shuffle: bool = True):
        """`length` in tokens. Mistake if the folder has no such split."""
        tokens = folder.split(split)
        super().__init__(
            Concat(tokens, length),
            name=split,
            where=f"{folder.path}: {split}",
            plan=["concat", ALGORITHM, split, tokens.digest, length],
            length=length,
            seed=seed,
            shuffle=shuffle,
        )
        if shuffle and tokens.tokens <= length:
            warnings.warn(
                f"{self.where} holds {tokens.tokens} tokens, less than one row of {length}: "
                "every row is the same text and padding",
                stacklevel=2,
            )
