"""Records of files: JSON lines, one JSON list, or parquet, compressed or not.

All other modules read these formats through this one.

Callers interpret the fields: `text_sources.py` reads one text of each record, `text/chat/` reads
conversations.
"""

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmforge.core.errors import NothingToLearn, UserError, format_count, prefix_errors
from lmforge.core.files.untrusted import (
    BYTE_ORDER_MARK,
    CHUNK_BYTES,
    expand_home,
    list_names,
    parse_json,
    read_stream,
)
from lmforge.text.sources.folders import COMPRESSION_SUFFIXES, FileSplit, content_suffix, find_files

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

JSON_SUFFIXES = frozenset({".jsonl", ".ndjson", ".json"})
RECORD_SUFFIXES = JSON_SUFFIXES | {".parquet"}
MAX_LINE_BYTES = 2**26
UNUSABLE = "left-out.txt"  # beside what is made of records: a line for each that cannot be used
SPECIAL_TEXT_RATIO = 0.01  # of the records: fewer may be about special tokens
MAX_LIST_BYTES = 2**30  # of a file that is one JSON list
READ_BUFFER_BYTES = 1 << 18
PARQUET_BATCH_ROWS = 1000

Record = dict[str, Any]


class SourceReader(io.BufferedReader):
    """A file as its bytes, decompressed. `file` is the one on the disk, if that is another one."""

    def __init__(self, content: Any, file: Any = None) -> None:
        super().__init__(content, READ_BUFFER_BYTES)
        self._file = file

    @property
    def disk_position(self) -> int:
        """The number of bytes of the file on the disk that have been read."""
        return self.tell() if self._file is None else int(self._file.tell())


def find_record_files(path: str | Path, split: FileSplit = "train") -> Sequence[Path]:
    """The file itself, or the files of records of a split of a folder; `~` is expanded.

    Raises UserError if there are none, or for a single file of another kind; without a suffix it is
    taken for JSON lines.
    """
    root = expand_home(path)
    if root.is_file():
        suffix = content_suffix(root.name)
        if suffix and suffix not in RECORD_SUFFIXES:
            raise UserError(
                f"{path}: {suffix} files are not read; convert the records to .jsonl or .parquet"
            )
        return [root]
    if not root.is_dir():
        raise UserError(f"{path}: no such file or folder")
    files = find_files(root, RECORD_SUFFIXES, split).paths
    if not files:
        raise UserError(
            f"{path}: holds no records: looked for .jsonl, .json, .parquet, and these with .gz or"
            " .zst"
        )
    return files


def describe_folders(
    paths: Iterable[Path], split: FileSplit = "train", validation_paths: Iterable[Path] = ()
) -> str:
    """Notes on folders among these paths, each after `; `.

    They say what is left out of them, which folders within them are read, and what is both for
    training and for validation.
    """
    notes = []

    def files_of(members: Iterable[Path], of_split: FileSplit) -> set[Path]:
        """The files of these paths, whose folders are described in `notes`."""
        files: set[Path] = set()
        for path in members:
            root = expand_home(path)
            if root.is_dir():
                note = find_files(root, RECORD_SUFFIXES, of_split).describe(root)
                if note:
                    notes.append(f"; {root} {note}")
            files.update(file.resolve() for file in find_record_files(path, of_split))
        return files

    shared = sorted(files_of(paths, split) & files_of(validation_paths, "validation"))
    if shared:
        notes.append(
            f"; trains and validates on the same {format_count(len(shared), 'file')}, such as"
            f" {shared[0]}"
        )
    return "".join(notes)


@dataclass
class UnusableRecords:
    """Records that cannot be used.

    The first ends the command, unless `skip`; those without anything to learn do not.
    """

    skip: bool = False
    # Of those that were left out, with their places.
    problems: list[str] = field(default_factory=list)
    with_special_text: int = 0  # those used that hold the text of a special token, encoded as text

    def add(self, problem: UserError) -> None:
        """Leave out a record. Raises `problem` where it ends the command."""
        if not self.skip and not isinstance(problem, NothingToLearn):
            raise problem
        self.problems.append(str(problem))

    @contextmanager
    def leave_out(self, place: str | Callable[[], str] | None = None) -> Iterator[None]:
        """A context that leaves out the record at a place if it raises a UserError.

        place: gives the place, unless messages name it.
        """
        try:
            with prefix_errors(place) if place else nullcontext():
                yield
        except UserError as problem:
            self.add(problem)

    def __str__(self) -> str:
        """The number of records and the first, after `; `; empty if there are none."""
        if not self.problems:
            return ""
        number = len(self.problems)
        return f"; {number:,} left out that cannot be used, such as {self.problems[0]}"


