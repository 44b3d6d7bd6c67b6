"""Sample number → packed sequence: all that a trainer needs of its data.

There is no state. Sample n belongs to epoch n div sequences_per_epoch, and a keyed permutation of that epoch gives the index of
its sequence. Ranks, batches and threads are not known here: which samples are in a batch is decided in loader.py.
"""

import json
import warnings
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import xxhash

from lmforge.data.order import Permutation, derive_key, permutation
from lmforge.data.packing import ConcatPacking, PackedSequence
from lmforge.data.shards import TokenFolder
from lmforge.errors import UserError, prefix_errors

# Raised whenever the same plan would give other sequences, so that a run is never resumed on other data unnoticed.
PACKING_VERSION = 1


class Packing(Protocol):
    """How stored tokens become packed sequences: how many there are, and each of them by its index."""

    @property
    def num_sequences(self) -> int: ...

    def sequence(self, index: int) -> PackedSequence:
        """Sequence `index`; all padding at or beyond `num_sequences`."""


@dataclass(eq=False)
class PackedDataset:
    """The sequences of a packing: shuffled anew each epoch without end, or (`shuffle=False`) once, in order.

    Without shuffling, sequences beyond the last are all padding, so an evaluation can read full batches and still count every
    sequence once. `plan` lists all that sequences depend on, except the seed; `name` keys the order.
    """

    packing: Packing
    _: KW_ONLY
    name: str
    location: str
    plan: list[Any]
    sequence_length: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.sequence_length < 1:
            raise ValueError(f"sequences of {self.sequence_length} tokens")
        self._permutation = lru_cache(maxsize=2)(self._permutation_of_epoch)
        plan = [*self.plan, self.seed if self.shuffle else None]
        self.plan_hash = xxhash.xxh3_128_hexdigest(json.dumps(plan).encode())

    @property
    def sequences_per_epoch(self) -> int:
        return self.packing.num_sequences

    def sequence(self, n: int) -> PackedSequence:
        """Sample `n`: a pure function of (data, sequence_length, seed, n)."""
        return self.sequences(n, n + 1)[0]

    def sequences(self, start: int, stop: int) -> list[PackedSequence]:
        """Samples start … stop − 1. Raises UserError naming shard, offset and sample if one cannot be read."""
        sequences = []
        for n, index in zip(range(start, stop), self.indices(start, stop), strict=True):
            with prefix_errors(f"sample {n}"):
                sequences.append(self.packing.sequence(int(index)))
        return sequences

    def indices(self, start: int, stop: int) -> np.ndarray:
        """The index in the packing of each of the samples start … stop − 1, int64."""
        if not 0 <= start <= stop:
            raise ValueError(f"samples {start} to {stop}")
        samples = np.arange(start, stop)
        if not self.shuffle:
            return samples
        epochs, offsets = np.divmod(samples, self.sequences_per_epoch)
        for epoch in np.unique(epochs):
            of_epoch = epochs == epoch
            samples[of_epoch] = self._permutation(int(epoch))(offsets[of_epoch])
        return samples

    def _permutation_of_epoch(self, epoch: int) -> Permutation:
        return permutation(self.sequences_per_epoch, derive_key(self.seed, "source", self.name, epoch))


class TokenDataset(PackedDataset):
    """The packed sequences of one split of a folder of token shards."""

    def __init__(self, folder: TokenFolder, *, split: str = "train", sequence_length: int, seed: int = 0, shuffle: bool = True):
        """Raises UserError if the folder has no such split, or it has too few tokens to train on."""
        tokens = folder.split(split)
        if shuffle and tokens.num_tokens < 2:
            raise UserError(f"{folder.path}: {split}: one token, and none to predict from it; prepare more text")
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
                f"{self.location} holds {tokens.num_tokens} tokens, less than one sequence of {sequence_length}: "
                "every sequence is the same text and padding",
                stacklevel=2,
            )
