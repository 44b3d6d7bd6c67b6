"""Which documents share a sequence under best-fit packing: computed once for one sequence length,
and read by position.

    best-fit-2048.json          sequences and spans of each training shard, and the xxh3 of its
                                index's checksums
    train-00000.best-fit-2048   little-endian uint32 (uint64 of a shard of 2³² tokens or more):
                                  where the spans of each sequence begin in the list of spans,
                                  [sequences + 1] the spans, [spans, 2]: their first token in the
                                  shard, and their length
                                and uint64: the xxh3 of every 64 KiB block of these

A span of n tokens of a document is the input of a sequence; the n tokens after its first are its
labels, so that it reads one token more. So a document of T tokens has T − 1 to place: its last
token predicts nothing. A longer document than a sequence is cut every `sequence_length` tokens. A
token at a cut is the label of one span and the first input of the next: every transition within a
document is scored exactly once.

Documents are packed in groups that are neighbours in a shard, so that a sequence is read from near
places, and the time and memory of packing do not depend on the size of a shard. Writing the index
of a folder is in text/prepare/pack.py.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from operator import add
from pathlib import Path
from typing import Self

import numpy as np
import xxhash

from lmforge.core.data.packing import BestFitPacking, Packing, best_fit
from lmforge.core.data.shards.files import ShardFile, SizeCheck, StoredChecksums
from lmforge.core.data.shards.folder import MAX_PARSED_SHARDS, TokenFolder
from lmforge.core.data.shards.format import TRAIN_SPLIT
from lmforge.core.data.shards.storage import read_manifest
from lmforge.core.errors import UserError
from lmforge.core.files.atomic_files import atomic_write
from lmforge.core.files.checksums import block_checksums, parse_checksums
from lmforge.core.records.manifests import BLOCK_BYTES, BestFitManifest, IndexEntry, write_manifest

# Incremented whenever the same tokens would give other sequences or files.
BEST_FIT_VERSION = 1
# Approximate size of a group: large enough that its sequences have hardly any padding. 16 MB of
# tokens at a length of 2,048.
GROUP_SEQUENCES = 4096


def manifest_name(sequence_length: int) -> str:
    return f"best-fit-{sequence_length}.json"


def index_suffix(sequence_length: int) -> str:
    return f".best-fit-{sequence_length}"


def best_fit_lengths(folder: TokenFolder) -> list[int]:
    """The sequence lengths that a folder is packed for."""
    return sorted(map(int, folder.manifest.best_fit))


def describe_best_fit(folder: TokenFolder, sequence_length: int) -> str:
    """A line that describes an index, or its damage. A folder can be used without an index."""
    try:
        return BestFitIndex.open(folder, sequence_length).describe()
    except UserError as problem:
        return f"damaged: {problem}"


def pack_again_hint(path: Path, sequence_length: int) -> str:
    return f"`lmforge prepare --pack {path} --best_fit_length {sequence_length}` writes it again"


def pack_documents(ends: np.ndarray, sequence_length: int) -> tuple[np.ndarray, np.ndarray]:
    """The sequences of a shard whose documents end at `ends`, int64 [documents].

    Returns where the spans of each sequence begin, int64 [sequences + 1], and the spans, int64
    [spans, 2]: their first tokens and lengths.
    """
    starts = np.concatenate(([0], ends[:-1]))
    num_groups = max(1, round(int(ends[-1]) / (GROUP_SEQUENCES * sequence_length)))
    # A document belongs to the group that it begins in; one of several groups leaves some without
    # any.
    bounds = np.unique(starts.searchsorted(int(ends[-1]) * np.arange(num_groups + 1) // num_groups))
    firsts = [np.zeros(1, np.int64)]
    spans = [np.zeros((0, 2), np.int64)]
    total = 0
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        of_group = _split_documents(starts[first:last], ends[first:last], sequence_length)
        order, begins = best_fit(of_group[:, 1], sequence_length)
        spans.append(of_group[order])
        firsts.append(begins[1:] + total)
        total += len(order)
    return np.concatenate(firsts), np.concatenate(spans)


def _split_documents(starts: np.ndarray, ends: np.ndarray, sequence_length: int) -> np.ndarray:
    """The spans of documents, int64 [spans, 2], each of at most `sequence_length` tokens."""
    sizes = ends - starts - 1
    counts = -(-sizes // sequence_length)
    numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    lengths = np.minimum(sequence_length, np.repeat(sizes, counts) - numbers * sequence_length)
    return np.stack((np.repeat(starts, counts) + numbers * sequence_length, lengths), axis=1)


def write_index(folder: Path, name: str, ends: np.ndarray, sequence_length: int) -> IndexEntry:
    """Write the index of the shard `name`, whose documents end at `ends`, and return its entry in
    the manifest.
    """
    firsts, spans = pack_documents(ends, sequence_length)
    entry = IndexEntry(name, int(ends[-1]), len(firsts) - 1, len(spans), "")
    body = np.concatenate((firsts, spans.reshape(-1))).astype(entry.dtype)
    checksums = parse_checksums(block_checksums(body.view(np.uint8).data, BLOCK_BYTES)).astype(
        "<u8", copy=False
    )
    with atomic_write(folder / (name + index_suffix(sequence_length))) as file:
        file.write(body.data)
        file.write(checksums.data)
    return replace(entry, xxh3=xxhash.xxh3_64_hexdigest(checksums.data))


def write_index_manifest(
    folder: TokenFolder, sequence_length: int, entries: Sequence[IndexEntry]
) -> str:
    """Write best-fit-LENGTH.json, and return its checksum for the folder's manifest."""
    digest = folder.split(TRAIN_SPLIT).digest
    manifest = BestFitManifest(BEST_FIT_VERSION, sequence_length, digest, list(entries))
    return write_manifest(folder.path / manifest_name(sequence_length), manifest)


