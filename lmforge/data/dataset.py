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

from lmforge.data.order import Permutation, derive_key, permutation
from lmforge.data.packing import ConcatPacking, PackedSequence
from lmforge.data.shards import TokenFolder
from lmforge.errors import UserError

# Raised whenever the same plan would give other rows, so that a run is never resumed on other data unnoticed.
PACKING_VERSION = 1


class Packing(Protocol):
    """How rows are made of what is stored: how many there are, and each of them by its number."""

    @property
    def num_sequences(self) -> int: ...

    def sequence(self, index: int) -> PackedSequence:
        """Row `index`. A row at or beyond `rows` is all padding."""


class PackedDataset:
    """The rows of a packing: shuffled anew each epoch without end, or (`shuffle=False`) once, in order.

    Unshuffled rows end in rows that are all padding, so that an evaluation may ask for whole batches and every row still
    counts once.
    """

    def __init__(
        self,
        packing: Packing,
        *,
        name: str,
        location: str,
        plan: list[Any],
        sequence_length: int,
        seed: int = 0,
        shuffle: bool = True,
    ):
        """`length` in tokens; `plan` says all that rows depend on, but for the seed; `name` keys the order."""
        if sequence_length < 1:
            raise ValueError(f"rows of {sequence_length} tokens")
        self.sequence_length = sequence_length
        self.location = location
        self._name = name
        self._seed = seed
        self._shuffle = shuffle
        self.packing = packing
        self._permutation = lru_cache(maxsize=2)(self._permutation_of_epoch)
        self.plan_hash = xxhash.xxh3_128_hexdigest(json.dumps([*plan, seed if shuffle else None]).encode())

    @property
    def sequences_per_epoch(self) -> int:
        return self.packing.num_sequences

    def sequence(self, n: int) -> PackedSequence:
        """Sample `n`: a pure function of (data, length, seed, n)."""
        return self.sequences(n, n + 1)[0]

    def sequences(self, start: int, stop: int) -> list[PackedSequence]:
        """Samples start … stop − 1. UserError naming shard, offset and sample if one cannot be read."""
        rows = []
        for n, index in zip(range(start, stop), self.indices(start, stop), strict=True):
            try:
                rows.append(self.packing.sequence(int(index)))
            except UserError as mistake:
                raise UserError(f"sample {n}: {mistake}") from mistake
        return rows

    def indices(self, start: int, stop: int) -> np.ndarray:
        """Which row of the split each of the samples start … stop − 1 is, int64."""
        if not 0 <= start <= stop:
            raise ValueError(f"samples {start} to {stop}")
        samples = np.arange(start, stop)
        if not self._shuffle:
            return samples
        epochs, offsets = np.divmod(samples, self.sequences_per_epoch)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            samples[here] = self._permutation(int(epoch))(offsets[here])
        return samples

    def _permutation_of_epoch(self, epoch: int) -> Permutation:
        return permutation(self.sequences_per_epoch, derive_key(self._seed, "source", self._name, epoch))


class TokenDataset(PackedDataset):
    """The rows of one split of a folder of token shards."""

    def __init__(self, folder: TokenFolder, *, split: str = "train", sequence_length: int, seed: int = 0, shuffle: bool = True):
        """`length` in tokens. UserError if the folder has no such split."""
        tokens = folder.split(split)
        super().__init__(
            ConcatPacking(tokens, sequence_length),
            name=split,
            location=f"{folder.path}: {split}",
            plan=["concat", PACKING_VERSION, split, tokens.digest, sequence_length],
            sequence_length=sequence_length,
            seed=seed,
            shuffle=shuffle,
        )
        if shuffle and tokens.num_tokens <= sequence_length:
            warnings.warn(
                f"{self.location} holds {tokens.num_tokens} tokens, less than one row of {sequence_length}: "
                "every row is the same text and padding",
                stacklevel=2,
            )
