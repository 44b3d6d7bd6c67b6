"""The token file format: how tokens are stored, and how they are read and verified.

    manifest.json           written last: without it the folder is unfinished
    tokenizer/              the tokenizer of these tokens
    train-00000.tokens      raw little-endian uint16 or uint32
    train-00000.documents   raw little-endian uint64: where each document ends, in tokens from the start of the shard
    train-00000.json        sizes, tokenizer hash, and the xxh3 of every 64 KiB block of the two

Shards hold whole documents, each with its end-of-text token, so a split is their concatenation. Where documents end is stored,
because text may contain the end-of-text id. Files are read with `os.pread`: an I/O error of a network file system kills the
process under mmap; under pread it is an exception, and the read is repeated.
"""

import io
import json
import os
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import xxhash
from pydantic import Field

from lmforge.atomic_files import atomic_write, atomic_write_text
from lmforge.checksums import ChecksummedFile, DamagedFile, block_checksums
from lmforge.data.tokenizer import COMPANION_FILES, Tokenizer
from lmforge.errors import UserError
from lmforge.untrusted import CHUNK_BYTES, MAX_MANIFEST_BYTES, open_file, parse_json, read_bounded, read_json

FORMAT_VERSION = 1
BLOCK_BYTES = 65_536
SHARDS_MANIFEST = "manifest.json"
UNFINISHED = "unfinished"
RETRY_DELAYS_SECONDS = (0.05, 0.5, 2.0)
# Two file descriptors each; the usual limit of a process is 1,024.
MAX_OPEN_SHARDS = 128
# Of so many, what their manifests say is kept: a ten-thousandth of their bytes.
MAX_PARSED_SHARDS = 8192
RESTORE_HINT = "restore it, or prepare anew with overwrite"

Count = Annotated[int, Field(ge=0)]
TokenDtype = Literal["uint16", "uint32"]


