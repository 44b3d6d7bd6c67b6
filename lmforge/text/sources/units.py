"""Units of a source: parts that one process reads, and their documents.

`text_sources.py` divides files into units.

A unit is small, picklable, and the same on every run. Its documents come one at a time, in an order
that never changes.
"""

import csv
import io
import logging
import tokenize
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import read_stream
from lmforge.text.sources.records import (
    MAX_LINE_BYTES,
    ReadProgress,
    Record,
    content_suffix,
    decode_utf8,
    json_lines,
    open_decompressed,
    parquet_rows,
    record_text,
    require_fields,
)

TEXT_FIELD_HINT = "; `lmforge prepare --text_field` names another"
HTML_SUFFIXES = frozenset({".html", ".htm", ".xhtml"})
# It would print a line on standard error for each page without text, which is only an empty
# document.
logging.getLogger("trafilatura").addHandler(logging.NullHandler())
TABLE_DELIMITERS = {".csv": ",", ".tsv": "\t"}
MAX_DOCUMENT_BYTES = 2**32  # of a text file, which is one document
# A line is tokenized at once, which takes a hundred bytes of memory a character.
MAX_LINE_CHARACTERS = 2**23


class Document(NamedTuple):
    """A text of a source.

    fields: other data of its source, of a record, or the path of a file. location: its place, for
    messages; for a line of a compressed file it reads the file up to there.
    """

    text: str
    fields: Record
    location: Callable[[], str]


class SourceUnit(ABC):
    """A part of a source that one process reads."""

    size: int  # bytes on the disk, for progress

    @property
    @abstractmethod
    def file(self) -> str:
        """The name of the file that it is a part of, or of its first file."""

    @abstractmethod
    def documents(self, progress: ReadProgress, all_fields: bool) -> Iterator[Document]:
        """Each document, empty ones included.

        Raises UserError naming file and place if one cannot be read, unless `progress.unusable`
        leaves it out.

        With each document `progress` has the bytes of `size` that have been read. Without
        `all_fields`, `fields` may be empty.
        """

    def read(self, progress: ReadProgress | None = None) -> Iterator[str]:
        """The text of each document. Raises UserError for lines that are too long to tokenize too."""
        for document in self.documents(progress or ReadProgress(), False):
            check_lines(document.text, document.location)
            yield document.text


def check_lines(text: str, location: Callable[[], str]) -> None:
    """Raise UserError for a line that is too long to tokenize."""
    start = 0
    while len(text) - start > MAX_LINE_CHARACTERS:
        start = text.rfind("\n", start, start + MAX_LINE_CHARACTERS) + 1
        if not start:
            limit = f"a line of more than {MAX_LINE_CHARACTERS:,} characters"
            raise UserError(f"{location()}: {limit}: break it, or leave the document out")


def extract_text(page: str) -> str:
    """The main text of a page of HTML by trafilatura; empty without text.

    Where it finds none, that is all visible text.
    """
    import trafilatura

    text = trafilatura.extract(page, favor_recall=True, include_comments=False)
    return text or trafilatura.html2txt(page)


@dataclass(frozen=True)
class TextUnit(SourceUnit):
    """Text files, one document each."""

    paths: tuple[str, ...]
    size: int

    @property
    def file(self) -> str:
        return self.paths[0]

    def documents(self, progress: ReadProgress, all_fields: bool) -> Iterator[Document]:
        for path in self.paths:
            with open_decompressed(path) as file:
                with progress.unusable.leave_out():
                    refuse = partial(_overlong_text, path)
                    content = read_stream(file, path, MAX_DOCUMENT_BYTES, refuse)
                    text = decode_utf8(content, path)
                    if content_suffix(path) in HTML_SUFFIXES:
                        text = extract_text(text)
                    progress.bytes += file.disk_position
                    yield Document(text, {"path": path}, partial(str, path))


def _overlong_text(path: str, message: str) -> UserError:
    return UserError(
        f"{path}: a text of more than {MAX_DOCUMENT_BYTES:,} bytes is one document here; split it"
    )


class PythonUnit(TextUnit):
    """Python files, one document each, in the encoding that each declares."""

    def documents(self, progress: ReadProgress, all_fields: bool) -> Iterator[Document]:
        for path in self.paths:
            # A file with a wrong declaration is one of Python's own tests.
            with suppress(SyntaxError, UnicodeDecodeError), tokenize.open(path) as file:
                yield Document(file.read(), {"path": path}, partial(str, path))


def record_documents(
    record: Record | UserError, text_field: str, location: Callable[[], str], progress: ReadProgress
) -> Iterator[Document]:
    """The document of a record.

    `progress.unusable` gets a problem in place of a record, which names its place, and a record
    whose field is missing or not text.
    """
    if isinstance(record, UserError):
        progress.unusable.add(record)
        return
    with progress.unusable.leave_out(location):
        require_fields(record, text_field, hint=TEXT_FIELD_HINT)
        yield Document(record_text(record, text_field), record, location)


@dataclass(frozen=True)
class FileUnit(SourceUnit):
    """A file of records, or a part of one. The text of a record is in the field `text_field`."""

    path: str
    size: int
    text_field: str

    @property
    def file(self) -> str:
        return self.path


@dataclass(frozen=True)
class JsonlUnit(FileUnit):
    """The lines of JSON that begin at bytes `start` … `stop` − 1; a compressed file is one unit."""

    start: int
    stop: int | None

    def documents(self, progress: ReadProgress, all_fields: bool) -> Iterator[Document]:
        for location, record in json_lines(self.path, self.start, self.stop, progress):
            yield from record_documents(record, self.text_field, location, progress)


@dataclass(frozen=True)
class ParquetUnit(FileUnit):
    """One row group, whose text field has been checked."""

    row_group: int
    rows: int

    def documents(self, progress: ReadProgress, all_fields: bool) -> Iterator[Document]:
        columns = None if all_fields else [self.text_field]
        for number, row in enumerate(parquet_rows(self.path, columns, self.row_group), start=1):
            progress.bytes = self.size * number // self.rows
            location = partial(
                "{}, row {} of group {}".format, self.path, number, self.row_group + 1
            )
            yield from record_documents(row, self.text_field, location, progress)


class TableUnit(FileUnit):
    """A file of comma- or tab-separated values with a header, quoted as RFC 4180 has it.

    It is one unit, since a quoted field may contain line ends.
    """

    def documents(self, progress: ReadProgress, all_fields: bool) -> Iterator[Document]:
        csv.field_size_limit(MAX_LINE_BYTES)
        delimiter = TABLE_DELIMITERS[content_suffix(self.path)]
        with open_decompressed(self.path) as file:
            lines = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
            rows = csv.reader(lines, delimiter=delimiter, strict=True)
            row_number = 0
            try:
                header = next(rows, [])
                for row_number, row in enumerate(rows, start=1):
                    progress.bytes = file.disk_position
                    if not row:
                        continue
                    location = partial("{}, row {}".format, self.path, row_number)
                    record: Record | UserError = dict(zip(header, row, strict=False))
                    if len(row) != len(header):
                        record = UserError(
                            f"{location()}: {len(row)} fields, but the header names {len(header)}:"
                            " fix the row"
                        )
                    yield from record_documents(record, self.text_field, location, progress)
            except csv.Error as problem:
                raise UserError(
                    f"{self.path}, row {row_number + 1}: not a table: {problem}: quote it as RFC"
                    " 4180 has it"
                ) from None
            except UnicodeDecodeError:
                raise UserError(
                    f"{self.path}, after row {row_number}: not UTF-8; convert the file, or leave"
                    " it out"
                ) from None
