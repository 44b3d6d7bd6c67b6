"""Where text comes from: each kind of source as a list of units of work that any process can read.

A source knows names, sizes and times; text is read by its units, a document at a time, in an order that never changes.
Nothing here tokenises, shuffles or writes.
"""

import io
import json
import os
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import xxhash

from lmforge.errors import UserError

# fmt: off
TEXT_SUFFIXES = frozenset({
    ".txt", ".text", ".md", ".markdown", ".rst", ".adoc", ".org", ".tex", ".html", ".htm", ".xml", ".css", ".yaml", ".yml",
    ".toml", ".ini", ".cfg", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".kt", ".scala", ".js", ".jsx",
    ".ts", ".tsx", ".go", ".rs", ".rb", ".php", ".pl", ".lua", ".r", ".jl", ".sh", ".bash", ".sql", ".swift", ".cs", ".hs",
})
# fmt: on
JSON_SUFFIXES = frozenset({".jsonl", ".ndjson", ".json"})
COMPRESSION_SUFFIXES = frozenset({".gz", ".zst"})
TEXT_UNIT_BYTES = 2 << 20
JSONL_UNIT_BYTES = 16 << 20

# Of the standard library, what does not read as code: encodings and the files below are tables that programs wrote,
# pydoc_data is a manual quoted whole, and tests are mostly literals. Installed packages are not the library at all.
STDLIB_EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"})
STDLIB_EXCLUDED_FILES = frozenset({"html/entities.py", "msilib/schema.py", "msilib/sequence.py", "stringprep.py"})


@dataclass(frozen=True)
class Document:
    """A text and where it is from, for messages."""

    name: str
    text: str


class SourceUnit(Protocol):
    """A part of a source that one process reads: small, picklable, and the same on every run."""

    @property
    def size(self) -> int:
        """Its size on disk, for progress."""
        ...

    def read(self) -> Iterator[Document]:
        """Its documents, empty ones included. UserError naming file and place where one cannot be read."""
        ...


@dataclass(frozen=True)
class SourceFile:
    path: str
    name: str  # relative to the source, so that a moved corpus is the same corpus
    size: int
    modified_ns: int


@dataclass(frozen=True)
class TextSource:
    """The files of a corpus, sorted. `left_out` counts those whose kind is not known."""

    spec: str
    files: tuple[SourceFile, ...]
    text_field: str
    skipped_files: int = 0

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def fingerprint(self) -> str:
        """Changes when a file is added, removed, resized or touched, or another field is read."""
        facts = [self.text_field, [(file.name, file.size, file.modified_ns) for file in self.files]]
        return xxhash.xxh3_128_hexdigest(json.dumps(facts).encode())

    def units(self) -> list[SourceUnit]:
        """All the work, in a fixed order."""
        units: list[SourceUnit] = []
        texts: list[SourceFile] = []
        size = 0
        for file in self.files:
            kind = content_suffix(file.name)
            if kind not in JSON_SUFFIXES and kind != ".parquet":
                if texts and size + file.size > TEXT_UNIT_BYTES:
                    units.append(self._text_unit(texts))
                    texts, size = [], 0
                texts.append(file)
                size += file.size
            elif kind == ".parquet":
                units.extend(_parquet_units(file, self.text_field))
            elif Path(file.name).suffix in COMPRESSION_SUFFIXES:
                units.append(JsonlUnit(file.path, 0, file.size, self.text_field))
            else:
                for start in range(0, file.size, JSONL_UNIT_BYTES):
                    stop = min(start + JSONL_UNIT_BYTES, file.size)
                    units.append(JsonlUnit(file.path, start, stop, self.text_field))
        if texts:
            units.append(self._text_unit(texts))
        return units

    def _text_unit(self, files: list[SourceFile]) -> SourceUnit:
        paths, size = tuple(file.path for file in files), sum(file.size for file in files)
        return PythonUnit(paths, size) if self.spec == "stdlib" else TextUnit(paths, size)


def open_text_source(spec: str, text_field: str = "text") -> TextSource:
    """The corpus that `spec` names: "stdlib", a file, or a folder searched to any depth.

    "stdlib" is the running Python's own standard library. A text file is one document; a line of a .jsonl or a row of a
    .parquet holds one in `text_field`; .gz and .zst are read through. UserError if there is nothing to read.
    """
    if spec == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        paths = [path for path in _walk_files(root, STDLIB_EXCLUDED_FOLDERS) if _is_library_code(path.relative_to(root))]
        return _build_source(spec, root, paths, text_field)
    root = Path(spec).expanduser()
    if root.is_dir():
        paths = list(_walk_files(root))
        # Among other files a bare .json is a settings file more often than a corpus.
        kinds = TEXT_SUFFIXES | JSON_SUFFIXES | {".parquet"}
        known = [path for path in paths if content_suffix(path.name) in kinds and path.suffix != ".json"]
        if not known:
            raise UserError(f"{spec}: holds no text: looked for files such as .txt, .md, .py, .jsonl, .jsonl.gz, .parquet")
        return _build_source(spec, root, known, text_field, skipped_files=len(paths) - len(known))
    if not root.is_file():
        raise UserError(f'{spec}: no such file or folder: give a path, or "stdlib"')
    return _build_source(spec, root.parent, [root], text_field)


