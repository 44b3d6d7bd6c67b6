"""Sources of text: each as a list of units of work that any process can read.

A source knows names, sizes and times. Text is read by its units, one document at a time, in an order that never changes.
Nothing here tokenizes, shuffles or writes.
"""

import json
import os
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import xxhash

from lmforge.data.sources.records import (
    COMPRESSION_SUFFIXES,
    JSON_SUFFIXES,
    ReadProgress,
    content_suffix,
    decode_utf8,
    json_lines,
    line_location,
    open_decompressed,
    open_parquet,
    parquet_rows,
    record_text,
    require_fields,
)
from lmforge.errors import UserError
from lmforge.untrusted import read_stream

# fmt: off
TEXT_SUFFIXES = frozenset({
    ".txt", ".text", ".md", ".markdown", ".rst", ".adoc", ".org", ".tex", ".html", ".htm", ".xml", ".css", ".yaml", ".yml",
    ".toml", ".ini", ".cfg", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".kt", ".scala", ".js", ".jsx",
    ".ts", ".tsx", ".go", ".rs", ".rb", ".php", ".pl", ".lua", ".r", ".jl", ".sh", ".bash", ".sql", ".swift", ".cs", ".hs",
})
# What to do with files that are not read.
CONVERSIONS = {
    "convert its rows to .jsonl or .parquet, with the text in one field": (
        ".csv", ".tsv", ".xls", ".xlsx", ".ods", ".arrow", ".feather", ".avro", ".orc", ".sqlite", ".db",
    ),
    "extract its text to a .txt": (".pdf", ".doc", ".docx", ".odt", ".rtf", ".epub", ".mobi", ".ppt", ".pptx"),
    "unpack it; of packed files .gz and .zst are read": (".zip", ".tar", ".tgz", ".bz2", ".xz", ".7z", ".rar", ".lz4"),
}
# fmt: on
TEXT_FIELD_HINT = "; `lmforge prepare --text_field` names another"
OTHER_CONVERSION = "if it is plain text, rename it to .txt; if not, extract its text"
MARKUP_SUFFIXES = (".html", ".htm", ".xhtml")
TEXT_UNIT_BYTES = 2 << 20
JSONL_UNIT_BYTES = 16 << 20
MAX_DOCUMENT_BYTES = 2**32  # of a text file, which is one document
# A line is tokenized at once, which takes a hundred bytes of memory a character.
MAX_LINE_CHARACTERS = 2**23
SNIFFED_BYTES = 1 << 16

# Parts of the standard library that do not read as code: encodings and the files below are generated tables, pydoc_data is a
# manual, and tests are mostly literals. Installed packages are not part of the library.
STDLIB_EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"})
STDLIB_EXCLUDED_FILES = frozenset({"html/entities.py", "msilib/schema.py", "msilib/sequence.py", "stringprep.py"})


class SourceUnit(Protocol):
    """A part of a source that one process reads: small, picklable, and the same on every run."""

    @property
    def size(self) -> int:
        """Bytes on the disk, for progress."""

    def read(self, progress: ReadProgress | None = None) -> Iterator[str]:
        """The text of each document, empty ones included. Raises UserError naming file and place if one cannot be read.

        With each document `progress` says how much of `size` has been read.
        """


@dataclass(frozen=True)
class SourceFile:
    path: str
    name: str  # relative to the source, so that a moved corpus is the same corpus
    size: int
    modified_ns: int


