"""The jobs of the processes of a preparation: a unit of text into a part, parts into a shard.

A part is the tokens of one unit, in its own order, with a list of its documents. It is kept in the
unfinished folder until the shards are written, so a preparation that was stopped repeats at most
the units that were being read.
"""

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Self

import numpy as np
import xxhash

from lmforge.core.data.shards.format import RESTORE_HINT, finished_shard_entry, write_shard
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.errors import UserError
from lmforge.core.files.atomic_files import atomic_write
from lmforge.core.records.manifests import UNFINISHED, ShardEntry
from lmforge.text.chat.layout import SpecialTokens
from lmforge.text.prepare.decontaminate import EvaluationNgrams
from lmforge.text.prepare.deduplicate import (
    BANDS,
    exact_duplicates,
    near_duplicate_keys,
    near_duplicates,
)
from lmforge.text.prepare.hook import DocumentHook
from lmforge.text.prepare.output_folder import EVALUATION_NGRAMS
from lmforge.text.prepare.worker_pool import Report
from lmforge.text.sources.records import ReadProgress, UnusableRecords
from lmforge.text.sources.token_files import TokenUnit
from lmforge.text.sources.units import SourceUnit, check_lines

ENCODE_BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class UnitReader:
    """Reads a unit.

    `tail_fraction` is cut off as a document of its own when the corpus has only one document; with
    `skip_invalid`, documents that cannot be used are left out.
    """

    unit: SourceUnit | TokenUnit
    hook: DocumentHook | None = None
    tail_fraction: float | None = None
    skip_invalid: bool = False

    def hashed_texts(self, progress: ReadProgress) -> Iterator[tuple[str, int]]:
        """(text, hash of it) of each document that the hook does not leave out, empty ones too.

        Documents with the smallest hashes are for validation.
        """
        assert isinstance(self.unit, SourceUnit)
        progress.unusable.skip = self.skip_invalid
        for document in self.unit.documents(progress, self.hook is not None):
            text = document.text if self.hook is None else self.hook(document)
            if text is None:
                progress.left_out += 1
                continue
            with progress.unusable.leave_out():
                check_lines(text, document.location)
                if self.tail_fraction is None or not text.strip():
                    yield text, xxhash.xxh3_64_intdigest(text.encode())
                else:
                    at = _split_position(text, int(len(text) * (1 - self.tail_fraction)))
                    yield text[:at], 2**64 - 1
                    yield text[at:], 0

    def hashed_tokens(self, progress: ReadProgress) -> Iterator[tuple[np.ndarray, int]]:
        """(ids, hash of them) of each document of a tokenized unit."""
        assert isinstance(self.unit, TokenUnit)
        for ids in self.unit.documents(progress):
            if self.tail_fraction is None or len(ids) < 2:
                yield ids, xxhash.xxh3_64_intdigest(ids.astype("<u4").data)
            else:
                at = min(len(ids) - 1, max(1, int(len(ids) * (1 - self.tail_fraction))))
                yield ids[:at], 2**64 - 1
                yield ids[at:], 0

    def documents(self, progress: ReadProgress) -> Iterator[object]:
        """Each document that is not empty."""
        if isinstance(self.unit, TokenUnit):
            yield from self.hashed_tokens(progress)
        else:
            yield from (text for text, _ in self.hashed_texts(progress) if text.strip())


def validation_threshold(ratio: float) -> int:
    """The threshold below which the hashes of documents for validation are."""
    return int(ratio * 2**64)


def _split_position(text: str, target: int) -> int:
    """The position at which to cut a text in two, at the end of a line if possible.

    There is text other than blanks on both sides.
    """
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
    """The tokenizer, opened once in a process, and again if another one replaced it."""
    tokenizer = Tokenizer.open(folder)
    assert tokenizer.hash == tokenizer_hash
    return tokenizer


@dataclass(frozen=True)
class PartSettings:
    """Everything that a part depends on besides its unit.

    `evaluation_digest` is the digest of the evaluation texts for decontamination.
    """

    out: Path
    tokenizer_hash: str
    near_duplicates: bool = False
    evaluation_digest: str | None = None
    parse_special_tokens: bool = False


