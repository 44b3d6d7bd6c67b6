"""What the processes of a preparation do: a unit of text into a part, parts into a shard.

A part is the tokens of one unit, in its own order, with a list of its documents. It is kept in the unfinished folder until the
shards are written, so a preparation that was stopped repeats at most the units that were being read.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from lmforge.atomic_files import atomic_write
from lmforge.data.prepare.worker_pool import Report
from lmforge.data.shards import RESTORE_HINT, UNFINISHED, ShardEntry, finished_shard_entry, write_shard
from lmforge.data.sources.records import ReadProgress
from lmforge.data.sources.text_sources import SourceUnit
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import UserError

ENCODE_BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class UnitReader:
    """How a unit is read. `tail_fraction` is cut off as a document of its own when the corpus has only one document."""

    unit: SourceUnit
    tail_fraction: float | None

    def hashed_texts(self, progress: ReadProgress) -> Iterator[tuple[str, int]]:
        """(text, hash of it) of each document, empty ones too. Documents with the least hashes are for validation."""
        for text in self.unit.read(progress):
            if self.tail_fraction is None or not text.strip():
                yield text, xxhash.xxh3_64_intdigest(text.encode())
            else:
                at = _split_position(text, int(len(text) * (1 - self.tail_fraction)))
                yield text[:at], 2**64 - 1
                yield text[at:], 0


def validation_threshold(ratio: float) -> int:
    """Documents with hashes below it are for validation."""
    return int(ratio * 2**64)


def _split_position(text: str, target: int) -> int:
    """Where to cut a text in two, at the end of a line if possible, with more than blanks on either side."""
    first = len(text) - len(text.lstrip()) + 1
    target = max(first, min(target, len(text.rstrip()) - 1))
    line = text.rfind("\n", first, target) + 1
    return line if line > target // 2 else target


def part_path(out: Path, number: int, suffix: str) -> Path:
    return out / UNFINISHED / f"part-{number:06d}{suffix}"


def token_dtype(vocab_size: int) -> np.dtype:
    return np.dtype("<u2" if vocab_size <= 65_536 else "<u4")


@lru_cache(maxsize=1)
def _open_tokenizer_cached(folder: Path, tokenizer_hash: str) -> Tokenizer:
    """Opened once in a process, and again if another tokenizer replaced it in the folder."""
    tokenizer = Tokenizer.open(folder)
    assert tokenizer.hash == tokenizer_hash
    return tokenizer


def write_part(job: tuple[int, UnitReader], report: Report, *, out: Path, tokenizer_hash: str) -> None:
    """Tokenize one unit, given with its number, as a part of that number, and report the bytes of it that are done.

    The list of its documents is written last: its presence marks the part as complete.
    """
    (number, reader), progress = job, ReadProgress()
    tokenizer = _open_tokenizer_cached(out / "tokenizer", tokenizer_hash)
    dtype = token_dtype(tokenizer.vocab_size)
    documents: dict[str, Any] = {"lengths": array("q"), "hashes": array("Q"), "text_bytes": array("q")}
    empty = tokens = 0
    with atomic_write(part_path(out, number, ".tokens")) as file:
        for batch, position in _batch_pieces(reader.hashed_texts(progress), tokenizer, progress):
            for (_, document), ids in zip(batch, tokenizer.encode_batch([piece for piece, _ in batch]), strict=True):
                if document is None:
                    file.write(np.array(ids, dtype).data)
                    tokens += len(ids)
                    continue
                text, digest = document
                if not text.strip():
                    empty += 1
                    continue
                file.write(np.array([*ids, tokenizer.eos_token_id], dtype).data)
                documents["lengths"].append(tokens + len(ids) + 1)
                documents["hashes"].append(digest)
                documents["text_bytes"].append(len(text.encode()))
                tokens = 0
            report(position)
    with atomic_write(part_path(out, number, ".npz")) as file:
        np.savez(file, **documents, empty=empty)


# A piece of a document; the last piece of each comes with the document's (text, hash), the others with None.
TextPiece = tuple[str, tuple[str, int] | None]


def _batch_pieces(
    texts: Iterator[tuple[str, int]], tokenizer: Tokenizer, progress: ReadProgress
) -> Iterator[tuple[list[TextPiece], int]]:
    """Pieces of (text, hash) in batches of a megabyte, so that memory does not grow with the unit.

    With each batch comes its end in bytes of the unit; of a document that was read at once, in proportion to its pieces.
    """
    batch: list[TextPiece] = []
    size = position = 0
    for text, digest in texts:
        *others, last = tokenizer.split_long_text(text)
        start, step = position, (progress.bytes - position) / (len(others) + 1)
        for number, (piece, document) in enumerate([*zip(others, repeat(None)), (last, (text, digest))], start=1):
            batch.append((piece, document))
            size, position = size + len(piece), start + int(number * step)
            if size >= ENCODE_BATCH_CHARACTERS:
                yield batch, position
                batch, size = [], 0
    yield batch, position


@dataclass(frozen=True)
class DocumentIndex:
    """Every document of every part, in the order of the source: arrays of one length."""

    part_numbers: np.ndarray
    starts: np.ndarray  # in tokens of the part
    lengths: np.ndarray  # tokens, the end-of-text token included
    hashes: np.ndarray
    text_bytes: np.ndarray
    num_empty: int

    @classmethod
    def load(cls, out: Path, num_parts: int) -> "DocumentIndex":
        """The lists of all parts, which must be complete."""
        parts = []
        for number in range(num_parts):
            with np.load(part_path(out, number, ".npz")) as part:
                parts.append(dict(part))
        return cls(
            part_numbers=np.repeat(np.arange(num_parts), [len(part["lengths"]) for part in parts]),
            starts=np.concatenate([np.cumsum(part["lengths"]) - part["lengths"] for part in parts]),
            num_empty=sum(int(part["empty"]) for part in parts),
            **{name: np.concatenate([part[name] for part in parts]) for name in ("lengths", "hashes", "text_bytes")},
        )

    def split_into_shards(self, order: np.ndarray, shard_tokens: int) -> Iterator[np.ndarray]:
        """Documents in an order, cut after each document that fills a shard to `shard_tokens`."""
        stops = np.cumsum(self.lengths[order])
        first, tokens = 0, 0
        while first < len(order):
            last = min(int(np.searchsorted(stops, tokens + shard_tokens)), len(order) - 1)
            yield order[first : last + 1]
            first, tokens = last + 1, int(stops[last])


class ShardJob(NamedTuple):
    """One shard: where each of its documents is in the parts, in their order in the shard."""

    split: str
    number: int
    part_numbers: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray


def assemble_shard(job: ShardJob, *, out: Path, dtype: np.dtype, tokenizer_hash: str) -> ShardEntry:
    """Gather the documents of one shard, unless an earlier run did, and return its entry in the manifest."""
    name = f"{job.split}-{job.number:05d}"
    finished = finished_shard_entry(out, name)
    if finished is not None:
        return finished
    stops = np.cumsum(job.lengths)
    tokens = np.empty(int(stops[-1]), dtype)
    # Part by part rather than document by document: each is opened once and read in the order on the disk.
    by_part = np.lexsort((job.starts, job.part_numbers))
    for of_part in np.split(by_part, np.flatnonzero(np.diff(job.part_numbers[by_part])) + 1):
        with open(part_path(out, int(job.part_numbers[of_part[0]]), ".tokens"), "rb") as file:
            for document in of_part:
                file.seek(int(job.starts[document]) * dtype.itemsize)
                into = tokens[stops[document] - job.lengths[document] : stops[document]]
                if file.readinto(into.view(np.uint8).data) != into.nbytes:
                    raise UserError(f"{file.name}: truncated since it was written: {RESTORE_HINT}")
    return write_shard(out, name, tokens, job.lengths, tokenizer_hash)
