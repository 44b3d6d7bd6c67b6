"""Reads every block of a token folder and compares it with its checksum.

Returns the damage, and the entries for a quarantine.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain

from lmforge.core.data.best_fit_index import BestFitIndex, IndexReader, best_fit_lengths
from lmforge.core.data.shards.folder import ShardReader, TokenFolder
from lmforge.core.data.shards.quarantine import format_entries
from lmforge.core.errors import UserError
from lmforge.core.records.manifests import BLOCK_BYTES, CHECKSUM_BLOCK_BYTES, IndexEntry, ShardEntry

# Reading from a disk or a store, and hashing, which leaves Python's lock.
THREADS = 8
CHECKSUMS_IN_BLOCK = CHECKSUM_BLOCK_BYTES // 8


@dataclass(frozen=True)
class DamagedShard:
    """The damage of a shard, in one line, and the quarantine entries for the parts that cannot be
    read.
    """

    name: str
    problem: str
    quarantine: list[str]


def verify_shards(folder: TokenFolder) -> Iterator[DamagedShard | None]:
    """One result per shard, in order: None where it is undamaged."""
    shards = list(chain.from_iterable(folder.manifest.splits.values()))
    with ThreadPoolExecutor(THREADS, "verify") as threads:
        yield from threads.map(partial(_verify_shard, folder), shards)


def _verify_shard(folder: TokenFolder, entry: ShardEntry) -> DamagedShard | None:
    problems: list[str] = []
    try:
        reader = ShardReader(folder, entry)
        for suffix, expected in entry.file_sizes(folder.dtype.itemsize).items():
            try:
                size = folder.storage.sizes([entry.name + suffix])[0]
            except FileNotFoundError:
                return DamagedShard(entry.name, f"{suffix} is missing", [entry.name])
            if size > expected:
                return DamagedShard(
                    entry.name, f"{suffix} is too long: {size} bytes of {expected}", [entry.name]
                )
            if size < expected:
                problems.append(f"{suffix} is truncated: {size} bytes of {expected}")
        checksums = reader.checksums.damaged_blocks()
        of_checksums = set(
            _ranges(
                (each * CHECKSUMS_IN_BLOCK, (each + 1) * CHECKSUMS_IN_BLOCK) for each in checksums
            )
        )
        tokens = reader.tokens.damaged_blocks(unknown=of_checksums)
        documents = reader.documents.damaged_blocks()
        bounds = [0, *reader.block_first_ends[1:].tolist(), entry.tokens]
        block_tokens = BLOCK_BYTES // folder.dtype.itemsize
        blocks = {
            *tokens,
            *_ranges(
                (bounds[k] // block_tokens, -(-bounds[k + 1] // block_tokens)) for k in documents
            ),
        }
        for file, damaged in (
            (reader.checksums, checksums),
            (reader.tokens, tokens),
            (reader.documents, documents),
        ):
            if damaged:
                block_ranges = ", ".join(
                    each.partition(":")[2] for each in format_entries(entry.name, damaged)
                )
                problems.append(
                    f"{len(damaged)} of {file.num_blocks} blocks of {file.path.suffix} do not"
                    f" match: {block_ranges}"
                )
    except UserError as problem:
        return DamagedShard(entry.name, str(problem), [entry.name])
    return (
        DamagedShard(entry.name, "; ".join(problems), format_entries(entry.name, sorted(blocks)))
        if problems
        else None
    )


def verify_best_fit(folder: TokenFolder) -> Iterator[str]:
    """A line per damaged index of best-fit packing (best_fit_index.py)."""
    for length in best_fit_lengths(folder):
        try:
            index = BestFitIndex.open(folder, length, check_sizes=False)
        except UserError as problem:
            yield str(problem)
            continue
        with ThreadPoolExecutor(THREADS, "verify") as threads:
            yield from filter(
                None, threads.map(partial(_verify_index, index), index.manifest.shards)
            )


def _verify_index(index: BestFitIndex, entry: IndexEntry) -> str | None:
    file = IndexReader(index.folder, entry, index.manifest.sequence_length).file
    try:
        damaged = file.damaged_blocks()
    except UserError as problem:  # of the checksums in it
        return str(problem)
    return (
        f"{file.path}: {len(damaged)} of {file.num_blocks} blocks do not match: {index.hint}"
        if damaged
        else None
    )


def _ranges(bounds: Iterable[tuple[int, int]]) -> Iterator[int]:
    return chain.from_iterable(range(first, stop) for first, stop in bounds)