class _PartList:
    """The documents of a part, as they are listed in its .npz."""

    def __init__(self, settings: PartSettings) -> None:
        self.settings = settings
        self._columns: dict[str, Any] = {
            "lengths": array("q"),
            "hashes": array("Q"),
            "text_bytes": array("q"),
        }
        self._near_keys: list[np.ndarray] = []
        self.removed = dict.fromkeys(REMOVED_IN_PARTS, 0)
        self.unusable = UnusableRecords()

    def add(self, tokens: int, digest: int, text_bytes: int, text: str | None = None) -> None:
        self._columns["lengths"].append(tokens)
        self._columns["hashes"].append(digest)
        self._columns["text_bytes"].append(text_bytes)
        if self.settings.near_duplicates:
            assert text is not None
            self._near_keys.append(near_duplicate_keys(text, digest))

    def write(self, path: Path) -> None:
        columns = dict(self._columns)
        if self.settings.near_duplicates:
            # Each band is a separate column, so that it can be read without the others.
            keys = np.array(self._near_keys, np.uint64).reshape(-1, BANDS)
            columns |= {near_column(band): keys[:, band] for band in range(BANDS)}
        lines = "".join(f"{line}\n" for line in self.unusable.problems)
        columns["unusable"] = np.frombuffer(lines.encode(), np.uint8)
        columns["special_text"] = self.unusable.with_special_text
        with atomic_write(path) as file:
            np.savez(file, **columns, **self.removed)  # type: ignore[arg-type]


# Documents that are not in a part: without text, left out by the hook, with an evaluation text.
REMOVED_IN_PARTS = ("empty", "hook", "contaminated")


def near_column(band: int) -> str:
    return f"near_{band:02}"


def write_part(job: tuple[int, UnitReader], report: Report, *, settings: PartSettings) -> None:
    """Write one unit, given with its number, as a part of that number.

    The bytes of it that are done are reported.
    The list of its documents is written last: its presence marks the part as complete.
    """
    number, reader = job
    tokenizer = _open_tokenizer_cached(settings.out / "tokenizer", settings.tokenizer_hash)
    listed = _PartList(settings)
    write_documents = _copy_tokens if isinstance(reader.unit, TokenUnit) else _tokenize
    with atomic_write(part_path(settings.out, number, ".tokens")) as file:
        write_documents(reader, tokenizer, file, listed, report)
    listed.write(part_path(settings.out, number, ".npz"))


def _copy_tokens(
    reader: UnitReader, tokenizer: Tokenizer, file: BinaryIO, listed: _PartList, report: Report
) -> None:
    """Write the documents of a tokenized unit, each with the end-of-text token."""
    progress = ReadProgress()
    dtype = token_dtype(tokenizer.vocab_size)
    sizes = tokenizer.token_byte_lengths()
    for ids, digest in reader.hashed_tokens(progress):
        file.write(np.append(ids, tokenizer.eos_token_id).astype(dtype).data)
        listed.add(len(ids) + 1, digest, int(sizes[ids].sum()))
        report(progress.bytes)


def _tokenize(
    reader: UnitReader, tokenizer: Tokenizer, file: BinaryIO, listed: _PartList, report: Report
) -> None:
    """Tokenize the documents of a unit and write them, each with the end-of-text token."""
    progress = ReadProgress()
    dtype = token_dtype(tokenizer.vocab_size)
    tokens = 0
    texts = reader.hashed_texts(progress)
    settings = listed.settings
    special = SpecialTokens(tokenizer).pattern
    parse = settings.parse_special_tokens
    listed.unusable = progress.unusable
    if settings.evaluation_digest is not None:
        ngrams = EvaluationNgrams.load(
            settings.out / UNFINISHED / EVALUATION_NGRAMS, settings.evaluation_digest
        )
        texts = _without_contaminated(texts, ngrams, listed.removed)
    for batch, position in _batch_pieces(texts, tokenizer, progress, parse):
        encoded = tokenizer.encode_batch([piece for piece, _ in batch], parse_special_tokens=parse)
        for (_, document), ids in zip(batch, encoded, strict=True):
            if document is None:
                file.write(np.fromiter(ids, dtype, len(ids)).data)
                tokens += len(ids)
                continue
            text, digest = document
            if not text.strip():
                listed.removed["empty"] += 1
                continue
            if not parse or ids[-1:] != [tokenizer.eos_token_id]:
                ids.append(tokenizer.eos_token_id)
            if not parse and special.search(text):
                progress.unusable.with_special_text += 1
            file.write(np.fromiter(ids, dtype, len(ids)).data)
            listed.add(tokens + len(ids), digest, len(text.encode()), text)
            tokens = 0
        report(position)
    listed.removed["hook"] = progress.left_out


def _without_contaminated(
    texts: Iterator[tuple[str, int]], ngrams: EvaluationNgrams, removed: dict[str, int]
) -> Iterator[tuple[str, int]]:
    for text, digest in texts:
        if ngrams.are_in(text):
            removed["contaminated"] += 1
        else:
            yield text, digest


# A piece of a document; the last piece of each comes with the document's (text, hash), the others
# with None.
TextPiece = tuple[str, tuple[str, int] | None]