@dataclass(frozen=True)
class ShardEntry:
    """What the folder's manifest holds of a shard. `xxh3` is that of the shard's manifest, so that no two can be swapped."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,100}$")]
    tokens: Count
    documents: Count
    xxh3: str


@dataclass(frozen=True)
class ShardManifest:
    """The manifest of one shard; checksums are xxh3 in hexadecimal, one for each block of `block_bytes`."""

    format: Annotated[int, Field(ge=FORMAT_VERSION, le=FORMAT_VERSION)]
    bytes: Count
    tokens: Count
    documents: Count
    dtype: TokenDtype
    tokenizer: str
    block_bytes: Annotated[int, Field(ge=BLOCK_BYTES, le=BLOCK_BYTES)]
    token_blocks: list[str]
    document_blocks: list[str]
    document_block_firsts: list[Count]  # the first document end in each block: finds a document with one read


@dataclass(frozen=True)
class TokenFolderManifest:
    """The manifest of a folder. `plan` is the options of the preparation; `text_bytes` and `splits` go by split.

    `tokenizer_files` has the xxh3 of the files beside tokenizer.json, by name.
    """

    format: int
    source: str
    plan: dict[str, Any]
    tokenizer: str
    vocab_size: Count
    dtype: TokenDtype
    skipped_files: Count
    empty_documents: Count
    text_bytes: dict[str, Count]
    splits: dict[str, list[ShardEntry]]
    tokenizer_files: dict[str, str] = field(default_factory=dict)


# --- writing ---------------------------------------------------------------------------------------------------------


def write_shard(folder: Path, name: str, tokens: np.ndarray, lengths: np.ndarray, tokenizer_hash: str) -> ShardEntry:
    """Write one shard, its manifest last, and return its entry in the folder's manifest.

    `tokens` has the dtype to store; `lengths` int64 [documents] are the tokens of each document and add up to len(tokens).
    """
    tokens = tokens.astype(tokens.dtype.newbyteorder("<"), copy=False)
    ends = np.cumsum(lengths).astype("<u8")
    for suffix, array in ((".tokens", tokens), (".documents", ends)):
        with atomic_write(folder / (name + suffix)) as file:
            file.write(array.data)
    manifest = ShardManifest(
        FORMAT_VERSION,
        tokens.nbytes,
        len(tokens),
        len(ends),
        "uint16" if tokens.itemsize == 2 else "uint32",
        tokenizer_hash,
        BLOCK_BYTES,
        block_checksums(tokens.view(np.uint8).data, BLOCK_BYTES),
        block_checksums(ends.view(np.uint8).data, BLOCK_BYTES),
        ends[:: BLOCK_BYTES // ends.itemsize].tolist(),
    )
    text = json.dumps(asdict(manifest))
    atomic_write_text(folder / (name + ".json"), text)
    return _shard_entry(name, manifest, text.encode())


def hash_tokenizer_files(tokenizer: Tokenizer) -> dict[str, str]:
    """The `tokenizer_files` of a folder with this tokenizer."""
    return {name: _hash_text(text) for name, text in tokenizer.files.items() if name in COMPANION_FILES}


def _hash_text(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())


def finished_shard_entry(folder: Path, name: str) -> ShardEntry | None:
    """The entry of a shard that an earlier run wrote, or None. Raises UserError if its manifest is damaged."""
    path = folder / (name + ".json")
    try:
        content = read_bounded(path, MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        return None
    return _shard_entry(name, _parse_shard_manifest(content, path), content)


def _shard_entry(name: str, manifest: ShardManifest, content: bytes) -> ShardEntry:
    return ShardEntry(name, manifest.tokens, manifest.documents, xxhash.xxh3_128_hexdigest(content))


def _parse_shard_manifest(content: bytes, path: Path) -> ShardManifest:
    return parse_json(content, ShardManifest, str(path), max_bytes=MAX_MANIFEST_BYTES, hint=RESTORE_HINT)


# --- reading ---------------------------------------------------------------------------------------------------------


class _ShardFile(ChecksummedFile):
    """One file read by position; each block is verified against its xxh3 the first time it is read."""

    def __init__(self, path: Path, size: int, checksums: list[str], open_files: Any):
        try:
            super().__init__(size, checksums, BLOCK_BYTES, remember=True)
        except DamagedFile as problem:
            raise UserError(f"{path}: {problem.strerror}: {RESTORE_HINT}") from None
        self.path, self._open_files = path, open_files

    def read(self, offset: int, size: int) -> bytearray:
        """`size` bytes from `offset`. Retries a fault a few times, then UserError naming file and offset."""
        data = bytearray(size)
        delays = iter(RETRY_DELAYS_SECONDS)
        while True:
            try:
                self._read_verified(memoryview(data), offset)
                return data
            except OSError as error:
                # Reopened each time, since a stale network handle stays stale. Not closed, since another thread may be
                # reading from it.
                self._open_files.cache_clear()
                delay = next(delays, None)
                if delay is None:
                    raise UserError(f"{self.path}: {error.strerror or error}: {RESTORE_HINT}") from error
                time.sleep(delay)

    def _pread(self, out: memoryview, offset: int) -> int:
        file = self._open_files(self.path)
        try:
            return os.preadv(file.fileno(), [out], offset)
        except OSError as error:
            raise OSError(error.errno, f"reading at byte {offset} failed ({error.strerror})") from error

    def _current_size(self) -> int:
        return self.path.stat().st_size


class _ShardReader:
    """A shard whose manifest has been read."""

    def __init__(self, folder: "TokenFolder", entry: ShardEntry, open_files: Any):
        path = folder.path / (entry.name + ".json")
        try:
            content = read_bounded(path, MAX_MANIFEST_BYTES)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}: {RESTORE_HINT}") from None
        if xxhash.xxh3_128_hexdigest(content) != entry.xxh3:
            raise UserError(f"{path}: is not the one written for {folder.path}: changed or swapped; {RESTORE_HINT}")
        manifest, of_folder, size = _parse_shard_manifest(content, path), folder.manifest, folder.dtype.itemsize
        expected = of_folder.dtype, of_folder.tokenizer, entry.tokens, entry.documents, size * entry.tokens
        firsts = manifest.document_block_firsts
        if (
            (manifest.dtype, manifest.tokenizer, manifest.tokens, manifest.documents, manifest.bytes) != expected
            or len(firsts) != len(manifest.document_blocks)
            or firsts != sorted(set(firsts))
        ):
            raise UserError(f"{path}: does not describe the shard that {folder.path} has: {RESTORE_HINT}")
        self._dtype, self._vocab_size = folder.dtype, of_folder.vocab_size
        self._block_first_ends = firsts
        self._documents_bytes = 8 * entry.documents
        self._tokens = _ShardFile(path.with_suffix(".tokens"), manifest.bytes, manifest.token_blocks, open_files)
        self._ends = _ShardFile(path.with_suffix(".documents"), self._documents_bytes, manifest.document_blocks, open_files)

    def read(self, start: int, stop: int) -> np.ndarray:
        size = self._dtype.itemsize
        tokens = np.frombuffer(self._tokens.read(start * size, (stop - start) * size), self._dtype)
        if (largest := tokens.max()) >= self._vocab_size:  # a model would read beyond its embedding
            at = start + int(tokens.argmax())
            reason = f"token {at:,} is {largest:,}, beyond the vocabulary of {self._vocab_size:,}"
            raise UserError(f"{self._tokens.path}: {reason}: {RESTORE_HINT}")
        return tokens

    def document_ends(self, start: int, stop: int) -> np.ndarray:
        """Where documents end strictly between tokens `start` and `stop` of this shard, int64."""
        first = max(0, bisect_right(self._block_first_ends, start) - 1)
        last = max(first + 1, bisect_left(self._block_first_ends, stop))
        offset = first * BLOCK_BYTES
        size = min(last * BLOCK_BYTES, self._documents_bytes) - offset
        ends = np.frombuffer(self._ends.read(offset, size), "<u8").astype(np.int64)
        if ends[0] != self._block_first_ends[first] or (ends[1:] <= ends[:-1]).any():
            raise UserError(f"{self._ends.path}: its documents do not follow each other: {RESTORE_HINT}")
        return ends[np.searchsorted(ends, start, "right") : np.searchsorted(ends, stop, "left")]


class TokenSplit:
    """The shards of one split as one sequence of tokens. Safe to read from several threads."""

    def __init__(self, folder: "TokenFolder", shards: list[ShardEntry]):
        self._shard_bounds = np.cumsum([0, *(shard.tokens for shard in shards)])
        self.num_tokens = int(self._shard_bounds[-1])
        self.num_documents = sum(shard.documents for shard in shards)
        self.digest = xxhash.xxh3_128_hexdigest(json.dumps([shard.xxh3 for shard in shards]).encode())
        # A file that is closed takes nothing along: what its manifest says, and which blocks are known to be right, stays.
        open_files = lru_cache(2 * MAX_OPEN_SHARDS)(io.FileIO)
        self._shard = lru_cache(MAX_PARSED_SHARDS)(lambda i: _ShardReader(folder, shards[i], open_files))

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start … stop − 1, uint16 or uint32. Raises UserError naming shard and offset if a checksum does not match."""
        return np.concatenate([self._shard(i).read(a, b) for i, a, b, _ in self._spans(start, stop)])

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Where documents begin strictly between `start` and `stop`, int64, in tokens of the split."""
        pieces = []
        for i, a, b, base in self._spans(start, stop):
            pieces.append(self._shard(i).document_ends(a, b) + base)
            if base + b < stop:  # the span continues in the next shard, which begins with a document
                pieces.append(np.array([base + b]))
        return np.concatenate(pieces)

    def _spans(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """(shard, start in it, stop in it, the split's token at which it begins) for each shard of a span."""
        if not 0 <= start < stop <= self.num_tokens:
            raise ValueError(f"tokens {start} to {stop} of {self.num_tokens}")
        i = int(np.searchsorted(self._shard_bounds, start, "right")) - 1
        while start < stop:
            base, end = self._shard_bounds[i : i + 2].tolist()
            end = min(stop, end)
            yield i, start - base, end - base, base
            start, i = end, i + 1


@dataclass(frozen=True)
class TokenFolder:
    """A finished preparation."""

    path: Path
    manifest: TokenFolderManifest

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a folder that `prepare` finished. Checks presence and size of every shard; contents are checked when read.

        Raises UserError if the folder is not finished or of another format, or a shard is missing or of another size.
        """
        path = Path(path)
        try:
            manifest = read_token_folder_manifest(path)
        except FileNotFoundError:
            if (path / UNFINISHED).is_dir():
                raise UserError(f"{path}: its preparation is unfinished: run prepare again to continue it") from None
            raise UserError(
                f"{path}: no token folder ({SHARDS_MANIFEST} is missing): `lmforge prepare SOURCE {path}` makes one"
            ) from None
        except OSError as error:
            raise UserError(f"{path / SHARDS_MANIFEST}: {error.strerror}: {RESTORE_HINT}") from None
        if manifest.format != FORMAT_VERSION:
            raise UserError(f"{path}: format {manifest.format}, but this lmforge reads format {FORMAT_VERSION}: prepare again")
        folder = cls(path, manifest)
        folder._check_sizes()
        return folder

    def _check_sizes(self) -> None:
        for entry in chain.from_iterable(self.manifest.splits.values()):
            sizes = {".tokens": self.dtype.itemsize * entry.tokens, ".documents": 8 * entry.documents}
            for suffix, expected in sizes.items():
                file = self.path / (entry.name + suffix)
                try:
                    size = file.stat().st_size
                except FileNotFoundError:
                    raise UserError(f"{file}: missing: {RESTORE_HINT}") from None
                except OSError as error:
                    raise UserError(f"{file}: {error.strerror}: {RESTORE_HINT}") from None
                if size != expected:
                    problem = "truncated" if size < expected else "too long"
                    raise UserError(f"{file}: {problem}: {size} bytes of {expected}: {RESTORE_HINT}")

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.manifest.splits)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.manifest.dtype).newbyteorder("<")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of these tokens. Raises UserError if one of its files is missing or another."""
        folder, written = self.path / "tokenizer", self.manifest.tokenizer_files
        for file in (folder / name for name in COMPANION_FILES if name in written):
            if not file.is_file():
                raise UserError(f"{file}: missing: {RESTORE_HINT}")
        try:
            tokenizer = Tokenizer.open(folder)
        except UserError as problem:
            raise UserError(f"{problem}: {RESTORE_HINT}") from None
        if tokenizer.hash != self.manifest.tokenizer:
            raise UserError(f"{self.path}: its tokenizer is not the one that made its tokens: {RESTORE_HINT}")
        for name, digest in written.items():
            if _hash_text(tokenizer.files.get(name, "")) != digest:
                raise UserError(f"{folder / name}: changed since the tokens were made: {RESTORE_HINT}")
        if tokenizer.vocab_size != self.manifest.vocab_size:
            reason = f"says that the vocabulary is {self.manifest.vocab_size:,}, its tokenizer has {tokenizer.vocab_size:,}"
            raise UserError(f"{self.path / SHARDS_MANIFEST}: {reason}: {RESTORE_HINT}")
        return tokenizer

    def split(self, name: str) -> TokenSplit:
        """One split by name. Raises UserError naming those there are, or if it is empty."""
        if name not in self.splits:
            raise UserError(f"{self.path}: no split {name!r}: it has {', '.join(self.splits)}")
        split = TokenSplit(self, self.manifest.splits[name])
        if not split.num_tokens:
            raise UserError(f"{self.path}: its split {name!r} has no tokens: {RESTORE_HINT}")
        return split


def read_token_folder_manifest(folder: Path) -> TokenFolderManifest:
    """The manifest of a finished folder. Raises UserError if it is damaged; OSError passes."""
    path = folder / SHARDS_MANIFEST
    try:
        return read_json(path, TokenFolderManifest, max_bytes=MAX_MANIFEST_BYTES, hint=RESTORE_HINT)
    except UserError:
        with open_file(path) as file:
            head = file.read(CHUNK_BYTES)
        if b'"hf_config"' in head:
            raise UserError(f"{folder}: a checkpoint, not a folder of token shards; name one that prepare made") from None
        raise
