"""The token file format: how tokens lie on disk, and how they are read back and trusted.

    manifest.json           written last: without it the folder is unfinished
    tokenizer/              the tokenizer that made these tokens
    train-00000.tokens      raw little-endian uint16 or uint32
    train-00000.documents   raw little-endian uint64: where each document ends, in tokens from the start of the shard
    train-00000.json        sizes, tokenizer hash, and the xxh3 of every 64 KiB block of the two

Shards hold whole documents, each ending with its separator, so a split is their concatenation and needs no scan for an
end-of-text id, which text may contain. Reading is by `os.pread`: on a network file system an I/O error under mmap kills
the process, under pread it is an exception to retry.
"""

import io
import json
import os
import shutil
import threading
import time
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash

from lmforge.atomic_files import atomic_write
from lmforge.checksums import ChecksummedFile, block_checksums
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import UserError

FORMAT_VERSION = 1
BLOCK_BYTES = 65_536
SHARDS_MANIFEST = "manifest.json"
UNFINISHED = "unfinished"
RETRY_DELAYS_SECONDS = (0.05, 0.5, 2.0)
# Two descriptors each, well below the usual limit of 1,024 for a process.
MAX_OPEN_SHARDS = 128

Json = dict[str, Any]


# --- writing ---------------------------------------------------------------------------------------------------------


def write_shard(folder: Path, name: str, tokens: np.ndarray, lengths: np.ndarray, tokenizer_hash: str) -> Json:
    """Seal one shard and return its line of the folder's manifest.

    `tokens` are of the dtype to store, `lengths` int64 the tokens of each document, adding up to len(tokens).
    """
    tokens = tokens.astype(tokens.dtype.newbyteorder("<"), copy=False)
    ends = np.cumsum(lengths).astype("<u8")
    for suffix, array in ((".tokens", tokens), (".documents", ends)):
        with atomic_write(folder / (name + suffix)) as file:
            file.write(array.data)
    manifest = {
        "format": FORMAT_VERSION,
        "bytes": tokens.nbytes,
        "tokens": len(tokens),
        "documents": len(ends),
        "dtype": tokens.dtype.name,
        "tokenizer": tokenizer_hash,
        "block_bytes": BLOCK_BYTES,
        "token_blocks": block_checksums(tokens.view(np.uint8).data, BLOCK_BYTES),
        "document_blocks": block_checksums(ends.view(np.uint8).data, BLOCK_BYTES),
        # Where the first document of each block ends: what is needed to find a document with one read.
        "document_block_firsts": ends[:: BLOCK_BYTES // ends.itemsize].tolist(),
    }
    text = json.dumps(manifest).encode()
    with atomic_write(folder / (name + ".json")) as file:
        file.write(text)
    return _manifest_entry(name, manifest, text)


def finished_shard_entry(folder: Path, name: str) -> Json | None:
    """The line of a shard sealed by an earlier run, None if there is none."""
    try:
        text = (folder / (name + ".json")).read_bytes()
    except FileNotFoundError:
        return None
    return _manifest_entry(name, json.loads(text), text)


def _manifest_entry(name: str, manifest: Json, text: bytes) -> Json:
    """What the folder's manifest says of one shard, its manifest's hash included, so that no two can be swapped."""
    return {
        "name": name,
        "tokens": manifest["tokens"],
        "documents": manifest["documents"],
        "xxh3": xxhash.xxh3_128_hexdigest(text),
    }


# --- reading ---------------------------------------------------------------------------------------------------------


class _ShardFile(ChecksummedFile):
    """One file read by position; each block is verified against its xxh3 the first time it is read."""

    def __init__(self, path: Path, size: int, checksums: list[str]):
        super().__init__(size, checksums, BLOCK_BYTES, remember=True)
        self.path = path
        self._file: io.FileIO | None = None

    def read(self, offset: int, size: int) -> bytearray:
        """`size` bytes from `offset`. Retries a fault a few times, then UserError naming file and offset."""
        data = bytearray(size)
        for pause in (*RETRY_DELAYS_SECONDS, None):
            try:
                self._read_verified(memoryview(data), offset)
                return data
            except OSError as error:
                # Reopened each time: a stale network handle stays stale. Dropping the reference rather than closing
                # leaves another thread's read in peace.
                self._file = None
                if pause is None:
                    fault = error.strerror or str(error)
                    raise UserError(f"{self.path}: {fault}: restore the file, or prepare anew with overwrite") from error
                time.sleep(pause)
        raise AssertionError("unreachable")

    def _pread(self, out: memoryview, offset: int) -> int:
        file = self._file
        if file is None:
            file = self._file = io.FileIO(self.path)
        try:
            return os.preadv(file.fileno(), [out], offset)
        except OSError as error:
            raise OSError(error.errno, f"reading at byte {offset} failed ({error.strerror})") from error

    def _current_size(self) -> int:
        return self.path.stat().st_size


class _ShardReader:
    """An open shard."""

    def __init__(self, folder: Path, entry: Json, dtype: np.dtype, tokenizer_hash: str):
        path = folder / (entry["name"] + ".json")
        try:
            text = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}: restore the file, or prepare anew with overwrite") from None
        if xxhash.xxh3_128_hexdigest(text) != entry["xxh3"]:
            raise UserError(
                f"{path}: is not the one written for {folder}: changed or swapped; restore it, or prepare anew with overwrite"
            )
        manifest = json.loads(text)
        assert manifest["dtype"] == dtype.name
        assert manifest["tokenizer"] == tokenizer_hash
        self._dtype = dtype
        self._block_first_ends = manifest["document_block_firsts"]
        self._documents_bytes = 8 * entry["documents"]
        self._tokens = _ShardFile(path.with_suffix(".tokens"), manifest["bytes"], manifest["token_blocks"])
        self._ends = _ShardFile(path.with_suffix(".documents"), self._documents_bytes, manifest["document_blocks"])

    def read(self, start: int, stop: int) -> np.ndarray:
        size = self._dtype.itemsize
        return np.frombuffer(self._tokens.read(start * size, (stop - start) * size), self._dtype)

    def document_ends(self, start: int, stop: int) -> np.ndarray:
        """Where documents end, strictly between two tokens of this shard."""
        first = max(0, bisect_right(self._block_first_ends, start) - 1)
        last = max(first + 1, bisect_left(self._block_first_ends, stop))
        offset = first * BLOCK_BYTES
        size = min(last * BLOCK_BYTES, self._documents_bytes) - offset
        ends = np.frombuffer(self._ends.read(offset, size), "<u8").astype(np.int64)
        return ends[np.searchsorted(ends, start, "right") : np.searchsorted(ends, stop, "left")]


