"""Corpora that other tools have tokenized, read as documents of ids.

    .arrow        fms-fsdp: an Arrow file whose record batches are documents, in a column `tokens`;
                  or rows of lists of ids
    .bin          nanoGPT: uint16 ids and nothing else
    any suffix    that a plugin registers with gives="tokens", such as those of
                  examples/token_files/

nanoGPT's say nowhere where documents end. In all of them an end-of-text or beginning-of-text id is
a boundary: it is left out, and `prepare` ends each document with the tokenizer's own end-of-text
id.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import cut, expand_home, list_names
from lmforge.core.foreign_code import describe_exception
from lmforge.text.sources.folders import choose_split, list_files
from lmforge.text.sources.plugin_unit import NO_READERS, PluginReaders
from lmforge.text.sources.records import ReadProgress
from lmforge.text.sources.text_sources import FileSource, stat_files

if TYPE_CHECKING:
    import pyarrow

TOKEN_SUFFIXES = frozenset({".bin", ".arrow"})
UNIT_BYTES = 16 << 20
CHUNK_TOKENS = 1 << 20
ARROW_COLUMNS = ("tokens", "input_ids")
FLAT_DTYPE = "<u2"

# The first int32 of a file of llm.c, which would otherwise be taken for one of nanoGPT.
LLMC_MAGICS = (20240520, 20240801)
PLUGIN_HINT = "which a plugin reads: --plugins examples/token_files/"


@dataclass(frozen=True)
class TokenUnit(ABC):
    """A part of a file that one process reads: the items that begin at `start` … `stop` − 1.

    The kind of file determines the items.
    """

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

        Raises UserError naming file and place for an id beyond the vocabulary, or if the file
        cannot be read.
        """
        try:
            for document, read in self._stored_documents():
                yield from self._split(document)
                progress.bytes = int(self.size * read)
            progress.bytes = self.size
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {error.strerror or error}") from None

    @abstractmethod
    def _stored_documents(self) -> Iterator[tuple[np.ndarray, float]]:
        """The stored ids of each document, after a check, and the fraction of the unit read."""

    def _split(self, document: np.ndarray) -> Iterator[np.ndarray]:
        """The parts between separators that are not empty.

        A document may be a whole file, so it is searched in chunks.
        """
        start = 0
        for first in range(0, len(document), CHUNK_TOKENS):
            found = np.isin(document[first : first + CHUNK_TOKENS], self.separators)
            for end in (first + np.flatnonzero(found)).tolist():
                if end > start:
                    yield document[start:end]
                start = end + 1
        if len(document) > start:
            yield document[start:]

    def _check(self, ids: np.ndarray, part: str, first: int) -> np.ndarray:
        """`ids`, which begin with number `first` of `part`.

        Raises UserError if one is beyond the vocabulary.
        """
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            at = int(np.flatnonzero((ids < 0) | (ids >= self.vocab_size))[0])
            raise UserError(
                f"{self.path}: id {first + at:,} of {part} is {int(ids[at]):,}, beyond the"
                f" vocabulary of {self.vocab_size:,}: name the tokenizer that made these tokens"
            )
        return ids


class FlatUnit(TokenUnit):
    """The ids of a file of nanoGPT: the documents that begin with ids `start` … `stop` − 1."""

    def _stored_documents(self) -> Iterator[tuple[np.ndarray, float]]:
        with open(self.path, "rb") as file:
            # Else the first document begins after a separator, which may be the id before.
            begins = self.start == 0
            at = max(0, self.start - 1)
            file.seek(at * np.dtype(FLAT_DTYPE).itemsize)
            pieces: list[np.ndarray] = []
            while len(ids := np.fromfile(file, FLAT_DTYPE, CHUNK_TOKENS)):
                self._check(ids, "the file", at)
                ends = np.flatnonzero(np.isin(ids, self.separators)).tolist()
                first = 0
                for end in ends:
                    if begins:
                        read = (at + end - self.start) / (self.stop - self.start)
                        yield np.concatenate([*pieces, ids[first:end]]), min(1.0, read)
                    pieces = []
                    begins = True
                    first = end + 1
                    if at + first >= self.stop:
                        return
                if begins:
                    pieces.append(ids[first:])
                at += len(ids)
            if pieces:
                yield np.concatenate(pieces), 1.0


class ArrowUnit(TokenUnit):
    """The record batches `start` … `stop` − 1 of an Arrow file."""

    def _stored_documents(self) -> Iterator[tuple[np.ndarray, float]]:
        with _open_arrow(self.path) as (reader, column):
            for number in range(self.start, self.stop):
                values = reader.get_batch(number).column(column)
                read = (number + 1 - self.start) / (self.stop - self.start)
                is_list = hasattr(values.type, "value_type")
                if values.null_count or (is_list and values.flatten().null_count):
                    raise UserError(
                        f"{self.path}: record batch {number:,} has rows or ids that are null"
                    )
                for row in values if is_list else [values]:
                    array = row.values if hasattr(row, "values") else row
                    ids = array.to_numpy(zero_copy_only=False)
                    yield self._check(ids, f"record batch {number:,}", 0), read