@dataclass(frozen=True)
class TextSource:
    """The files of a corpus, sorted. `skipped_kinds` counts those of a folder that are not read, by suffix."""

    spec: str
    files: tuple[SourceFile, ...]
    text_field: str
    skipped_kinds: tuple[tuple[str, int], ...] = ()

    @property
    def skipped_files(self) -> int:
        return sum(count for _, count in self.skipped_kinds)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def num_markup_files(self) -> int:
        """Files of HTML, of which the markup is text too."""
        return sum(content_suffix(file.name) in MARKUP_SUFFIXES for file in self.files)

    def fingerprint(self) -> str:
        """A hash that changes when a file is added, removed, resized or touched, or another field is read."""
        content = [self.text_field, [(file.name, file.size, file.modified_ns) for file in self.files]]
        return xxhash.xxh3_128_hexdigest(json.dumps(content).encode())

    def units(self) -> list[SourceUnit]:
        """All units of work, in a fixed order."""
        units: list[SourceUnit] = []
        texts: list[SourceFile] = []
        size = 0
        for file in self.files:
            suffix = content_suffix(file.name)
            if suffix == ".parquet":
                units.extend(_parquet_units(file, self.text_field))
            elif suffix not in JSON_SUFFIXES:
                if texts and size + file.size > TEXT_UNIT_BYTES:
                    units.append(self._text_unit(texts))
                    texts, size = [], 0
                texts.append(file)
                size += file.size
            elif Path(file.name).suffix in COMPRESSION_SUFFIXES:
                units.append(JsonlUnit(file.path, 0, None, file.size, self.text_field))
            else:
                for start in range(0, file.size, JSONL_UNIT_BYTES):
                    stop = min(start + JSONL_UNIT_BYTES, file.size)
                    units.append(JsonlUnit(file.path, start, stop, stop - start, self.text_field))
        if texts:
            units.append(self._text_unit(texts))
        return units

    def _text_unit(self, files: list[SourceFile]) -> SourceUnit:
        unit = PythonUnit if self.spec == "stdlib" else TextUnit
        return unit(tuple(file.path for file in files), sum(file.size for file in files))


def open_text_source(spec: str, text_field: str = "text") -> TextSource:
    """The corpus that `spec` names: "stdlib", a file, or a folder searched to any depth.

    "stdlib" is the standard library of the running Python. A text file is one document; a line of a .jsonl or a row of a
    .parquet holds one in `text_field`; .gz and .zst are decompressed. Raises UserError if there is nothing to read, or for a
    single file of another kind.
    """
    skipped = Counter[str]()
    if spec == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        paths = [path for path in _walk_files(root, STDLIB_EXCLUDED_FOLDERS) if _is_library_code(path.relative_to(root))]
    elif (root := Path(spec).expanduser()).is_dir():
        every = list(_walk_files(root))
        # Among other files a bare .json is a settings file more often than a corpus.
        kinds = TEXT_SUFFIXES | JSON_SUFFIXES | {".parquet"}
        paths = [path for path in every if content_suffix(path.name) in kinds and path.suffix != ".json"]
        skipped.update(content_suffix(path.name) or "without a suffix" for path in sorted(set(every).difference(paths)))
        if not paths:
            raise UserError(f"{spec}: holds no text: looked for files such as .txt, .md, .py, .jsonl, .jsonl.gz, .parquet")
    elif root.is_file():
        _check_is_text(root)
        root, paths = root.parent, [root]
    else:
        raise UserError(f'{spec}: no such file or folder: give a path, or "stdlib"')
    files = []
    for path in paths:
        name, status = path.relative_to(root).as_posix(), path.stat()
        files.append(SourceFile(str(path.absolute()), name, status.st_size, status.st_mtime_ns))
    if not any(file.size for file in files):
        raise UserError(f"{spec}: empty: there is no text in it")
    return TextSource(spec, tuple(sorted(files, key=lambda file: file.name)), text_field, tuple(skipped.most_common()))


def _check_is_text(path: Path) -> None:
    """Raise UserError, with what to do, for a file of a kind that is not read. Without a suffix it is text, unless binary."""
    suffix = content_suffix(path.name)
    if suffix in TEXT_SUFFIXES or suffix in JSON_SUFFIXES or suffix == ".parquet":
        return
    way = next((way for way, suffixes in CONVERSIONS.items() if suffix in suffixes), OTHER_CONVERSION)
    if suffix:
        raise UserError(f"{path}: {suffix} files are not read: {way}")
    with open_decompressed(path) as file:
        if b"\0" in file.read(SNIFFED_BYTES):
            raise UserError(f"{path}: a binary file: {way}")