class TokenSplit:
    """The shards of one split as one sequence of tokens. Safe to read from several threads."""

    def __init__(self, folder: Path, shard_entries: list[Json], dtype: np.dtype, tokenizer_hash: str):
        self._folder = folder
        self._shard_entries = shard_entries
        self._dtype = dtype
        self._tokenizer_hash = tokenizer_hash
        self._shard_stops = np.cumsum([line["tokens"] for line in shard_entries])
        self.num_tokens = int(self._shard_stops[-1])
        self.num_documents = sum(line["documents"] for line in shard_entries)
        self.digest = xxhash.xxh3_128_hexdigest(json.dumps([line["xxh3"] for line in shard_entries]).encode())
        self._open_shards: OrderedDict[int, _ShardReader] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start … stop − 1, uint16 or uint32. UserError naming shard and offset if they cannot be trusted."""
        pieces = [self._shard(i).read(a, b) for i, a, b, _ in self._spans(start, stop)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Where documents begin strictly between `start` and `stop`, int64, in tokens of the split."""
        pieces = []
        for i, a, b, base in self._spans(start, stop):
            pieces.append(self._shard(i).document_ends(a, b) + base)
            if base + b < stop:  # the span goes on in the next shard, which begins with a document
                pieces.append(np.array([base + b]))
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _spans(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """(shard, start in it, stop in it, the split's token at which it begins) for each shard of a span."""
        if not 0 <= start < stop <= self.num_tokens:
            raise ValueError(f"tokens {start} to {stop} of {self.num_tokens}")
        i = int(np.searchsorted(self._shard_stops, start, "right"))
        while start < stop:
            base = int(self._shard_stops[i]) - self._shard_entries[i]["tokens"]
            end = min(stop, int(self._shard_stops[i]))
            yield i, start - base, end - base, base
            start, i = end, i + 1

    def _shard(self, i: int) -> _ShardReader:
        with self._lock:
            if i not in self._open_shards:
                self._open_shards[i] = _ShardReader(self._folder, self._shard_entries[i], self._dtype, self._tokenizer_hash)
                if len(self._open_shards) > MAX_OPEN_SHARDS:
                    self._open_shards.popitem(last=False)
            self._open_shards.move_to_end(i)
            return self._open_shards[i]


@dataclass(frozen=True)
class TokenFolder:
    """A finished preparation."""

    path: Path
    manifest: Json

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a folder that `prepare` finished; every shard's presence and size is checked, its content when read.

        UserError if it is not there, not finished, of another format, or a shard is missing or of another size.
        """
        path = Path(path)
        try:
            manifest = json.loads((path / SHARDS_MANIFEST).read_bytes())
            version, _ = manifest["format"], manifest["splits"]
        except FileNotFoundError:
            if (path / UNFINISHED).is_dir():
                raise UserError(f"{path}: its preparation is unfinished: run prepare again to continue it") from None
            raise UserError(f"{path}: no token folder ({SHARDS_MANIFEST} is missing): make one with prepare") from None
        except (OSError, ValueError, TypeError, KeyError):
            raise UserError(
                f"{path / SHARDS_MANIFEST}: cannot be read as a manifest: restore it, or prepare anew with overwrite"
            ) from None
        if version != FORMAT_VERSION:
            raise UserError(f"{path}: format {version}, but this lmforge reads format {FORMAT_VERSION}: prepare again")
        folder = cls(path, manifest)
        folder._check_sizes()
        return folder

    def _check_sizes(self) -> None:
        for lines in self.manifest["splits"].values():
            for line in lines:
                sizes = {".tokens": self.dtype.itemsize * line["tokens"], ".documents": 8 * line["documents"]}
                for suffix, expected in sizes.items():
                    file = self.path / (line["name"] + suffix)
                    try:
                        size = file.stat().st_size
                    except FileNotFoundError:
                        raise UserError(f"{file}: missing: restore the file, or prepare anew with overwrite") from None
                    if size != expected:
                        kind = "truncated" if size < expected else "too long"
                        raise UserError(
                            f"{file}: {kind}: {size} bytes of {expected}: restore it, or prepare anew with overwrite"
                        )

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.manifest["splits"])

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.manifest["dtype"]).newbyteorder("<")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made these tokens. UserError if the one beside them is another."""
        tokenizer = Tokenizer.open(self.path / "tokenizer")
        if tokenizer.hash != self.manifest["tokenizer"]:
            raise UserError(
                f"{self.path}: its tokenizer is not the one that made its tokens: restore it, or prepare anew with overwrite"
            )
        return tokenizer

    def split(self, name: str) -> TokenSplit:
        """One split by name. UserError naming those there are."""
        if name not in self.splits:
            raise UserError(f"{self.path}: no split {name!r}: it has {', '.join(self.splits)}")
        return TokenSplit(self.path, self.manifest["splits"][name], self.dtype, self.manifest["tokenizer"])


def remove_preparation(folder: Path) -> None:
    """Take away what a preparation wrote, the manifest first, and nothing else."""
    # Stopped half-way, this leaves an unfinished preparation, which the next one takes away.
    (folder / UNFINISHED).mkdir(exist_ok=True)
    (folder / SHARDS_MANIFEST).unlink(missing_ok=True)
    for suffix in (".tokens", ".documents", ".json", ".partial"):
        for file in folder.glob(f"*-[0-9][0-9][0-9][0-9][0-9]*{suffix}"):
            file.unlink()
    for name in ("tokenizer", UNFINISHED):
        shutil.rmtree(folder / name, ignore_errors=True)
