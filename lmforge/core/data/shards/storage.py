"""Access to the files of token shards: bytes by name and position, and which files a process waits
for. Files are read with `os.preadv`: with mmap an I/O error of a network file system would kill the
process; with preadv it is an exception, and the read is retried.
"""

import errno
import io
import os
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Protocol, TypeVar

from lmforge.core.errors import UserError
from lmforge.core.files.checksums import DamagedFile
from lmforge.core.files.untrusted import MAX_MANIFEST_BYTES, parse_json, read_bounded
from lmforge.core.records.manifests import hash_manifest

# The usual limit of a process is 1,024.
MAX_OPEN_FILES = 256
RETRY_DELAYS_SECONDS = (0.05, 0.5, 2.0)
# Of the cache on this host in which pieces of remote shards are kept.
DEFAULT_CACHE_BYTES = 20 * 2**30

T = TypeVar("T")


class ShardStorage(Protocol):
    """The files of one folder by name. Methods raise OSError; safe to call from several threads."""

    path: Path
    read_threads: int  # how many sequences are read at once

    def retry_delays(self) -> Sequence[float]:
        """Seconds to wait before each repetition of a read that failed."""

    def read_file(self, name: str) -> bytes:
        """A manifest, whole."""

    def pread(self, name: str, out: memoryview, offset: int) -> int:
        """Fill `out` from a byte position, and return how many bytes were read: perhaps fewer, 0 at
        the end of the file.
        """

    def sizes(self, names: Sequence[str]) -> list[int]:
        """The size of each file, in bytes."""

    def discard(self, name: str, offset: int, size: int) -> None:
        """Drop the cached bytes of a span of a file that could not be read or verified, so that it
        is fetched again.
        """


class LocalStorage:
    """A folder of this machine or of a network file system."""

    read_threads = 1

    def __init__(self, path: Path) -> None:
        self.path = path
        self._root = str(path)
        self._open = lru_cache(MAX_OPEN_FILES)(partial(io.FileIO, opener=_open_at_once))

    def retry_delays(self) -> Sequence[float]:
        return RETRY_DELAYS_SECONDS

    def read_file(self, name: str) -> bytes:
        return read_bounded(self.path / name, MAX_MANIFEST_BYTES)

    def pread(self, name: str, out: memoryview, offset: int) -> int:
        file = self._open(f"{self._root}/{name}")
        try:
            return os.preadv(file.fileno(), [out], offset)
        except OSError as error:
            raise OSError(
                error.errno, f"reading at byte {offset} failed ({error.strerror})"
            ) from error

    def sizes(self, names: Sequence[str]) -> list[int]:
        return [os.stat(f"{self.path}/{name}").st_size for name in names]

    def discard(self, name: str, offset: int, size: int) -> None:
        # A stale network handle stays stale. Files are not closed, since another thread may be
        # reading from them.
        self._open.cache_clear()


def _open_at_once(path: str, flags: int) -> int:
    # A named pipe in the place of a file would wait for a writer; without, reading it at an offset
    # fails.
    return os.open(path, flags | os.O_NONBLOCK)


# Those in progress, by identity: the file, and since when.
_reads: dict[int, tuple[Path, str, float]] = {}


def read_with_retries(
    storage: ShardStorage, name: str, span: tuple[int, int], read: Callable[[], T]
) -> T:
    """Call `read`, which reads `span` (offset, size) of a file, until it succeeds.

    Raises the last OSError.

    Cached bytes of the span are dropped between attempts. Meanwhile `slow_read` returns the file.
    """
    delays = iter(storage.retry_delays())
    entry = (storage.path, name, time.monotonic())
    _reads[id(entry)] = entry
    try:
        while True:
            try:
                return read()
            except OSError:
                storage.discard(name, *span)
                if (delay := next(delays, None)) is None:
                    raise
                time.sleep(delay)
    finally:
        del _reads[id(entry)]


def read_manifest(storage: ShardStorage, name: str, schema: type[T], xxh3: str, hint: str) -> T:
    """The manifest that another one names by its checksum.

    Raises UserError where it is missing, damaged or another.
    """

    def read() -> bytes:
        content = storage.read_file(name)
        if hash_manifest(content) != xxh3:
            raise DamagedFile(
                errno.EIO, f"is not the one written for {storage.path}: changed or swapped"
            )
        return content

    path = storage.path / name
    try:
        content = read_with_retries(storage, name, (0, 1), read)
    except OSError as error:
        reason = "missing" if isinstance(error, FileNotFoundError) else error.strerror
        raise UserError(f"{path}: {reason}: {hint}") from None
    return parse_json(content, schema, str(path), max_bytes=MAX_MANIFEST_BYTES, hint=hint)


def slow_read(seconds: float) -> str | None:
    """The file that this process has waited for longest, if for at least this many seconds."""
    folder, name, since = min(
        _reads.copy().values(), key=lambda read: read[2], default=("", "", float("inf"))
    )
    return f"{folder}/{name}" if time.monotonic() - since >= seconds else None
