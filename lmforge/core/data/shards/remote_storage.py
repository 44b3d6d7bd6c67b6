"""Token shards at an address that fsspec knows, such as s3://bucket/tokens: read in pieces, through
a cache on this host.
"""

import errno
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from lmforge.core.data.shards.format import SHARDS_MANIFEST
from lmforge.core.data.shards.piece_cache import PieceCache
from lmforge.core.files.untrusted import MAX_MANIFEST_BYTES
from lmforge.core.records.runs import describe_storage_error

# Large enough for one request, and small enough to be downloaded for one sequence.
PIECE_BYTES = 4 * 2**20
REMOTE_RETRY_DELAYS_SECONDS = (0.5, 2.0, 8.0, 30.0)
REQUEST_TIMEOUT_SECONDS = 60.0
REMOTE_READ_THREADS = 16


def default_cache_folder() -> Path:
    """Where pieces of remote shards are kept if no option says otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmforge" / "shards"


class RemoteStorage:
    """A `ShardStorage`.

    `path` is a UPath; pieces are kept under the name of the address and its manifest.
    """

    read_threads = REMOTE_READ_THREADS

    def __init__(self, path: Path, cache: PieceCache) -> None:
        self.path = path
        self._cache = cache
        self._key = ""
        self._file_system: Any = path.fs  # type: ignore[attr-defined]
        self._root: str = path.path  # type: ignore[attr-defined]

    def retry_delays(self) -> Sequence[float]:
        return REMOTE_RETRY_DELAYS_SECONDS

    def read_file(self, name: str) -> bytes:
        if name == SHARDS_MANIFEST:  # which describes the rest of the folder
            content = self._download(name)
            self._key = xxhash.xxh3_64_hexdigest(str(self.path).encode() + content)
            return content
        piece = self._piece(name, 0)
        while True:
            kept = self._cache.read_whole(piece)
            if kept is None:
                kept = self._cache.fetch(piece, lambda: self._download(name))
            if kept is not None:
                return kept

    def pread(self, name: str, out: memoryview, offset: int) -> int:
        number, start = divmod(offset, PIECE_BYTES)
        piece = self._piece(name, number)
        first = number * PIECE_BYTES
        out = out[: PIECE_BYTES - start]
        while (size := self._cache.read(piece, out, start)) is None:
            content = self._cache.fetch(
                piece, lambda: self._download(name, first, first + PIECE_BYTES)
            )
            if content is not None:
                size = max(0, min(len(out), len(content) - start))
                out[:size] = content[start : start + size]
                break
        return size

    def sizes(self, names: Sequence[str]) -> list[int]:
        with ThreadPoolExecutor(min(self.read_threads, len(names) or 1)) as threads:
            return list(threads.map(self._size, names))

    def discard(self, name: str, offset: int, size: int) -> None:
        for number in range(offset // PIECE_BYTES, (offset + max(size, 1) - 1) // PIECE_BYTES + 1):
            self._cache.remove(self._piece(name, number))

    def _piece(self, name: str, number: int) -> str:
        return f"{self._key}/{name.replace('/', '-')}.{number}"

    def _size(self, name: str) -> int:
        with self._errors(name):
            return int(self._call("info", f"{self._root}/{name}")["size"])

    def _download(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        with self._errors(name):
            content: bytes = self._call("cat_file", f"{self._root}/{name}", start=start, end=stop)
        if len(content) > (MAX_MANIFEST_BYTES if start is None or stop is None else stop - start):
            raise OSError(
                errno.EIO, "the store sent more bytes than were requested", f"{self.path}/{name}"
            )
        return content

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A method of the file system.

        An asynchronous one gets a time-out, since a connection may hang.
        """
        if not self._file_system.async_impl:
            return getattr(self._file_system, method)(*args, **kwargs)
        from fsspec.asyn import sync

        function = getattr(self._file_system, f"_{method}")
        return sync(
            self._file_system.loop, function, *args, timeout=REQUEST_TIMEOUT_SECONDS, **kwargs
        )

    @contextmanager
    def _errors(self, name: str) -> Any:
        """Each store has its own exceptions."""
        try:
            yield
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "No such file", f"{self.path}/{name}") from None
        except Exception as problem:
            reason = describe_storage_error(problem) if str(problem) else type(problem).__name__
            raise OSError(errno.EIO, reason, f"{self.path}/{name}") from problem


def open_remote(path: Path, cache_folder: Path | None, cache_bytes: int) -> RemoteStorage:
    """The storage of an address, whose pieces are kept in a folder of this host."""
    return RemoteStorage(path, PieceCache(cache_folder or default_cache_folder(), cache_bytes))
