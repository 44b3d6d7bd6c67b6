"""Records of a file: objects with named fields, one after another, with a place that a message can point at.

Lines of JSON, one JSON list, or parquet, compressed or not. What the fields mean is the caller's business.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmforge.data.sources.text_sources import COMPRESSION_SUFFIXES, JSON_SUFFIXES, content_suffix, decode_utf8, open_decompressed
from lmforge.errors import UserError

PARQUET_BATCH_ROWS = 1000


def find_record_files(path: str | Path) -> list[Path]:
    """The file itself, or all files of records in a folder, by name; `~` is a home. UserError where there are none."""
    root = Path(path).expanduser()
    try:
        if root.is_file():
            return [root]
        if not root.is_dir():
            raise UserError(f"{path}: no such file or folder")
        files = sorted(
            file for file in root.iterdir() if file.is_file() and content_suffix(file.name) in JSON_SUFFIXES | {".parquet"}
        )
    except OSError as problem:
        raise UserError(f"{path}: cannot be read: {problem.strerror}") from None
    if not files:
        raise UserError(f"{path}: holds no records: looked for .jsonl, .json, .parquet, and these with .gz or .zst")
    return files


def read_records(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """("FILE, record N", record) of a file, or of all such files in a folder by name; N counts from 1 in each file.

    .jsonl, .ndjson and .json (lines, or one list), these with .gz or .zst, and .parquet. UserError naming file and record.
    """
    for file in find_record_files(path):
        records = _parquet_records(file) if content_suffix(file.name) == ".parquet" else _json_records(file)
        for number, record in enumerate(records, start=1):
            if not isinstance(record, dict):
                raise UserError(f"{file}, record {number}: expected an object with named fields, not {type(record).__name__}")
            yield f"{file}, record {number}", record


def _json_records(file: Path) -> Iterator[Any]:
    with open_decompressed(str(file)) as lines:
        at, number = 0, 0
        for line in lines:
            if not number and line.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
                try:
                    yield from json.loads(decode_utf8(line + lines.read(), str(file), at))
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{file}: begins as a JSON list and is none: {error}") from None
                return
            if not line.isspace():
                number += 1
                try:
                    record = json.loads(decode_utf8(line, str(file), at))
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{file}, record {number}: not JSON, one object a line: {error}") from None
                yield record
            at += len(line)


def _parquet_records(file: Path) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    if file.suffix in COMPRESSION_SUFFIXES:
        raise UserError(f"{file}: parquet is compressed within: unpack it")
    try:
        for rows in pyarrow.parquet.ParquetFile(file).iter_batches(PARQUET_BATCH_ROWS):
            yield from rows.to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read as parquet: {error}") from None
