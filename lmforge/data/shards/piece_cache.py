"""A bounded folder of pieces of remote files, shared by the processes of a host.

A piece is downloaded by one process while the others that need it wait, is written atomically, and is never verified here:
its reader verifies what it reads, and removes a piece that is damaged. The least recently used pieces make room for new ones.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lmforge.atomic_files import PARTIAL_SUFFIX, atomic_write
from lmforge.errors import UserError
from lmforge.locks import hold_lock

# How exactly it is known when a piece was used last.
TOUCH_SECONDS = 10.0
# What is left after pieces were removed, so that the folder is not listed for each new one.
KEPT_FRACTION = 0.9


class PieceCache:
    """Pieces by name, which may have one folder in it. Raises UserError where the cache's folder cannot be written."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ".lock").touch()
        except OSError as problem:
            raise UserError(f"{folder}: cannot keep pieces of shards ({problem.strerror}); name another") from None

    def read(self, name: str, out: memoryview, offset: int) -> int | None:
        """Fill `out` from a byte position of a piece, and return how many bytes it had there. None: it is not here."""
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
        """All of a piece. None: it is not here."""
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def fetch(self, name: str, download: Callable[[], bytes]) -> bytes | None:
        """Have a piece here. Returns its bytes if this call downloaded it, None if it was here or another process did."""
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f".{path.name}.lock")
        with hold_lock(lock, path.exists) as is_held:
            if not is_held:
                return None
            if path.exists():
                lock.unlink(missing_ok=True)  # made after the one who had the piece here took its own away
                return None
            try:
                data = download()
                if len(data) <= self._max_bytes:
                    self._write(path, data)
                return data
            finally:
                lock.unlink(missing_ok=True)  # who waits for it finds the piece

    def remove(self, name: str) -> None:
        """Forget a piece, if it is here."""
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
            used(len(data))  # counted first: a process that dies here leaves less room, never more
            with atomic_write(path, sync=False) as file:
                file.write(data)

    def _make_room(self, size: int) -> int:
        """Remove the pieces that were used least recently, and what writes left that were cut off. Returns the bytes left."""
        pieces = []
        for path in self._folder.rglob("*"):
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
        """Hold the folder. Gives a function that adds to the bytes in use and returns them."""
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
