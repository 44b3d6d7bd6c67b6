"""Corpora that other tools have tokenized, read as documents of ids.

    .arrow        fms-fsdp: an Arrow file whose record batches are documents, in a column `tokens`; or rows of lists of ids
    .bin + .idx   Megatron-LM: ids, and an index with the documents
    .bin          llm.c: a header of 256 int32 (magic 20240520 and version 1: uint16 ids; 20240801 and 7: uint32), then ids
    .bin          nanoGPT: uint16 ids and nothing else

The last two say nowhere where documents end. In all of them an end-of-text or beginning-of-text id is a boundary: it is left
out, and `prepare` ends each document with the tokenizer's own end-of-text id.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import cut, expand_home, list_names
from lmforge.text.sources.folders import choose_split, list_files
from lmforge.text.sources.records import ReadProgress
from lmforge.text.sources.text_sources import FileSource, stat_files

if TYPE_CHECKING:
    import pyarrow

TOKEN_SUFFIXES = frozenset({".bin", ".arrow"})
UNIT_BYTES = 16 << 20
CHUNK_TOKENS = 1 << 20
ARROW_COLUMNS = ("tokens", "input_ids")

MEGATRON_MAGIC, MEGATRON_VERSION = b"MMIDIDX\x00\x00", 1
MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
MEGATRON_HEADER = np.dtype([("magic", "S9"), ("version", "<u8"), ("dtype", "u1"), ("sequences", "<u8"), ("documents", "<u8")])

LLMC_HEADER_BYTES = 256 * 4
LLMC_DTYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}


@dataclass(frozen=True)
class TokenUnit(ABC):
    """A part of a file that one process reads: the items that begin at `start` … `stop` − 1; the kind of file determines the
    items."""

    path: str
    start: int
    stop: int
    size: int
    separators: tuple[int, ...]
    vocab_size: int

    @property
    def file(self) -> str:
        return self.path

    def documents(self, progress: ReadProgress) -> Iterator[np.ndarray]:
        """The ids of each document, int [tokens], without separators; none is empty.

        Raises UserError naming file and place for an id beyond the vocabulary, or if the file cannot be read.
        """
        try:
            for document, read in self._stored_documents():
                edges = [-1, *np.flatnonzero(np.isin(document, self.separators)).tolist(), len(document)]
                yield from (document[a + 1 : b] for a, b in pairwise(edges) if b - a > 1)
                progress.bytes = int(self.size * read)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {error.strerror or error}") from None

    @abstractmethod
    def _stored_documents(self) -> Iterator[tuple[np.ndarray, float]]:
        """The stored ids of each document, after a check, and the fraction of the unit that has been read."""

    def _check(self, ids: np.ndarray, part: str, first: int) -> np.ndarray:
        """`ids`, which begin with number `first` of `part`. Raises UserError if one is beyond the vocabulary."""
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            at = int(np.flatnonzero((ids < 0) | (ids >= self.vocab_size))[0])
            raise UserError(
                f"{self.path}: id {first + at:,} of {part} is {int(ids[at]):,}, beyond the vocabulary of {self.vocab_size:,}: "
                "name the tokenizer that made these tokens"
            )
        return ids


@dataclass(frozen=True)
class FlatUnit(TokenUnit):
    """Ids from byte `offset` of a file on: the documents that begin with ids `start` … `stop` − 1."""

    offset: int
    dtype: str

    def _stored_documents(self) -> Iterator[tuple[np.ndarray, float]]:
        with open(self.path, "rb") as file:
            begins = self.start == 0  # else the first document begins after a separator, which may be the id before
            at = max(0, self.start - 1)
            file.seek(self.offset + at * np.dtype(self.dtype).itemsize)
            pieces: list[np.ndarray] = []
            while len(ids := np.fromfile(file, self.dtype, CHUNK_TOKENS)):
                self._check(ids, "the file", at)
                ends = np.flatnonzero(np.isin(ids, self.separators)).tolist()
                first = 0
                for end in ends:
                    if begins:
                        yield (
                            np.concatenate([*pieces, ids[first:end]]),
                            min(1.0, (at + end - self.start) / (self.stop - self.start)),
                        )
                    pieces, begins, first = [], True, end + 1
                    if at + first >= self.stop:
                        return
                if begins:
                    pieces.append(ids[first:])
                at += len(ids)
            if pieces:
                yield np.concatenate(pieces), 1.0


class MegatronUnit(TokenUnit):
    """The documents `start` … `stop` − 1 of a pair of files of Megatron-LM."""

    def _stored_documents(self) -> Iterator[tuple[np.ndarray, float]]:
        index = MegatronIndex.open(Path(self.path))
        with open(self.path, "rb") as file:
            for document in range(self.start, self.stop):
                sequences = []
                for sequence in range(*index.documents[document : document + 2].tolist()):
                    file.seek(int(index.pointers[sequence]))
                    sequences.append(np.fromfile(file, index.dtype, int(index.lengths[sequence])))
                    if len(sequences[-1]) != index.lengths[sequence]:
                        raise UserError(f"{self.path}: truncated: its index has more tokens")
                ids = np.concatenate(sequences) if sequences else np.zeros(0, index.dtype)
                yield self._check(ids, f"document {document:,}", 0), (document + 1 - self.start) / (self.stop - self.start)


@dataclass(frozen=True)
class MegatronIndex:
    """An .idx file: tokens and first byte of each sequence; the first sequence of each document, and their number."""

    dtype: np.dtype
    lengths: np.ndarray
    pointers: np.ndarray
    documents: np.ndarray

    @classmethod
    def open(cls, tokens: Path) -> "MegatronIndex":
        """The index beside a file of tokens. Raises UserError if it is not one."""
        path = tokens.with_suffix(".idx")
        if path.stat().st_size < MEGATRON_HEADER.itemsize:
            raise UserError(f"{path}: not a Megatron-LM index: too short")
        # Memory-mapped: it has an entry per sequence of the corpus, and a unit needs few of them.
        content = np.memmap(path, np.uint8, "r")
        header = content[: MEGATRON_HEADER.itemsize].view(MEGATRON_HEADER)[0]
        dtype, sequences, documents = (
            MEGATRON_DTYPES.get(int(header["dtype"])),
            int(header["sequences"]),
            int(header["documents"]),
        )
        if content[:9].tobytes() != MEGATRON_MAGIC or header["version"] != MEGATRON_VERSION or dtype is None:
            raise UserError(f"{path}: not a Megatron-LM index of version {MEGATRON_VERSION} with integer ids")
        at = MEGATRON_HEADER.itemsize
        if len(content) < at + 12 * sequences + 8 * documents:
            raise UserError(f"{path}: truncated: {len(content):,} bytes do not hold {sequences:,} sequences")
        arrays = []
        for count, kind in ((sequences, "<i4"), (sequences, "<i8"), (documents, "<i8")):
            size = count * np.dtype(kind).itemsize
            arrays.append(content[at : at + size].view(kind))
            at += size
        return cls(np.dtype(dtype), *arrays)

    def count_documents(self, path: Path) -> int:
        """How many documents it has. Raises UserError, naming `path`, if they are not contiguous."""
        first = self.documents
        if not len(first) or first[0] != 0 or first[-1] != len(self.lengths) or (first[1:] < first[:-1]).any():
            raise UserError(f"{path}: the documents of its index do not follow each other")
        if len(self.lengths) and (self.lengths.min() < 0 or self.pointers.min() < 0):
            raise UserError(f"{path}: the sequences of its index have negative lengths")
        return len(first) - 1


class ArrowUnit(TokenUnit):
    """The record batches `start` … `stop` − 1 of an Arrow file."""

    def _stored_documents(self) -> Iterator[tuple[np.ndarray, float]]:
        with _open_arrow(self.path) as (reader, column):
            for number in range(self.start, self.stop):
                values = reader.get_batch(number).column(column)
                read = (number + 1 - self.start) / (self.stop - self.start)
                is_list = hasattr(values.type, "value_type")
                if values.null_count or (is_list and values.flatten().null_count):
                    raise UserError(f"{self.path}: record batch {number:,} has rows or ids that are null")
                for row in values if is_list else [values]:
                    ids = (row.values if hasattr(row, "values") else row).to_numpy(zero_copy_only=False)
                    yield self._check(ids, f"record batch {number:,}", 0), read


@contextmanager
def _open_arrow(path: str) -> Iterator[tuple["pyarrow.ipc.RecordBatchFileReader", str]]:
    """An Arrow file, and its column of ids; what pyarrow raises in the block becomes a UserError."""
    import pyarrow

    try:
        with pyarrow.OSFile(path) as file, pyarrow.ipc.open_file(file) as reader:
            yield reader, _arrow_column(reader.schema, path)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: cannot be read as an Arrow file: {error}") from None


def _arrow_column(schema: "pyarrow.Schema", path: str) -> str:
    import pyarrow

    for name in ARROW_COLUMNS:
        if name in schema.names:
            kind = schema.field(name).type
            is_list = pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind)
            if pyarrow.types.is_integer(kind.value_type if is_list else kind):
                return name
            raise UserError(f"{path}: the column {name!r} does not hold ids but {cut(str(kind))}")
    raise UserError(f"{path}: no column {' or '.join(ARROW_COLUMNS)}: there are {list_names(schema.names)}")


@dataclass(frozen=True)
class TokenSource(FileSource):
    """A tokenized corpus, with its tokenizer."""

    separators: tuple[int, ...]
    vocab_size: int

    def _identity(self, files: list[tuple[str, int, int]]) -> list[Any]:
        return ["tokens", self.separators, files]

    def units(self) -> list[TokenUnit]:
        """All units of work, in a fixed order. Raises UserError naming a file that is none of these kinds."""
        units: list[TokenUnit] = []
        for file in self.files:
            kind, total, options = _detect_kind(Path(file.path), file.size)
            step = max(1, total * UNIT_BYTES // max(1, file.size))
            for start in range(0, total, step):
                stop = min(start + step, total)
                size = file.size * stop // total - file.size * start // total
                units.append(kind(file.path, start, stop, size, self.separators, self.vocab_size, *options))
        return units


def _detect_kind(path: Path, size: int) -> tuple[type[TokenUnit], int, tuple[object, ...]]:
    """The kind of a file, its number of items, and further arguments of its units."""
    if path.suffix == ".arrow":
        with _open_arrow(str(path)) as (reader, _):
            return ArrowUnit, reader.num_record_batches, ()
    if path.with_suffix(".idx").exists():
        return MegatronUnit, MegatronIndex.open(path).count_documents(path), ()
    magic, version, tokens = (*np.fromfile(path, "<i4", 3).tolist(), 0, 0, 0)[:3]
    if magic in {known for known, _ in LLMC_DTYPES}:
        dtype = LLMC_DTYPES.get((magic, version))
        if dtype is None:
            raise UserError(f"{path}: a file of llm.c of version {version}, which is not read; write it with llm.c's dev/data")
        if size != LLMC_HEADER_BYTES + tokens * np.dtype(dtype).itemsize:
            raise UserError(f"{path}: {size:,} bytes, but its header says {tokens:,} tokens: truncated, or not of llm.c")
        return FlatUnit, tokens, (LLMC_HEADER_BYTES, dtype)
    if size % 2:
        raise UserError(f"{path}: no tokens of nanoGPT, which are two bytes each: it has {size:,} bytes")
    return FlatUnit, size // 2, (0, "<u2")


def find_token_files(spec: str) -> list[Path]:
    """The files of tokens that a path names: itself, or all in a folder; none if it is something else."""
    root = expand_home(spec)
    if root.suffix == ".idx" and root.with_suffix(".bin").is_file():
        root = root.with_suffix(".bin")
    if root.is_file():
        return [root] if root.suffix in TOKEN_SUFFIXES else []
    return [path for path in list_files(root) if path.suffix in TOKEN_SUFFIXES] if root.is_dir() else []


def open_token_source(spec: str, paths: Sequence[Path], tokenizer: Tokenizer, separator_id: int | None = None) -> TokenSource:
    """The tokenized corpus in these files, of this tokenizer; those of the split train, where a folder's files name splits.

    Documents end at the tokenizer's end-of-text id, at `separator_id`, and before a beginning-of-text id.
    """
    if separator_id is not None and separator_id >= tokenizer.vocab_size:
        raise UserError(f"separator_id {separator_id:,}: the vocabulary has ids up to {tokenizer.vocab_size - 1:,}")
    separators = sorted({*tokenizer.named_ids, *([] if separator_id is None else [separator_id])})
    root, left_out = expand_home(spec), Counter[str]()
    if root.is_dir():
        paths, left_out = choose_split(paths, root, "train")
    files = stat_files(paths, root if root.is_dir() else root.parent)
    return TokenSource(spec, files, tuple(separators), tokenizer.vocab_size, left_out=tuple(left_out.most_common()))