def _has_overlong_line(text: str) -> bool:
    start = 0
    while len(text) - start > MAX_LINE_CHARACTERS:
        start = text.rfind("\n", start, start + MAX_LINE_CHARACTERS) + 1
        if not start:
            return True
    return False


def _overlong_line(place: str) -> UserError:
    return UserError(f"{place}: a line of more than {MAX_LINE_CHARACTERS:,} characters: break it, or leave the document out")


def _walk_files(root: Path, excluded: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Every file below a folder, without hidden ones."""

    def stop(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from None

    for folder, folders, names in os.walk(root, onerror=stop):
        folders[:] = [name for name in folders if name not in excluded and not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _is_library_code(path: Path) -> bool:
    generated = path.as_posix() in STDLIB_EXCLUDED_FILES or path.name.startswith("_sysconfigdata")
    return path.suffix == ".py" and not generated


# --- units -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextUnit:
    """Text files, one document each."""

    paths: tuple[str, ...]
    size: int

    def read(self, progress: ReadProgress | None = None) -> Iterator[str]:
        progress = progress or ReadProgress()
        for path in self.paths:
            with open_decompressed(path) as file:
                text = decode_utf8(read_stream(file, path, MAX_DOCUMENT_BYTES, partial(_overlong_text, path)), path)
                progress.bytes += file.disk_position
            if _has_overlong_line(text):
                raise _overlong_line(path)
            yield text


def _overlong_text(path: str, message: str) -> UserError:
    return UserError(f"{path}: a text of more than {MAX_DOCUMENT_BYTES:,} bytes is one document here: split it")


class PythonUnit(TextUnit):
    """Python files, one document each, in the encoding that each declares."""

    def read(self, progress: ReadProgress | None = None) -> Iterator[str]:
        for path in self.paths:
            try:
                with tokenize.open(path) as file:
                    yield file.read()
            except (SyntaxError, UnicodeDecodeError):
                pass  # a file with a wrong declaration is one of Python's own tests


@dataclass(frozen=True)
class JsonlUnit:
    """The lines of JSON that begin at bytes `start` … `stop` − 1; a compressed file is one unit."""

    path: str
    start: int
    stop: int | None
    size: int
    text_field: str

    def read(self, progress: ReadProgress | None = None) -> Iterator[str]:
        for offset, record in json_lines(self.path, self.start, self.stop, progress):
            try:
                require_fields(record, self.text_field, hint=TEXT_FIELD_HINT)
                text = record_text(record, self.text_field)
            except UserError as problem:
                raise UserError(f"{line_location(self.path, offset)}: {problem}") from None
            if _has_overlong_line(text):
                raise _overlong_line(line_location(self.path, offset))
            yield text


@dataclass(frozen=True)
class ParquetUnit:
    """One row group."""

    path: str
    row_group: int
    rows: int
    size: int
    text_field: str

    def read(self, progress: ReadProgress | None = None) -> Iterator[str]:
        progress = progress or ReadProgress()
        for number, row in enumerate(parquet_rows(self.path, [self.text_field], self.row_group), start=1):
            progress.bytes = self.size * number // self.rows
            text = row[self.text_field] or ""
            if _has_overlong_line(text):
                raise _overlong_line(f"{self.path}, row {number} of group {self.row_group + 1}")
            yield text


def _parquet_units(file: SourceFile, name: str) -> list[SourceUnit]:
    import pyarrow

    with open_parquet(file.path) as parquet:
        schema, metadata = parquet.schema_arrow, parquet.metadata
    if name not in schema.names:
        raise UserError(f"{file.path}: no field {name!r}: there are {', '.join(sorted(schema.names))}{TEXT_FIELD_HINT}")
    dtype = schema.field(name).type
    if not (pyarrow.types.is_string(dtype) or pyarrow.types.is_large_string(dtype)):
        raise UserError(f"{file.path}: the field {name!r} is not text but {dtype}")
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    return [ParquetUnit(file.path, number, group.num_rows, group.total_byte_size, name) for number, group in enumerate(groups)]
