"""Files of shards as they are read: verified block by block, retried where a storage fails, their
sizes compared beforehand.

Their content is interpreted in folder.py and core/data/best_fit_index.py.
"""

import threading
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TypeVar

from lmforge.core.data.shards.format import RESTORE_HINT
from lmforge.core.data.shards.storage import ShardStorage, read_with_retries
from lmforge.core.distributed.rank_info import read_rank_info
from lmforge.core.errors import UserError
from lmforge.core.files.checksums import ChecksummedFile, Checksums
from lmforge.core.records.manifests import BLOCK_BYTES

# With more shards a folder is opened before its files are checked, which takes minutes on a network
# file system.
MAX_CHECKED_ON_OPENING = 1024
SHARDS_AT_ONCE = 64

Shard = TypeVar("Shard")


class ShardFile(ChecksummedFile):
    """One file read by position; each block is verified against its xxh3 the first time it is read.

    It may be a part of a file: `size` bytes from byte `base`. `hint` is the advice in messages
    about damage.
    """

    def __init__(
        self,
        storage: ShardStorage,
        name: str,
        size: int,
        checksums: Checksums,
        block_bytes: int = BLOCK_BYTES,
        *,
        base: int = 0,
        hint: str = RESTORE_HINT,
    ):
        super().__init__(size, checksums, block_bytes, remember=True)
        self._storage = storage
        self._name = name
        self._base = base
        self._hint = hint

    @property
    def path(self) -> Path:
        return self._storage.path / self._name

    def read(self, offset: int, size: int) -> bytearray:
        """`size` bytes from `offset`.

        Retries an error a few times, then raises UserError naming file and offset.
        """
        data = bytearray(size)
        try:
            span = self._base + offset, size
            read_with_retries(
                self._storage,
                self._name,
                span,
                lambda: self._read_verified(memoryview(data), offset),
            )
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror or error}: {self._hint}") from error
        return data

    @property
    def num_blocks(self) -> int:
        return len(self._checksums)

    def damaged_blocks(self, unknown: Container[int] = ()) -> list[int]:
        """The blocks that cannot be read or do not match their checksums, and those whose checksum
        is `unknown`.
        """
        return [
            block
            for block in range(self.num_blocks)
            if block in unknown or not self._is_intact(block)
        ]

    def _is_intact(self, block: int) -> bool:
        offset = block * self._block_bytes
        size = min(self._block_bytes, self._size - offset)
        for _ in range(2):
            try:
                self._read_verified(memoryview(bytearray(size)), offset)
                return True
            except OSError:
                self._storage.discard(self._name, self._base + offset, size)
        return False

    def _pread(self, out: memoryview, offset: int) -> int:
        return self._storage.pread(self._name, out, self._base + offset)

    def _current_size(self) -> int:
        return self._storage.sizes([self._name])[0] - self._base


class StoredChecksums:
    """The checksums of a file's blocks, in a file of their own that is verified as well."""

    def __init__(self, file: ShardFile, count: int) -> None:
        self._file = file
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, block: int) -> int:
        return int.from_bytes(self._file.read(8 * block, 8), "little")


class SizeCheck:
    """Compares the sizes of files with the manifest: at once for a few shards; for many, in a
    thread and divided over all ranks. So a missing or truncated shard is found before it is needed,
    perhaps hours into a run. Rank r of W checks every W-th shard from the r-th. `sizes_of` gives
    the bytes of each file of a shard, by name; `hint` says what to do.
    """

    def __init__(
        self,
        storage: ShardStorage,
        shards: Sequence[Shard],
        sizes_of: Callable[[Shard], Mapping[str, int]],
        hint: str = RESTORE_HINT,
    ) -> None:
        self._storage = storage
        self._hint = hint
        self._problem = ""
        if len(shards) <= MAX_CHECKED_ON_OPENING:
            self._check(shards, sizes_of)
            self.raise_problem()
        else:
            rank_info = read_rank_info()
            part = shards[rank_info.rank :: rank_info.world_size]
            threading.Thread(
                target=self._check, args=(part, sizes_of), name="shard sizes", daemon=True
            ).start()

    def raise_problem(self) -> None:
        """Raise UserError naming a file that is missing, or has another size, if one was found."""
        if self._problem:
            raise UserError(f"{self._problem}: {self._hint}")

    def _check(
        self, shards: Sequence[Shard], sizes_of: Callable[[Shard], Mapping[str, int]]
    ) -> None:
        for start in range(0, len(shards), SHARDS_AT_ONCE):
            expected = dict(
                chain.from_iterable(
                    sizes_of(each).items() for each in shards[start : start + SHARDS_AT_ONCE]
                )
            )
            try:
                sizes = self._storage.sizes(list(expected))
            except OSError as error:
                file = error.filename or self._storage.path
                self._problem = (
                    f"{file}:"
                    f" {'missing' if isinstance(error, FileNotFoundError) else error.strerror}"
                )
                return
            for (name, expected_size), size in zip(expected.items(), sizes, strict=True):
                if size != expected_size:
                    problem = "truncated" if size < expected_size else "too long"
                    self._problem = (
                        f"{self._storage.path / name}: {problem}: {size} bytes of {expected_size}"
                    )
                    return