def _build_source(spec: str, root: Path, paths: Iterable[Path], text_field: str, skipped_files: int = 0) -> TextSource:
    files = []
    for path in paths:
        facts = path.stat()
        name = path.relative_to(root).as_posix()
        files.append(SourceFile(str(path.absolute()), name, facts.st_size, facts.st_mtime_ns))
    if not any(file.size for file in files):
        raise UserError(f"{spec}: empty: there is no text in it")
    return TextSource(spec, tuple(sorted(files, key=lambda file: file.name)), text_field, skipped_files)


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


def content_suffix(name: str) -> str:
    """What a file holds, by its name without the compression."""
    path = Path(name)
    return Path(path.stem if path.suffix in COMPRESSION_SUFFIXES else name).suffix.lower()


# --- units -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextUnit:
    """Text files, a document each."""

    paths: tuple[str, ...]
    size: int

    def read(self) -> Iterator[Document]:
        for path in self.paths:
            with open_decompressed(path) as file:
                yield Document(path, decode_utf8(file.read(), path, 0))


@dataclass(frozen=True)
class PythonUnit:
    """Python files, a document each, in whatever encoding each declares."""

    paths: tuple[str, ...]
    size: int

    def read(self) -> Iterator[Document]:
        for path in self.paths:
            try:
                with tokenize.open(path) as file:
                    yield Document(path, file.read())
            except (SyntaxError, UnicodeDecodeError):
                pass  # a file that belies its own declaration is a test of Python's, and not the user's to mend


@dataclass(frozen=True)
class JsonlUnit:
    """The lines of JSON that begin in a range of bytes of a file; a compressed file is one range."""

    path: str
    start: int
    stop: int
    text_field: str

    @property
    def size(self) -> int:
        return self.stop - self.start

    def read(self) -> Iterator[Document]:
        with open_decompressed(self.path) as file:
            at, stop = self.start, self.stop
            if Path(self.path).suffix in COMPRESSION_SUFFIXES:
                stop = -1
            elif at:
                # A line belongs to the range it begins in, so the rest of one begun before is another's.
                file.seek(at - 1)
                at += len(file.readline()) - 1
            while stop < 0 or at < stop:
                line = file.readline()
                if not line:
                    return
                if not line.isspace():
                    yield Document(f"{self.path} at byte {at}", self._text(line, at))
                at += len(line)

    def _text(self, line: bytes, at: int) -> str:
        try:
            record = json.loads(decode_utf8(line, self.path, at))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self._location(at)}: not JSON: {error}") from None
        if not isinstance(record, dict):
            raise UserError(f"{self._location(at)}: expected an object with the field {self.text_field!r}")
        if self.text_field not in record:
            fields = ", ".join(sorted(record)) or "none"
            raise UserError(f"{self._location(at)}: no field {self.text_field!r}: there are {fields}")
        text = record[self.text_field]
        if text is None:
            return ""
        if not isinstance(text, str):
            raise UserError(f"{self._location(at)}: the field {self.text_field!r} is not text but {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"{self._location(at)}: the text has half of a surrogate pair, which no encoding holds") from None
        return text

    def _location(self, at: int) -> str:
        """file:line, counted only when something is wrong."""
        with open_decompressed(self.path) as file:
            seen, line = 0, 1
            while seen < at:
                seen, line = seen + len(file.readline()), line + 1
        return f"{self.path}:{line}"


@dataclass(frozen=True)
class ParquetUnit:
    """One row group."""

    path: str
    row_group: int
    size: int
    text_field: str

    def read(self) -> Iterator[Document]:
        import pyarrow
        import pyarrow.parquet

        try:
            column = pyarrow.parquet.ParquetFile(self.path).read_row_group(self.row_group, [self.text_field]).column(0)
            for row, text in enumerate(column):
                yield Document(f"{self.path} group {self.row_group} row {row}", text.as_py() or "")
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise UserError(f"{self.path}: row group {self.row_group} cannot be read: {error}") from None


def _parquet_units(file: SourceFile, text_field: str) -> Iterator[SourceUnit]:
    import pyarrow
    import pyarrow.parquet

    try:
        parquet = pyarrow.parquet.ParquetFile(file.path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{file.path}: not a parquet file: {error}") from None
    schema = parquet.schema_arrow
    if text_field not in schema.names:
        raise UserError(f"{file.path}: no field {text_field!r}: there are {', '.join(sorted(schema.names))}")
    kind = schema.field(text_field).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise UserError(f"{file.path}: the field {text_field!r} is not text but {kind}")
    for group in range(parquet.num_row_groups):
        yield ParquetUnit(file.path, group, parquet.metadata.row_group(group).total_byte_size, text_field)


# --- bytes -----------------------------------------------------------------------------------------------------------


@contextmanager
def open_decompressed(path: str) -> Iterator[BinaryIO]:
    """A file as its bytes, decompressed by its name; what the disk or the compression says of it becomes a UserError."""
    try:
        with _open_by_suffix(path) as file:
            yield file
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def _open_by_suffix(path: str) -> BinaryIO:
    if Path(path).suffix not in COMPRESSION_SUFFIXES:
        return open(path, "rb")
    # Arrow's, because it notices a truncated .zst, which zstandard's own reader takes for the end.
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(path, compression="detect"), 1 << 18)


def decode_utf8(raw: bytes, path: str, offset: int) -> str:
    """Bytes of a file, from byte `at` on, as text; UserError where they are not UTF-8."""
    try:
        return raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {offset + error.start}: convert the file, or leave it out") from None
