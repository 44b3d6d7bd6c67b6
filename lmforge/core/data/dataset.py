"""Sample number → packed sequence, without state.

Sample n belongs to epoch n div sequences_per_epoch, and a keyed permutation of that epoch gives the
index of its sequence. This module does not depend on ranks, batches or threads: loader.py decides
which samples are in a batch. A mixture of several such datasets is in mixture.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np

from lmforge.core import registry
from lmforge.core.data.order import (
    Permutation,
    derive_key,
    permutation,
    windowed_permutation,
)
from lmforge.core.data.packing import (
    ConcatPacking,
    Extra,
    MapRows,
    PackedSequence,
    PackedSequences,
    Packing,
)
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.errors import UserError
from lmforge.core.files.checksums import hash_json
from lmforge.core.records.manifests import DataPlan

# Incremented whenever the same plan would give other sequences, so that a run is never silently
# resumed on other data.
PACKING_VERSION = 2
# A piece of a remote shard (remote_storage.py) at two bytes per token.
CHUNK_TOKENS = 2**21
TokenPacking = Literal["concat", "best-fit"]


@dataclass(eq=False)
class PackedDataset:
    """The sequences of a packing: reshuffled each epoch without end, or (`shuffle=False`) once, in
    order.

    Without shuffling, sequences beyond the last are all padding, so an evaluation can read full
    batches and still count every sequence once. `plan` lists all that sequences depend on, except
    the seed; `name` keys the order: of stored tokens it is their digest, so that the order does not
    depend on where they lie. What is in quarantine is no part of the plan: a run may be resumed
    with another one.
    """

    packing: Packing
    _: KW_ONLY
    name: str
    location: str
    plan: list[Any]
    sequence_length: int
    seed: int = 0
    shuffle: bool = True
    # (sequences of a chunk, chunks that are shuffled together); None: all.
    window: tuple[int, int] | None = None
    read_threads: int = 1  # how many sequences to read at once: several for remote shards
    source_names: tuple[str, ...] = ()  # where it is joined of several sources

    def __post_init__(self) -> None:
        if self.sequence_length < 1:
            raise ValueError(f"sequences of {self.sequence_length} tokens")
        self._permutation = lru_cache(maxsize=2)(self._permutation_of_epoch)
        self.plan_hash = hash_json(self.plan_at(0)["dataset"])

    @property
    def sequences_per_epoch(self) -> int:
        return self.packing.num_sequences

    def plan_at(self, n: int) -> DataPlan:
        """What samples before n depend on, as JSON; here the same for every n. See MixedDataset."""
        return {
            "dataset": [
                *self.plan,
                self.seed if self.shuffle else None,
                *(self.window or ()),
            ]
        }

    def plan_hash_at(self, n: int) -> str:
        """A hash of `plan_at(n)`."""
        return self.plan_hash

    def describe_sample(self, n: int) -> str:
        """Where sample n is from, for people."""
        return f"sequence {self.indices(n, n + 1)[0]}"

    def tokens_until(self, n: int) -> int:
        """The tokens in the samples before n, padding included."""
        return n * self.sequence_length

    def sequence(self, n: int) -> PackedSequence:
        """Sample `n`: a pure function of (data, sequence_length, seed, n)."""
        return self.read([n])[0]

    def sequences(
        self, start: int, stop: int, *, padding: int = 0, map_rows: MapRows = map
    ) -> PackedSequences:
        """Samples start … stop − 1. See `read`."""
        return self.read(range(start, stop), padding=padding, map_rows=map_rows)

    def read(
        self, samples: Sequence[int], *, padding: int = 0, map_rows: MapRows = map
    ) -> PackedSequences:
        """These samples, followed by this many rows of padding.

        Raises UserError naming shard, offset and sample that cannot be read.

        `map_rows` may read rows in several threads.
        """
        count = len(samples) + padding
        with_sources = bool(self.source_names)
        out = PackedSequences.empty(
            count, self.sequence_length, self.packing.extras, with_sources=with_sources
        )
        out.fill(
            samples,
            [(self.packing, n) for n in self.indices_of(np.asarray(samples, np.int64)).tolist()],
            map_rows,
        )
        return out

    def indices(self, start: int, stop: int) -> np.ndarray:
        """The index in the packing of each of the samples start … stop − 1, int64."""
        if not 0 <= start <= stop:
            raise ValueError(f"samples {start} to {stop}")
        return self.indices_of(np.arange(start, stop))

    def indices_of(self, samples: np.ndarray) -> np.ndarray:
        """The index in the packing of each of these samples, int64 in and out, in any order."""
        if not self.shuffle:
            return samples
        indices = np.empty_like(samples)
        epochs, offsets = np.divmod(samples, self.sequences_per_epoch)
        for epoch in np.unique(epochs):
            of_epoch = epochs == epoch
            indices[of_epoch] = self._permutation(int(epoch))(offsets[of_epoch])
        return indices

    def _permutation_of_epoch(self, epoch: int) -> Permutation:
        count = self.sequences_per_epoch
        key = derive_key(self.seed, "source", self.name, epoch)
        if self.window is None:
            return permutation(count, key)
        chunk, window = self.window
        return windowed_permutation(count, key, chunk=chunk, window=window)

    @property
    def order_plan(self) -> list[int]:
        """What the order depends on besides seed and name, for the plan of a mixture."""
        return [*(self.window or ())]


class TokenDataset(PackedDataset):
    """The packed sequences of one split of a token folder."""

    def __init__(
        self,
        folder: TokenFolder,
        *,
        split: str = "train",
        sequence_length: int,
        seed: int = 0,
        shuffle: bool = True,
        window: int | None = None,
        packing: TokenPacking = "concat",
    ):
        """Shuffled within each `window` chunks of CHUNK_TOKENS tokens (of best fit: of about a
        group), by default over all.

        Raises UserError if the folder has no such split, or it has too few tokens to train on, or
        (best fit) no index for this length; only the training split has one.
        """
        pack = registry.get("packing", packing).load()
        packed, version, chunk = pack(folder, split, sequence_length)
        tokens = folder.split(split)
        if shuffle and not packed.num_sequences:
            raise UserError(
                f"{folder.path}: {split}: no token to predict from another; prepare more text"
            )
        super().__init__(
            packed,
            name=tokens.digest,
            location=f"{folder.path}: {split}",
            plan=[packing, version, split, tokens.digest, sequence_length],
            sequence_length=sequence_length,
            seed=seed,
            shuffle=shuffle,
            window=None if window is None else (chunk, window),
            read_threads=folder.storage.read_threads,
        )


def pack_concat(folder: TokenFolder, split: str, sequence_length: int) -> tuple[Packing, int, int]:
    """The tokens of a split one after another; the version of this packing; and the sequences of a
    chunk.
    """
    tokens = folder.split(split)
    packed = ConcatPacking(tokens, sequence_length, tokens.quarantined.overlap)
    return packed, PACKING_VERSION, max(1, CHUNK_TOKENS // sequence_length)


@dataclass(frozen=True)
class JoinedPacking(Packing):
    """The sequences of several packings, one packing after another."""

    packings: Sequence[Packing]

    @cached_property
    def _bounds(self) -> np.ndarray:
        return np.cumsum([0, *(packing.num_sequences for packing in self.packings)])

    @property
    def num_sequences(self) -> int:
        return int(self._bounds[-1])

    @property
    def extras(self) -> Sequence[Extra]:
        return sorted({extra for packing in self.packings for extra in packing.extras}, key=str)

    def read(self, index: int, out: PackedSequence) -> None:
        assert out.source_ids is not None
        at = min(int(np.searchsorted(self._bounds, index, "right")), len(self.packings)) - 1
        out.source_ids[:] = at
        self.packings[at].read(index - int(self._bounds[at]), out)


def join_datasets(datasets: Mapping[str, PackedDataset]) -> PackedDataset:
    """One unshuffled dataset of several of one sequence length, by the names of their sources."""
    return PackedDataset(
        JoinedPacking([dataset.packing for dataset in datasets.values()]),
        name="joined",
        location=", ".join(dataset.location for dataset in datasets.values()),
        plan=[dataset.plan for dataset in datasets.values()],
        sequence_length=next(iter(datasets.values())).sequence_length,
        shuffle=False,
        read_threads=max(dataset.read_threads for dataset in datasets.values()),
        source_names=tuple(datasets),
    )