def _batch_pieces(
    texts: Iterator[tuple[str, int]],
    tokenizer: Tokenizer,
    progress: ReadProgress,
    parse_special_tokens: bool,
) -> Iterator[tuple[list[TextPiece], int]]:
    """Pieces of (text, hash) in batches of a megabyte, so that memory does not grow with the unit.

    With each batch comes its end in bytes of the unit; of a document that was read at once, in
    proportion to its pieces.
    """
    batch: list[TextPiece] = []
    size = position = 0
    for text, digest in texts:
        *others, last = tokenizer.split_long_text(text, parse_special_tokens=parse_special_tokens)
        start = position
        step = (progress.bytes - position) / (len(others) + 1)
        for number, (piece, document) in enumerate(
            [*zip(others, repeat(None)), (last, (text, digest))], start=1
        ):
            batch.append((piece, document))
            size += len(piece)
            position = start + int(number * step)
            if size >= ENCODE_BATCH_CHARACTERS:
                yield batch, position
                batch = []
                size = 0
    yield batch, position


@dataclass(frozen=True)
class DocumentIndex:
    """Every document of every part, in the order of the source: arrays of one length."""

    part_numbers: np.ndarray
    starts: np.ndarray  # in tokens of the part
    lengths: np.ndarray  # tokens, the end-of-text token included
    hashes: np.ndarray
    text_bytes: np.ndarray
    removed: dict[str, int]  # documents that are in no part, by reason
    unusable: str  # a line for each document that cannot be used
    special_text: int  # documents that spell special tokens, encoded as text

    @classmethod
    def load(cls, out: Path, num_parts: int) -> Self:
        """The lists of all parts, which must be complete."""
        parts = []
        removed = Counter[str]()
        unusable = ""
        for number in range(num_parts):
            with np.load(part_path(out, number, ".npz")) as part:
                parts.append({name: part[name] for name in ("lengths", "hashes", "text_bytes")})
                removed.update(
                    {name: int(part.get(name, 0)) for name in (*REMOVED_IN_PARTS, "special_text")}
                )
                unusable += bytes(part.get("unusable", b"")).decode()
        return cls(
            part_numbers=np.repeat(np.arange(num_parts), [len(part["lengths"]) for part in parts]),
            starts=np.concatenate([np.cumsum(part["lengths"]) - part["lengths"] for part in parts]),
            special_text=removed.pop("special_text"),
            removed={**removed, "unusable": unusable.count("\n")},
            unusable=unusable,
            **{
                name: np.concatenate([part[name] for part in parts])
                for name in ("lengths", "hashes", "text_bytes")
            },
        )

    def mark_duplicates(self, out: Path, how: Literal["exact", "near"]) -> np.ndarray:
        """A mask bool [documents] of those that are copies of earlier ones."""
        if how == "exact":
            return exact_duplicates(self.hashes, self.text_bytes, self.lengths)

        def load_band(band: int) -> np.ndarray:
            columns = []
            for number in range(int(self.part_numbers[-1]) + 1):
                with np.load(part_path(out, number, ".npz")) as part:
                    columns.append(part[near_column(band)])
            return np.concatenate(columns)

        return near_duplicates(len(self.hashes), load_band)

    def split_into_shards(self, order: np.ndarray, shard_tokens: int) -> Iterator[np.ndarray]:
        """Documents in an order, cut after each document that fills a shard to `shard_tokens`."""
        stops = np.cumsum(self.lengths[order])
        first = 0
        tokens = 0
        while first < len(order):
            last = min(int(np.searchsorted(stops, tokens + shard_tokens)), len(order) - 1)
            yield order[first : last + 1]
            first = last + 1
            tokens = int(stops[last])


class ShardJob(NamedTuple):
    """One shard: where each of its documents is in the parts, in their order in the shard."""

    split: str
    number: int
    part_numbers: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray


def assemble_shard(job: ShardJob, *, out: Path, dtype: np.dtype, tokenizer_hash: str) -> ShardEntry:
    """Gather the documents of one shard, and return its entry in the manifest.

    A shard that an earlier run wrote stays.
    """
    name = f"{job.split}-{job.number:05d}"
    finished = finished_shard_entry(out, name)
    if finished is not None:
        return finished
    stops = np.cumsum(job.lengths)
    tokens = np.empty(int(stops[-1]), dtype)
    # Part by part rather than document by document: each is opened once and read in the order on
    # the disk.
    by_part = np.lexsort((job.starts, job.part_numbers))
    for of_part in np.split(by_part, np.flatnonzero(np.diff(job.part_numbers[by_part])) + 1):
        with open(part_path(out, int(job.part_numbers[of_part[0]]), ".tokens"), "rb") as file:
            for document in of_part:
                file.seek(int(job.starts[document]) * dtype.itemsize)
                into = tokens[stops[document] - job.lengths[document] : stops[document]]
                if file.readinto(into.view(np.uint8).data) != into.nbytes:
                    raise UserError(f"{file.name}: truncated since it was written: {RESTORE_HINT}")
    return write_shard(out, name, tokens, job.lengths, tokenizer_hash)