@dataclass(frozen=True)
class PluginTokenUnit(TokenUnit):
    """One file of a kind that a plugin reads."""

    kind: str
    readers: PluginReaders

    def _stored_documents(self) -> Iterator[tuple[np.ndarray, float]]:
        number = 0
        try:
            for given in self.readers.documents(self.kind, Path(self.path)):
                if (
                    not isinstance(given, np.ndarray)
                    or given.ndim != 1
                    or given.dtype.kind not in "iu"
                ):
                    raise UserError(
                        f"{self.path}, document {number:,}: the plugin gave no array of whole"
                        " numbers"
                    )
                yield self._check(given, f"document {number:,}", 0), 0.0
                number += 1
        except (UserError, OSError):
            raise
        except Exception as error:
            place = f"{self.path}, after {number:,} documents"
            raise UserError(
                f"{place}: document source {self.kind} raised {describe_exception(error)}"
            ) from error


@contextmanager
def _open_arrow(path: str) -> Iterator[tuple["pyarrow.ipc.RecordBatchFileReader", str]]:
    """A context with an Arrow file and its column of ids.

    In it pyarrow's exceptions become a UserError.
    """
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
            is_list = (
                pyarrow.types.is_list(kind)
                or pyarrow.types.is_large_list(kind)
                or pyarrow.types.is_fixed_size_list(kind)
            )
            if pyarrow.types.is_integer(kind.value_type if is_list else kind):
                return name
            raise UserError(f"{path}: the column {name!r} does not hold ids but {cut(str(kind))}")
    raise UserError(
        f"{path}: no column {' or '.join(ARROW_COLUMNS)}: there are {list_names(schema.names)}"
    )


@dataclass(frozen=True)
class TokenSource(FileSource):
    """A tokenized corpus, with its tokenizer."""

    separators: tuple[int, ...]
    vocab_size: int
    readers: PluginReaders = NO_READERS

    def _identity(self, files: list[tuple[str, int, int]]) -> list[Any]:
        identity: list[Any] = ["tokens", self.separators, files]
        if any(self.readers.reads_tokens(Path(file.name).suffix) for file in self.files):
            identity.append(self.readers.identity())
        return identity

    def units(self) -> list[TokenUnit]:
        """All units of work, in a fixed order.

        Raises UserError naming a file that is none of these kinds.
        """
        units: list[TokenUnit] = []
        for file in self.files:
            kind, total, options = _detect_kind(Path(file.path), file.size, self.readers)
            step = max(1, total * UNIT_BYTES // max(1, file.size))
            for start in range(0, total, step):
                stop = min(start + step, total)
                size = file.size * stop // total - file.size * start // total
                units.append(
                    kind(file.path, start, stop, size, self.separators, self.vocab_size, *options)
                )
        return units


def _detect_kind(
    path: Path, size: int, readers: PluginReaders
) -> tuple[type[TokenUnit], int, tuple[object, ...]]:
    """The kind of a file, its number of items, and further arguments of its units."""
    if readers.reads_tokens(path.suffix):
        return PluginTokenUnit, 1, (path.suffix.removeprefix("."), readers)
    if path.suffix == ".arrow":
        with _open_arrow(str(path)) as (reader, _):
            return ArrowUnit, reader.num_record_batches, ()
    if path.with_suffix(".idx").exists():
        raise UserError(f"{path}: tokens of Megatron-LM, {PLUGIN_HINT}megatron.py")
    if np.isin(np.fromfile(path, "<i4", 1), LLMC_MAGICS).any():
        raise UserError(f"{path}: tokens of llm.c, {PLUGIN_HINT}llmc.py")
    if size % 2:
        raise UserError(
            f"{path}: no tokens of nanoGPT, which are two bytes each: it has {size:,} bytes"
        )
    return FlatUnit, size // 2, ()


def find_token_files(spec: str, readers: PluginReaders = NO_READERS) -> list[Path]:
    """The files of tokens that a path names: itself, or all in a folder; else none."""
    root = expand_home(spec)

    def holds_tokens(path: Path) -> bool:
        return path.suffix in TOKEN_SUFFIXES or readers.reads_tokens(path.suffix)

    if root.suffix == ".idx" and root.with_suffix(".bin").is_file():
        root = root.with_suffix(".bin")
    paths = [root] if root.is_file() else []
    if root.is_dir():
        paths = list(list_files(root))
    return [path for path in paths if holds_tokens(path)]


def open_token_source(
    spec: str,
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    separator_id: int | None = None,
    readers: PluginReaders = NO_READERS,
) -> TokenSource:
    """The tokenized corpus in these files, of this tokenizer.

    Where a folder's files name splits, it has those of the split train. Documents end at the
    tokenizer's end-of-text id, at `separator_id`, and before a beginning-of-text id.
    """
    if separator_id is not None and separator_id >= tokenizer.vocab_size:
        raise UserError(
            f"separator_id {separator_id:,}: the vocabulary has ids up to"
            f" {tokenizer.vocab_size - 1:,}"
        )
    separators = set(tokenizer.named_ids)
    if separator_id is not None:
        separators.add(separator_id)
    root = expand_home(spec)
    left_out = Counter[str]()
    if root.is_dir():
        paths, left_out = choose_split(paths, root, "train")
    files = stat_files(paths, root if root.is_dir() else root.parent)
    return TokenSource(
        spec,
        files,
        tuple(sorted(separators)),
        tokenizer.vocab_size,
        readers,
        left_out=tuple(left_out.most_common()),
    )