@dataclass
class ReadProgress:
    """The progress of a reader.

    bytes: of the file on the disk, which may be compressed. left_out: documents that a hook
    removed. unusable: those that cannot be used.
    """

    bytes: int = 0
    left_out: int = 0
    unusable: UnusableRecords = field(default_factory=UnusableRecords)


def describe_special_text(count: int, records: int, option: str) -> str:
    """A note that `count` records spell special tokens, after `; `; empty where few do.

    These are encoded as text unless `option` is given.
    """
    if count <= SPECIAL_TEXT_RATIO * records:
        return ""
    return (
        f"; {count:,} spell special tokens in plain text, which is encoded as text ({option} makes"
        " tokens of it)"
    )


def read_records(
    path: str | Path, *, unusable: UnusableRecords | None = None
) -> Iterator[tuple[str, Record]]:
    """("FILE, record N", record) of a file, or of all such files in a folder.

    N counts from 1 in each file. The files are .jsonl, .ndjson and .json (lines, or one list),
    these with .gz or .zst, and .parquet. Raises UserError naming the place, unless `unusable`
    leaves the record out.
    """
    unusable = unusable or UnusableRecords()
    for file in find_record_files(path):
        if content_suffix(file.name) == ".parquet":
            records = parquet_rows(file)
        else:
            records = _json_list_or_lines(file)
        for number, record in enumerate(records, start=1):
            if isinstance(record, UserError):
                unusable.add(record)
            else:
                yield f"{file}, record {number}", record


def _json_list_or_lines(path: Path) -> Iterator[Record | UserError]:
    with open_decompressed(path) as file:
        if file.peek().removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"["):
            content = read_stream(file, str(path), MAX_LIST_BYTES)
            hint = "a file that begins with [ must be one JSON list of objects"
            items = parse_json(
                content,
                list[object],
                str(path),
                max_bytes=MAX_LIST_BYTES,
                hint=hint,
                allow_nan=True,
            )
            for number, item in enumerate(items, start=1):
                if isinstance(item, dict):
                    yield item
                else:
                    yield UserError(f"{path}, record {number}: not an object; {hint}")
            return
    yield from (record for _, record in json_lines(path, 0, None, ReadProgress()))


def json_lines(
    path: str | Path, start: int, stop: int | None, progress: ReadProgress
) -> Iterator[tuple[Callable[[], str], Record | UserError]]:
    """(place, object) of each line that begins at bytes `start` … `stop` − 1, or to the end.

    `place` is a function, since few places are needed. Blank lines are skipped.

    A line that is not UTF-8, not a JSON object, or longer than MAX_LINE_BYTES gives a UserError
    naming file and line.
    """
    with open_decompressed(path) as file:
        offset = start
        if start:
            # A line belongs to the range in which it begins; the rest of an earlier line is read
            # with the previous range.
            file.seek(start - 1)
            offset += _skip_line(file) - 1
        # Once, however many lines have to be named.
        first = cache(partial(_line_number, path, offset))
        number = -1
        while (stop is None or offset < stop) and (line := file.readline(MAX_LINE_BYTES + 1)):
            size = len(line)
            content = line.removeprefix(BYTE_ORDER_MARK)
            number += 1
            place = partial(_line_place, path, first, number)
            if size > MAX_LINE_BYTES:
                problem = UserError(
                    f"{place()}: a line of more than {MAX_LINE_BYTES:,} bytes; split the record, or"
                    " leave it out"
                )
                yield place, problem
                if not line.endswith(b"\n"):
                    size += _skip_line(file)
            elif content and not content.isspace():
                progress.bytes = file.disk_position - start
                yield place, _parse_line(content, path, offset, place)
            offset += size


def _skip_line(file: io.BufferedReader) -> int:
    """Read to the end of a line, however long it is, and return the number of its bytes."""
    skipped = 0
    while piece := file.readline(CHUNK_BYTES):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped


def _parse_line(
    line: bytes, path: str | Path, offset: int, place: Callable[[], str]
) -> Record | UserError:
    try:
        return parse_json(line, Record, "", max_bytes=MAX_LINE_BYTES, allow_nan=True)
    except UserError as problem:
        try:
            decode_utf8(line, path, offset)  # names the byte, for an encoding error
        except UserError as not_utf8:
            return not_utf8
        surrogate = ""
        if "of hex escape" in str(problem):
            surrogate = ": half of a surrogate pair, which UTF-8 cannot encode"
        return UserError(f"{place()}{problem}{surrogate}")


def _line_place(path: str | Path, first: Callable[[], int], number: int) -> str:
    return f"{path}:{first() + number}"