class IndexReader:
    """The index of one shard. Raises UserError where it is damaged."""

    def __init__(self, folder: TokenFolder, entry: IndexEntry, sequence_length: int):
        name = entry.name + index_suffix(sequence_length)
        hint = pack_again_hint(folder.path, sequence_length)
        self._entry = entry
        self._dtype = entry.dtype
        self._length = sequence_length
        self._hint = hint
        size = entry.checksum_bytes
        stored = ShardFile(
            folder.storage,
            name,
            size,
            parse_checksums([entry.xxh3]),
            size,
            base=entry.body_bytes,
            hint=hint,
        )
        self.file = ShardFile(
            folder.storage, name, entry.body_bytes, StoredChecksums(stored, size // 8), hint=hint
        )

    def spans(self, sequence: int) -> list[tuple[int, int]]:
        """The spans of a sequence: their first tokens in the shard, and their lengths."""
        first, last = self._read(sequence, 2)
        if first < last <= self._entry.spans:
            numbers = self._read(self._entry.sequences + 1 + 2 * first, 2 * (last - first))
            starts = numbers[::2]
            lengths = numbers[1::2]
            if (
                min(lengths) > 0
                and sum(lengths) <= self._length
                and max(map(add, starts, lengths)) < self._entry.tokens
            ):
                return list(zip(starts, lengths, strict=True))
        raise UserError(f"{self.file.path}: holds spans that are not of its shard: {self._hint}")

    def _read(self, first: int, count: int) -> list[int]:
        data = self.file.read(first * self._dtype.itemsize, count * self._dtype.itemsize)
        numbers: list[int] = np.frombuffer(data, self._dtype).tolist()
        return numbers


@dataclass(frozen=True)
class BestFitIndex:
    """The index of the training split of a folder for one sequence length."""

    folder: TokenFolder
    manifest: BestFitManifest
    size_check: SizeCheck

    @classmethod
    def open(cls, folder: TokenFolder, sequence_length: int, *, check_sizes: bool = True) -> Self:
        """Raises UserError where the folder has no index for this length, or the index is damaged
        or belongs to other tokens.
        """
        name = manifest_name(sequence_length)
        hint = pack_again_hint(folder.path, sequence_length)
        path = folder.path / name
        if (digest := folder.manifest.best_fit.get(str(sequence_length))) is None:
            lengths = ", ".join(f"{each:,}" for each in best_fit_lengths(folder))
            others = f" (it is for {lengths})" if lengths else ""
            raise UserError(
                f"{folder.path}: not packed for best-fit with sequences of {sequence_length:,}"
                f" tokens{others}: `lmforge prepare --pack {folder.path} --best_fit_length"
                f" {sequence_length}` packs it"
            )
        manifest = read_manifest(folder.storage, name, BestFitManifest, digest, hint)
        split = folder.split(TRAIN_SPLIT)
        shards = [(entry.name, entry.tokens) for entry in folder.manifest.splits[TRAIN_SPLIT]]
        described = [(entry.name, entry.tokens) for entry in manifest.shards]
        expected = BEST_FIT_VERSION, sequence_length, split.digest
        if (
            manifest.version,
            manifest.sequence_length,
            manifest.tokens,
        ) != expected or described != shards:
            raise UserError(f"{path}: is not of these tokens, or of another lmforge: {hint}")
        suffix = index_suffix(sequence_length)

        def sizes_of(entry: IndexEntry) -> dict[str, int]:
            return {entry.name + suffix: entry.body_bytes + entry.checksum_bytes}

        checked = (
            [entry for entry in manifest.shards if entry.name not in folder.quarantine]
            if check_sizes
            else []
        )
        return cls(folder, manifest, SizeCheck(folder.storage, checked, sizes_of, hint))

    @cached_property
    def _first_sequences(self) -> list[int]:
        """The first sequence of each shard, and at the end the number of sequences."""
        return list(accumulate((entry.sequences for entry in self.manifest.shards), initial=0))

    @cached_property
    def _first_tokens(self) -> list[int]:
        """The first token of each shard, and at the end the number of tokens."""
        return list(accumulate((entry.tokens for entry in self.manifest.shards), initial=0))

    @property
    def hint(self) -> str:
        """The advice for a damaged index."""
        return pack_again_hint(self.folder.path, self.manifest.sequence_length)

    @property
    def num_sequences(self) -> int:
        return self._first_sequences[-1]

    @property
    def fill(self) -> float:
        """The fraction of all positions in sequences that hold a token."""
        placed = self._first_tokens[-1] - sum(
            entry.documents for entry in self.folder.manifest.splits[TRAIN_SPLIT]
        )
        return placed / max(1, self.num_sequences * self.manifest.sequence_length)

    def describe(self) -> str:
        """A description, in words."""
        length = self.manifest.sequence_length
        return f"{self.num_sequences:,} sequences of {length:,} tokens, {self.fill:.2%} filled"

    def spans(self, sequence: int) -> list[tuple[int, int]]:
        """The spans of a sequence: first token in the split, and length.

        None where a token of them is in quarantine.

        Raises UserError naming the shard's index where it cannot be read.
        """
        self.size_check.raise_problem()
        shard = bisect_right(self._first_sequences, sequence) - 1
        first = self._first_tokens[shard]
        quarantined = self.folder.split(TRAIN_SPLIT).quarantined
        if quarantined.num_tokens and quarantined.cover(first, self._first_tokens[shard + 1]):
            return []
        spans = [
            (first + start, size)
            for start, size in self._reader(shard).spans(sequence - self._first_sequences[shard])
        ]
        if quarantined.num_tokens and any(
            quarantined.overlap(start, start + size + 1) for start, size in spans
        ):
            return []
        return spans

    @cached_property
    def _reader(self) -> Callable[[int], IndexReader]:
        length = self.manifest.sequence_length
        return lru_cache(MAX_PARSED_SHARDS)(
            lambda shard: IndexReader(self.folder, self.manifest.shards[shard], length)
        )


def pack_best_fit(
    folder: TokenFolder, split: str, sequence_length: int
) -> tuple[Packing, int, int]:
    """The packing of the training split by its index; its version; and the sequences of a group."""
    assert split == TRAIN_SPLIT
    index = BestFitIndex.open(folder, sequence_length)
    packed = BestFitPacking(folder.split(split), index, sequence_length)
    return packed, BEST_FIT_VERSION, GROUP_SEQUENCES
