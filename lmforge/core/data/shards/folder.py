"""Token shards as they are read: opened by name, verified block by block, and put together into
splits.

The file format is in format.py; reading bytes is in storage.py.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Self

import numpy as np

from lmforge.core import registry
from lmforge.core.data.shards.files import ShardFile, SizeCheck, StoredChecksums
from lmforge.core.data.shards.format import RESTORE_HINT, SHARDS_MANIFEST, describes
from lmforge.core.data.shards.quarantine import Blocks, QuarantinedSpans, parse_quarantine
from lmforge.core.data.shards.storage import (
    DEFAULT_CACHE_BYTES,
    LocalStorage,
    ShardStorage,
    read_manifest,
    read_with_retries,
)
from lmforge.core.data.tokenizer import COMPANION_FILES, Tokenizer
from lmforge.core.errors import UserError, prefix_errors
from lmforge.core.files.checksums import DamagedFile, hash_json, parse_checksums
from lmforge.core.files.untrusted import MAX_MANIFEST_BYTES, list_names, parse_json
from lmforge.core.records.manifests import (
    BLOCK_BYTES,
    CHECKSUM_BLOCK_BYTES,
    FORMAT_VERSION,
    UNFINISHED,
    ShardEntry,
    ShardManifest,
    TokenFolderManifest,
    hash_manifest,
    is_of_checkpoint,
)
from lmforge.core.records.runs import is_local, parse_location

# The parsed manifests of this many shards are kept, some 5 KB each.
MAX_PARSED_SHARDS = 32_768
# The number of 64 KiB blocks that are kept; sequences that are near each other share them.
KEPT_END_BLOCKS = 128


class ShardReader:
    """A shard whose manifest has been read.

    Raises UserError where it differs from the manifest that the folder was written with.
    """

    def __init__(self, folder: "TokenFolder", entry: ShardEntry):
        name = entry.name + ".json"
        storage = folder.storage
        path = folder.path / name
        manifest = read_manifest(storage, name, ShardManifest, entry.xxh3, RESTORE_HINT)
        if not describes(manifest, entry, folder.manifest):
            raise UserError(
                f"{path}: does not describe the shard that {folder.path} has: {RESTORE_HINT}"
            )
        self._dtype = folder.dtype
        self._vocab_size = folder.manifest.vocab_size
        self.block_first_ends = np.array(manifest.document_block_firsts, np.int64)
        sizes = entry.file_sizes(folder.dtype.itemsize)
        self._documents_bytes = sizes[".documents"]
        try:
            names = {suffix: entry.name + suffix for suffix in sizes}
            blocks = parse_checksums(manifest.checksum_blocks)
            self.checksums = ShardFile(
                storage, names[".checksums"], sizes[".checksums"], blocks, CHECKSUM_BLOCK_BYTES
            )
            stored = StoredChecksums(self.checksums, sizes[".checksums"] // 8)
            self.tokens = ShardFile(storage, names[".tokens"], sizes[".tokens"], stored)
            blocks = parse_checksums(manifest.document_blocks)
            self.documents = ShardFile(storage, names[".documents"], self._documents_bytes, blocks)
        except DamagedFile as problem:
            raise UserError(f"{path}: {problem.strerror}: {RESTORE_HINT}") from None

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start … stop − 1 of this shard."""
        size = self._dtype.itemsize
        tokens = np.frombuffer(self.tokens.read(start * size, (stop - start) * size), self._dtype)
        # A larger id would be outside of the embedding.
        if (largest := tokens.max()) >= self._vocab_size:
            at = start + int(tokens.argmax())
            reason = f"token {at:,} is {largest:,}, beyond the vocabulary of {self._vocab_size:,}"
            raise UserError(f"{self.tokens.path}: {reason}: {RESTORE_HINT}")
        return tokens

    def end_blocks(self, start: int, stop: int) -> tuple[int, int]:
        """(first, after the last) block of .documents with all ends strictly between tokens `start`
        and `stop`.
        """
        first = max(0, int(self.block_first_ends.searchsorted(start, "right")) - 1)
        return first, max(first + 1, int(self.block_first_ends.searchsorted(stop, "left")))

    def read_ends(self, first: int, last: int) -> np.ndarray:
        """Where documents end, int64, of blocks `first` … `last` − 1 of .documents."""
        offset = first * BLOCK_BYTES
        size = min(last * BLOCK_BYTES, self._documents_bytes) - offset
        ends = np.frombuffer(self.documents.read(offset, size), "<u8").astype(np.int64)
        if ends[0] != self.block_first_ends[first] or (ends[1:] <= ends[:-1]).any():
            raise UserError(
                f"{self.documents.path}: its documents do not follow each other: {RESTORE_HINT}"
            )
        return ends


