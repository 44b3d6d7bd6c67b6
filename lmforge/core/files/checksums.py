"""Files that are verified as they are read: block by block, against the xxh3 that was recorded when
they were written.

Otherwise a flipped bit on a disk would not be detected. Token shards (core/data/shards/folder.py)
and checkpoints (core/checkpoint/storage.py) read through this module; each decides how a file is
opened, what it retries, and what an error is called. No torch here.
"""

import errno
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import xxhash


def parse_checksums(digests: Sequence[str]) -> np.ndarray:
    """Hex digits of xxh3-64 as uint64. Raises DamagedFile where they are none."""
    try:
        return np.array([int(digest, 16) for digest in digests], np.uint64)
    except (ValueError, OverflowError):
        raise DamagedFile(
            errno.EIO, "its checksums are not hexadecimal numbers of 64 bits"
        ) from None


def block_checksums(data: Any, block_bytes: int) -> list[str]:
    """The xxh3-64 of each block of a buffer of bytes, as hex digits."""
    view = memoryview(data)
    return [
        xxhash.xxh3_64_hexdigest(view[start : start + block_bytes])
        for start in range(0, len(view), block_bytes)
    ]


def hash_json(value: Any, *, sort_keys: bool = False) -> str:
    """The xxh3-128 of a value as JSON, as hex digits: the identity of what it describes."""
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=sort_keys).encode())


class DamagedFile(OSError):
    """A file whose content is not what was written."""


class Checksums(Protocol):
    """The checksums of a file's blocks, in an array or in a file of their own."""

    def __len__(self) -> int: ...

    def __getitem__(self, block: int, /) -> Any: ...


class ChecksummedFile(ABC):
    """Reads by position, and returns bytes only after their block has been verified.

    Safe for several threads.

    A subclass says how bytes are read (`_pread`, `_current_size`).

    Args:
        size: bytes of the file as it was written.
        checksums: xxh3-64 of each block, as integers; read when a block is verified.
        remember: verify each block only the first time that it is read. Otherwise it is verified on
        each read.

    Raises DamagedFile where the checksums cannot be those of a file of this size.
    """

    def __init__(
        self, size: int, checksums: "Checksums", block_bytes: int, *, remember: bool
    ) -> None:
        self._size = size
        self._block_bytes = block_bytes
        self._remember = remember
        self._checksums = checksums
        if len(checksums) != (blocks := -(-size // block_bytes)):
            raise DamagedFile(
                errno.EIO, f"{len(checksums):,} checksums were recorded for its {blocks:,} blocks"
            )
        # One bit per block: a large corpus has hundreds of millions. A bit lost in a race between
        # threads means that the block is verified again.
        self._verified = bytearray(-(-blocks // 8) if remember else 0)
        self._last_block: tuple[int, bytearray] = (-1, bytearray())

    @abstractmethod
    def _pread(self, out: memoryview, offset: int) -> int:
        """Fill `out` from a byte position, and return how many bytes were read: perhaps fewer, 0 at
        the end of the file.
        """

    @abstractmethod
    def _current_size(self) -> int:
        """Bytes of the file as it is now."""

    def _read_verified(self, out: memoryview, offset: int) -> None:
        """Fill `out` from `offset`.

        Raises DamagedFile where the file ends early or a block does not match its checksum.
        """
        done = 0
        while done < len(out):
            block, skip = divmod(offset + done, self._block_bytes)
            if self._is_verified(block):
                block += 1
                while block * self._block_bytes < offset + len(out) and self._is_verified(block):
                    block += 1
                stop = min(len(out), block * self._block_bytes - offset)
                self._fill(out[done:stop], offset + done)
                done = stop
                continue
            size = min(self._block_bytes, self._size - block * self._block_bytes)
            taken = min(size - skip, len(out) - done)
            if taken == size:
                self._read_block(block, out[done : done + size])
            else:
                out[done : done + taken] = self._load_block(block, size)[skip : skip + taken]
            done += taken

    def _is_verified(self, block: int) -> bool:
        return self._remember and bool(self._verified[block >> 3] & 1 << (block & 7))

    def _load_block(self, block: int, size: int) -> bytearray:
        number, data = self._last_block
        if number != block:
            data = bytearray(size)
            self._read_block(block, memoryview(data))
            # Otherwise the rest of the block is read from the file, without being verified again.
            if not self._remember:
                self._last_block = block, data
        return data

    def _read_block(self, block: int, out: memoryview) -> None:
        self._fill(out, block * self._block_bytes)
        if xxhash.xxh3_64_intdigest(out) != self._checksums[block]:
            raise DamagedFile(
                errno.EIO,
                f"the block at byte {block * self._block_bytes} does not match its checksum",
            )
        if self._remember:
            self._verified[block >> 3] |= 1 << (block & 7)

    def _fill(self, out: memoryview, offset: int) -> None:
        done = 0
        # One call reads at most 2 GiB on Linux, and on a network file system sometimes less than
        # was asked.
        while done < len(out):
            count = self._pread(out[done:], offset + done)
            if not count:
                raise DamagedFile(errno.EIO, f"ends at byte {self._current_size()} of {self._size}")
            done += count
