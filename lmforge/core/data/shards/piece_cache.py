"""A bounded folder of pieces of remote files, shared by the processes of a host.

One process downloads a piece while others that need it wait. It is written atomically, but not
verified: its reader does that, and removes a damaged piece. The least recently used pieces are
deleted to make room.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lmforge.core.errors import UserError
from lmforge.core.files.atomic_files import PARTIAL_SUFFIX, atomic_write
from lmforge.core.files.locks import hold_lock
from lmforge.core.files.own_folders import is_trusted_folder

# The resolution of the time at which a piece was last used.
TOUCH_SECONDS = 10.0
# The fraction of the limit that remains after pieces were removed, so that the folder is not listed
# for each new one.
KEPT_FRACTION = 0.9


class PieceCache:
    """Pieces by name, which may have one folder in it.

    Raises UserError where the cache's folder cannot be written.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Its files have fixed names: who prepares it could make them links.
            if not is_trusted_folder(folder.resolve()):
                raise UserError(f"{folder}: a folder of another user; name another data.stage_to")
            (folder / ".lock").touch()
        except OSError as problem:
            raise UserError(
                f"{folder}: cannot keep pieces of shards ({problem.strerror}); name another"
            ) from None

    def read(self, name: str, out: memoryview, offset: int) -> int | None:
        """Fill `out` from a byte position of a piece, and return the number of bytes.

        None: the piece is not in the cache.
        """
        try:
            descriptor = os.open(self._folder / name, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            if time.time() - os.fstat(descriptor).st_mtime > TOUCH_SECONDS:
                os.utime(descriptor)
            return os.preadv(descriptor, [out], offset)
        finally:
            os.close(descriptor)

    def read_whole(self, name: str) -> bytes | None:
        """All bytes of a piece. None: it is not in the cache."""
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def fetch(self, name: str, download: Callable[[], bytes]) -> bytes | None:
        """Make sure that a piece is in the cache.

        Returns its bytes if this call downloaded it, otherwise None.
        """
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f".{path.name}.lock")
        with hold_lock(lock, path.exists) as is_held:
            if not is_held:
                return None
            if path.exists():
                # Created after the process that downloaded the piece removed its lock.
                lock.unlink(missing_ok=True)
                return None
            try:
                data = download()
                if len(data) <= self._max_bytes:
                    self._write(path, data)
                return data
            finally:
                lock.unlink(missing_ok=True)  # waiting processes find the piece

    def remove(self, name: str) -> None:
        """Remove a piece, if it is in the cache."""
        path = self._folder / name
        if not path.exists():
            return
        with self._accounts() as used:
            if path.exists():
                size = path.stat().st_size
                path.unlink()
                used(-size)

    def _write(self, path: Path, data: bytes) -> None:
        with self._accounts() as used:
            if used(0) + len(data) > self._max_bytes:
                used(self._make_room(len(data)) - used(0))
            # Counted first: if the process dies here, the count is too high, never too low.
            used(len(data))
            with atomic_write(path, sync=False) as file:
                file.write(data)

    def _make_room(self, size: int) -> int:
        """Remove the least recently used pieces and leftovers of interrupted writes.

        Returns the bytes in use.
        """
        pieces = []
        # As RemoteStorage calls them, and nothing else that is there.
        for path in self._folder.glob(f"{'[0-9a-f]' * 16}/*"):
            if path.name.startswith("."):
                if path.name.endswith(PARTIAL_SUFFIX):
                    path.unlink(missing_ok=True)
            elif path.is_file():
                stat = path.stat()
                pieces.append((stat.st_mtime, stat.st_size, path))
        left = sum(piece_size for _, piece_size, _ in pieces)
        for _, piece_size, path in sorted(pieces):
            if left <= min(self._max_bytes * KEPT_FRACTION, self._max_bytes - size):
                break
            path.unlink(missing_ok=True)
            left -= piece_size
        return left

    @contextmanager
    def _accounts(self) -> Iterator[Callable[[int], int]]:
        """Lock the folder. Yields a function that adds to the bytes in use and returns them."""
        file = self._folder / ".bytes"
        with hold_lock(self._folder / ".lock", lambda: False):
            text = file.read_text() if file.exists() else ""
            # A process that was killed may have left half of it, or nothing.
            used = int(text) if text.isdecimal() else self._make_room(0)

            def add(size: int) -> int:
                nonlocal used
                used += size
                file.write_text(str(used))
                return used

            yield add