class TokenSplit:
    """The shards of one split as one sequence of tokens. Safe to read from several threads."""

    def __init__(self, folder: "TokenFolder", shards: Sequence[ShardEntry]):
        self.quarantined = QuarantinedSpans(folder.quarantine, shards, folder.dtype.itemsize)
        self._shard_bounds = list(accumulate((shard.tokens for shard in shards), initial=0))
        self.num_tokens = self._shard_bounds[-1]
        self.num_documents = sum(shard.documents for shard in shards)
        self.digest = hash_json([shard.xxh3 for shard in shards])
        self._folder = folder
        # Closing a file discards neither its manifest nor the record of verified blocks.
        self._shard = lru_cache(MAX_PARSED_SHARDS)(lambda i: ShardReader(folder, shards[i]))
        self._read_ends = lru_cache(KEPT_END_BLOCKS)(
            lambda i, first, last: self._shard(i).read_ends(first, last)
        )

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start … stop − 1, uint16 or uint32.

        Raises UserError naming shard and offset if a checksum does not match.
        """
        self._folder.size_check.raise_problem()
        pieces = [self._shard(i).read(a, b) for i, a, b, _ in self._spans(start, stop)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Where documents begin strictly between `start` and `stop`, int64, in tokens of the
        split.
        """
        pieces = []
        for i, a, b, base in self._spans(start, stop):
            ends = self._read_ends(i, *self._shard(i).end_blocks(a, b))
            pieces.append(ends[ends.searchsorted(a, "right") : ends.searchsorted(b, "left")] + base)
            # The span continues in the next shard, which begins with a document.
            if base + b < stop:
                pieces.append(np.array([base + b]))
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _spans(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """(shard, start in it, stop in it, the split's token at which it begins) for each shard of
        a span.
        """
        if not 0 <= start < stop <= self.num_tokens:
            raise ValueError(f"tokens {start} to {stop} of {self.num_tokens}")
        i = bisect_right(self._shard_bounds, start) - 1
        while start < stop:
            base, end = self._shard_bounds[i : i + 2]
            end = min(stop, end)
            yield i, start - base, end - base, base
            start = end
            i = i + 1


@dataclass(frozen=True)
class TokenFolder:
    """A finished preparation."""

    storage: ShardStorage
    manifest: TokenFolderManifest
    size_check: SizeCheck
    quarantine: dict[str, Blocks]  # of the shards that have some

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        quarantine: Sequence[str] = (),
        check_sizes: bool = True,
        cache_folder: Path | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> Self:
        """Open a folder that `prepare` finished, or its address, such as s3://bucket/tokens, which
        is read through a cache.

        Checks presence and size of every shard; contents are checked when read. `quarantine` lists
        what is not to be read (quarantine.py); the sizes of shards in it are not checked.

        Raises UserError if the folder is not finished or of another format, or a shard is missing
        or of another size. With more than MAX_CHECKED_ON_OPENING shards this is found while others
        are read, and raised by their reading.
        """
        storage = open_storage(str(path), cache_folder, cache_bytes)
        path = storage.path
        try:
            manifest = read_token_folder_manifest(storage)
        except FileNotFoundError:
            if is_local(path) and (path / UNFINISHED).is_dir():
                raise UserError(
                    f"{path}: its preparation is unfinished; run prepare again to continue it"
                ) from None
            raise UserError(
                f"{path}: no token folder ({SHARDS_MANIFEST} is missing); `lmforge prepare SOURCE"
                f" {path}` makes one"
            ) from None
        except OSError as error:
            raise UserError(f"{path / SHARDS_MANIFEST}: {error.strerror}: {RESTORE_HINT}") from None
        if manifest.format != FORMAT_VERSION:
            raise UserError(
                f"{path}: format {manifest.format}, but this lmforge reads format {FORMAT_VERSION};"
                " prepare again"
            )
        token_bytes = np.dtype(manifest.dtype).itemsize
        shards = {shard.name: shard for shard in chain.from_iterable(manifest.splits.values())}
        with prefix_errors(str(path)):
            blocks = parse_quarantine(quarantine, shards, token_bytes)
        checked = (
            [shard for name, shard in shards.items() if name not in blocks] if check_sizes else []
        )

        def sizes_of(shard: ShardEntry) -> dict[str, int]:
            return {
                shard.name + suffix: size for suffix, size in shard.file_sizes(token_bytes).items()
            }

        return cls(storage, manifest, SizeCheck(storage, checked, sizes_of), blocks)

    @property
    def path(self) -> Path:
        return self.storage.path

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.manifest.splits)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.manifest.dtype).newbyteorder("<")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of these tokens.

        Raises UserError if one of its files is missing or was replaced.
        """
        folder = self.path / "tokenizer"
        written = self.manifest.tokenizer_files
        try:
            tokenizer = self._open_tokenizer(folder)
        except UserError as problem:
            raise UserError(f"{problem}: {RESTORE_HINT}") from None
        if tokenizer.hash != self.manifest.tokenizer:
            raise UserError(
                f"{self.path}: its tokenizer is not the one that made its tokens: {RESTORE_HINT}"
            )
        for name, digest in written.items():
            if hash_manifest(tokenizer.files.get(name, "").encode()) != digest:
                raise UserError(
                    f"{folder / name}: changed since the tokens were made: {RESTORE_HINT}"
                )
        if tokenizer.vocab_size != self.manifest.vocab_size:
            reason = (
                f"says that the vocabulary is {self.manifest.vocab_size:,}, its tokenizer has"
                f" {tokenizer.vocab_size:,}"
            )
            raise UserError(f"{self.path / SHARDS_MANIFEST}: {reason}: {RESTORE_HINT}")
        return tokenizer

    def _open_tokenizer(self, folder: Path) -> Tokenizer:
        names = [name for name in COMPANION_FILES if name in self.manifest.tokenizer_files]
        if is_local(folder):
            for file in (folder / name for name in names):
                if not file.is_file():
                    raise UserError(f"{file}: missing")
            return Tokenizer.open(folder)
        texts = {}
        for name in (*names, "tokenizer.json"):
            path = f"tokenizer/{name}"
            try:
                texts[name] = read_with_retries(
                    self.storage, path, (0, 1), partial(self.storage.read_file, path)
                ).decode()
            except (OSError, UnicodeDecodeError) as problem:
                raise UserError(f"{folder / name}: cannot be read: {problem}") from None
        return Tokenizer(texts.pop("tokenizer.json"), texts, str(folder / "tokenizer.json"))

    def split(self, name: str) -> TokenSplit:
        """One split by name. Raises UserError naming the existing ones, or if it is empty."""
        if name not in self.splits:
            raise UserError(f"{self.path}: no split {name!r}: it has {list_names(self.splits)}")
        if name not in self._opened:
            self._opened[name] = TokenSplit(self, self.manifest.splits[name])
        split = self._opened[name]
        if not split.num_tokens:
            raise UserError(f"{self.path}: its split {name!r} has no tokens: {RESTORE_HINT}")
        return split

    @cached_property
    def _opened(self) -> dict[str, TokenSplit]:
        """Splits by name, each created once: with very many shards this takes a while, and verified
        blocks are remembered.
        """
        return {}


def read_token_folder_manifest(storage: ShardStorage) -> TokenFolderManifest:
    """The manifest of a finished folder. Raises UserError if it is damaged; OSError passes."""
    read = partial(storage.read_file, SHARDS_MANIFEST)
    content = (
        read()
        if is_local(storage.path)
        else read_with_retries(storage, SHARDS_MANIFEST, (0, 1), read)
    )
    path = str(storage.path / SHARDS_MANIFEST)
    try:
        return parse_json(
            content, TokenFolderManifest, path, max_bytes=MAX_MANIFEST_BYTES, hint=RESTORE_HINT
        )
    except UserError:
        if is_of_checkpoint(content):
            raise UserError(
                f"{storage.path}: a checkpoint, not a token folder; name one that prepare made"
            ) from None
        raise


def open_storage(
    location: str, cache_folder: Path | None = None, cache_bytes: int = DEFAULT_CACHE_BYTES
) -> ShardStorage:
    """The files of a folder or an address; those of an address are kept in pieces in the cache.

    Raises UserError.
    """
    path = parse_location(location)
    if is_local(path):
        return LocalStorage(path)
    open_remote = registry.import_named("lmforge.core.data.shards.remote_storage:open_remote")
    storage: ShardStorage = open_remote(path, cache_folder, cache_bytes)
    return storage
