"""Records of a file: objects with named fields, one after another, with a place that a message can point at.

Lines of JSON, one JSON list, or parquet, compressed or not. What the fields mean is the caller's business.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmforge.data.documents import COMPRESSED, LINES, decoded, opened, suffix
from lmforge.errors import Mistake

ROWS_AT_ONCE = 1000


def record_files(path: str | Path) -> list[Path]:
    """The file itself, or all files of records in a folder, by name; `~` is a home. Mistake where there are none."""
    root = Path(path).expanduser()
    try:
        if root.is_file():
            return [root]
        if not root.is_dir():
            raise Mistake(f"{path}: no such file or folder")
        files = sorted(file for file in root.iterdir() if file.is_file() and suffix(file.name) in LINES | {".parquet"})
    except OSError as problem:
        raise Mistake(f"{path}: cannot be read: {problem.strerror}") from None
    if not files:
        raise Mistake(f"{path}: holds no records: looked for .jsonl, .json, .parquet, and these with .gz or .zst")
    return files


def read_records(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """("FILE, record N", record) of a file, or of all such files in a folder by name; N counts from 1 in each file.

    .jsonl, .ndjson and .json (lines, or one list), these with .gz or .zst, and .parquet. Mistake naming file and record.
    """
    for file in record_files(path):
        records = _rows(file) if suffix(file.name) == ".parquet" else _objects(file)
        for number, record in enumerate(records, start=1):
            if not isinstance(record, dict):
                raise Mistake(f"{file}, record {number}: expected an object with named fields, not {type(record).__name__}")
            yield f"{file}, record {number}", record


def _objects(file: Path) -> Iterator[Any]:
    with opened(str(file)) as lines:
        at, number = 0, 0
        for line in lines:
            if not number and line.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
                try:
                    yield from json.loads(decoded(line + lines.read(), str(file), at))
                except (ValueError, RecursionError) as error:
                    raise Mistake(f"{file}: begins as a JSON list and is none: {error}") from None
                return
            if not line.isspace():
                number += 1
                try:
                    record = json.loads(decoded(line, str(file), at))
                except (ValueError, RecursionError) as error:
                    raise Mistake(f"{file}, record {number}: not JSON, one object a line: {error}") from None
                yield record
            at += len(line)


def _rows(file: Path) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    if file.suffix in COMPRESSED:
        raise Mistake(f"{file}: parquet is compressed within: unpack it")
    try:
        for rows in pyarrow.parquet.ParquetFile(file).iter_batches(ROWS_AT_ONCE):
            yield from rows.to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise Mistake(f"{file}: cannot be read as parquet: {error}") from None
