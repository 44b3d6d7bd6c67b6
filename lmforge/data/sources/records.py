"""Records of files: JSON lines, one JSON list, or parquet, compressed or not. All other modules read these formats through this
one.

Callers interpret the fields: `text_sources.py` reads one text of each record, `chat/` reads conversations.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmforge.errors import UserError
from lmforge.untrusted import BYTE_ORDER_MARK, CHUNK_BYTES, expand_home, list_names, parse_json, read_stream

if TYPE_CHECKING:
    import pyarrow.parquet

JSON_SUFFIXES = frozenset({".jsonl", ".ndjson", ".json"})
COMPRESSION_SUFFIXES = {".gz": "gzip", ".zst": "zstd"}
MAX_LINE_BYTES = 2**26
MAX_LIST_BYTES = 2**30  # of a file that is one JSON list
READ_BUFFER_BYTES = 1 << 18
PARQUET_BATCH_ROWS = 1000

Record = dict[str, Any]


@dataclass
class ReadProgress:
    """The progress of a reader: bytes of the file on the disk, which may be compressed. left_out: documents that a hook
    removed.
    """

    bytes: int = 0
    left_out: int = 0


class SourceReader(io.BufferedReader):
    """A file as its bytes, decompressed. `file` is the one on the disk, where that is another."""

    def __init__(self, content: Any, file: Any = None) -> None:
        super().__init__(content, READ_BUFFER_BYTES)
        self._file = file

    @property
    def disk_position(self) -> int:
        """How many bytes of the file on the disk have been read."""
        return self.tell() if self._file is None else int(self._file.tell())


def content_suffix(name: str) -> str:
    """The suffix of a file's name without that of the compression, in lower case."""
    path = Path(name)
    return Path(path.stem if path.suffix in COMPRESSION_SUFFIXES else name).suffix.lower()


def find_record_files(path: str | Path) -> list[Path]:
    """The file itself, or all files of records in a folder, sorted; `~` is expanded. Raises UserError if there are none, or for
    a single file of another kind; without a suffix it is taken for JSON lines."""
    root, known = expand_home(path), JSON_SUFFIXES | {".parquet"}
    if root.is_file():
        if (suffix := content_suffix(root.name)) and suffix not in known:
            raise UserError(f"{path}: {suffix} files are not read; convert the records to .jsonl or .parquet")
        return [root]
    if not root.is_dir():
        raise UserError(f"{path}: no such file or folder")
    files = sorted(file for file in root.iterdir() if file.is_file() and content_suffix(file.name) in known)
    if not files:
        raise UserError(f"{path}: holds no records: looked for .jsonl, .json, .parquet, and these with .gz or .zst")
    return files


def read_records(path: str | Path) -> Iterator[tuple[str, Record]]:
    """("FILE, record N", record) of a file, or of all such files of a folder, sorted; N counts from 1 in each file.

    .jsonl, .ndjson and .json (lines, or one list), these with .gz or .zst, and .parquet. Raises UserError naming the place.
    """
    for file in find_record_files(path):
        records = parquet_rows(file) if content_suffix(file.name) == ".parquet" else _json_list_or_lines(file)
        for number, record in enumerate(records, start=1):
            yield f"{file}, record {number}", record


def _json_list_or_lines(path: Path) -> Iterator[Record]:
    with open_decompressed(path) as file:
        if file.peek().removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"["):
            content = read_stream(file, str(path), MAX_LIST_BYTES)
            hint = "a file that begins with [ must be one JSON list of objects"
            yield from parse_json(content, list[Record], str(path), max_bytes=MAX_LIST_BYTES, hint=hint, allow_nan=True)
            return
    yield from (record for _, record in json_lines(path))