def _line_number(path: str | Path, offset: int) -> int:
    """The number of the line at a byte offset. Reads the file up to there: for messages only."""
    if not offset:
        return 1
    with open_decompressed(path) as file:
        seen = 0
        line = 1
        while seen < offset:
            seen += _skip_line(file)
            line += 1
    return line


def parquet_rows(
    path: str | Path, columns: list[str] | None = None, row_group: int | None = None
) -> Iterator[Record | UserError]:
    """The rows of a parquet file, or of one row group, as lines of JSON would have them.

    See `_to_json`. Columns that are null stay. Raises UserError if the file cannot be read.
    """
    of_group = "" if row_group is None else f" of group {row_group + 1}"
    with open_parquet(path) as parquet:
        row_groups = None if row_group is None else [row_group]
        rows = 0
        for batch in parquet.iter_batches(PARQUET_BATCH_ROWS, row_groups, columns):
            decoders = {field.name: _to_json(field.type) for field in batch.schema}
            for row in batch.to_pylist():
                rows += 1
                try:
                    yield {name: _decode(value, decoders[name]) for name, value in row.items()}
                except UserError as problem:
                    yield UserError(f"{path}, row {rows}{of_group}: {problem}")


def _to_json(kind: "pyarrow.DataType") -> Callable[[Any], Any] | None:
    """A function that turns a value of this type, not null, into what JSON has in its place.

    None where the value is that already.

    Arrow gives every struct of a column the same fields, most of them null: nulls in structs are
    left out, those in lists stay. Declared JSON is parsed, and keeps its nulls. Times become ISO
    8601, decimals floats, and bytes that are UTF-8 text.
    """
    import pyarrow
    from pyarrow import types

    if isinstance(kind, pyarrow.BaseExtensionType):
        known: dict[str, Callable[[Any], Any]] = {"arrow.json": _parse_json_text, "arrow.uuid": str}
        return known.get(kind.extension_name) or _to_json(kind.storage_type)
    if types.is_dictionary(kind):
        return _to_json(kind.value_type)
    if types.is_struct(kind):
        members = {field.name: _to_json(field.type) for field in kind}
        return lambda row: {
            name: _decode(row[name], to) for name, to in members.items() if row[name] is not None
        }
    if types.is_map(kind):
        to_value = _to_json(kind.item_type)
        return lambda items: {str(key): _decode(value, to_value) for key, value in items}
    if types.is_nested(kind):
        to_item = _to_json(kind.value_type)
        if to_item is None:
            return None
        return lambda items: [_decode(item, to_item) for item in items]
    if types.is_temporal(kind):
        return lambda value: value.isoformat() if hasattr(value, "isoformat") else str(value)
    if types.is_decimal(kind):
        return float
    is_binary = (
        types.is_binary,
        types.is_large_binary,
        types.is_binary_view,
        types.is_fixed_size_binary,
    )
    return _decode_bytes if any(is_kind(kind) for is_kind in is_binary) else None


def _decode(value: Any, decode: Callable[[Any], Any] | None) -> Any:
    return value if value is None or decode is None else decode(value)


def _parse_json_text(text: str) -> Any:
    return parse_json(
        text.encode(), object, "a value of a JSON column", max_bytes=MAX_LINE_BYTES, allow_nan=True
    )


def _decode_bytes(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


@contextmanager
def open_parquet(path: str | Path) -> Iterator["pyarrow.parquet.ParquetFile"]:
    """A context with a parquet file, in which pyarrow's exceptions become a UserError."""
    import pyarrow.parquet

    if Path(path).suffix in COMPRESSION_SUFFIXES:
        raise UserError(f"{path}: parquet is compressed within: unpack it")
    try:
        with pyarrow.parquet.ParquetFile(path) as parquet:
            yield parquet
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # such as two fields of one name
        raise UserError(f"{path}: cannot be read as parquet: {error}") from None


def require_fields(record: Record, *names: str, hint: str = "") -> None:
    """Raises UserError naming the first of these fields that a record lacks, and those it has."""
    for name in names:
        if name not in record:
            raise UserError(f"no field {name!r}: there are {list_names(record)}{hint}")


def record_text(record: Record, name: str) -> str:
    """The text in a field; empty if the field is null or missing.

    Raises UserError if it is not text.
    """
    text = record.get(name)
    if not isinstance(text, str | None):
        raise UserError(f"the field {name!r} is not text but {type(text).__name__}")
    return text or ""


@contextmanager
def open_decompressed(path: str | Path) -> Iterator[SourceReader]:
    """A context with a file, decompressed by its suffix, in which OSError becomes a UserError."""
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
    """Bytes of a file, from byte `offset` on, as text without a byte order mark.

    Raises UserError if they are not UTF-8.
    """
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not UTF-8 at byte {offset + error.start}; convert the file, or leave it out"
        ) from None