def json_lines(
    path: str | Path, start: int = 0, stop: int | None = None, progress: ReadProgress | None = None
) -> Iterator[tuple[int, Record]]:
    """(byte offset, object) of each line that begins at bytes `start` … `stop` − 1, or to the end. Blank lines are skipped.

    Raises UserError naming file and line if one is not UTF-8, not a JSON object, or longer than MAX_LINE_BYTES.
    """
    progress = progress or ReadProgress()
    with open_decompressed(path) as file:
        offset = start
        if start:
            # A line belongs to the range in which it begins; the rest of an earlier line is read with the previous range.
            file.seek(start - 1)
            offset += _skip_line(file) - 1
        while (stop is None or offset < stop) and (line := file.readline(MAX_LINE_BYTES + 1)):
            if len(line) > MAX_LINE_BYTES:
                limit = f"a line of more than {MAX_LINE_BYTES:,} bytes; split the record, or leave it out"
                raise UserError(f"{line_location(path, offset)}: {limit}")
            progress.bytes = file.disk_position - start
            content = line.removeprefix(BYTE_ORDER_MARK)
            if content and not content.isspace():
                yield offset, _parse_line(content, path, offset)
            offset += len(line)


def _skip_line(file: io.BufferedReader) -> int:
    """Read to the end of a line, however long it is, and return how many bytes that was."""
    skipped = 0
    while piece := file.readline(CHUNK_BYTES):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped


def _parse_line(line: bytes, path: str | Path, offset: int) -> Record:
    try:
        return parse_json(line, Record, "", max_bytes=MAX_LINE_BYTES, allow_nan=True)
    except UserError as problem:
        decode_utf8(line, path, offset)  # names the byte, for an encoding error
        surrogate = ": half of a surrogate pair, which UTF-8 cannot encode" if "of hex escape" in str(problem) else ""
        raise UserError(f"{line_location(path, offset)}{problem}{surrogate}") from None


def line_location(path: str | Path, offset: int) -> str:
    """`FILE:LINE` of the line at a byte offset. Reads the file up to there: for messages only."""
    with open_decompressed(path) as file:
        seen, line = 0, 1
        while seen < offset:
            seen, line = seen + _skip_line(file), line + 1
    return f"{path}:{line}"


def parquet_rows(path: str | Path, columns: list[str] | None = None, row_group: int | None = None) -> Iterator[Record]:
    """The rows of a parquet file, or of one of its row groups. Raises UserError if it cannot be read."""
    with open_parquet(path) as parquet:
        row_groups = None if row_group is None else [row_group]
        for batch in parquet.iter_batches(PARQUET_BATCH_ROWS, row_groups, columns):
            yield from batch.to_pylist()


@contextmanager
def open_parquet(path: str | Path) -> Iterator["pyarrow.parquet.ParquetFile"]:
    """A parquet file; what pyarrow raises in the block becomes a UserError."""
    import pyarrow.parquet

    if Path(path).suffix in COMPRESSION_SUFFIXES:
        raise UserError(f"{path}: parquet is compressed within: unpack it")
    try:
        with pyarrow.parquet.ParquetFile(path) as parquet:
            yield parquet
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as parquet: {error}") from None


def require_fields(record: Record, *names: str, hint: str = "") -> None:
    """Raises UserError naming the first of these fields that a record lacks, and those it has."""
    for name in names:
        if name not in record:
            raise UserError(f"no field {name!r}: there are {list_names(record)}{hint}")


def record_text(record: Record, name: str) -> str:
    """The text in a field; empty if the field is null or missing. Raises UserError if it is not text."""
    text = record.get(name)
    if not isinstance(text, str | None):
        raise UserError(f"the field {name!r} is not text but {type(text).__name__}")
    return text or ""


@contextmanager
def open_decompressed(path: str | Path) -> Iterator[SourceReader]:
    """A file as its bytes, decompressed by its suffix. OSError in the block becomes a UserError."""
    try:
        with _open_by_suffix(path) as file:
            yield file
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def _open_by_suffix(path: str | Path) -> SourceReader:
    codec = COMPRESSION_SUFFIXES.get(Path(path).suffix)
    if codec is None:
        return SourceReader(io.FileIO(path))
    # Arrow's, because it notices a truncated .zst, which zstandard's own reader takes for the end.
    import pyarrow

    file = pyarrow.OSFile(str(path))
    return SourceReader(pyarrow.CompressedInputStream(file, codec), file)


def decode_utf8(content: bytes, path: str | Path, offset: int = 0) -> str:
    """Bytes of a file, from byte `offset` on, as text without a byte order mark. Raises UserError if they are not UTF-8."""
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {offset + error.start}; convert the file, or leave it out") from None
