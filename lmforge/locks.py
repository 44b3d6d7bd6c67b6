"""A lock that one process holds at a time, on any file system. This module does not import torch.

`flock` where the file system has it: the kernel releases it with the process, however that ends. Lustre and NFS may be mounted
without it. There the lock is a second file, which its holder touches repeatedly; one that has not been touched for a while
belongs to a process that has ended.
"""

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# The errors of a file system without locks.
NO_LOCKS_ERRNOS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
REFRESH_SECONDS = 10.0
POLL_SECONDS = 0.02
# Hosts see changes of a network file system seconds late.
STALE_AFTER_SECONDS = 90.0


class HeldFile:
    """The lock of a file system without `flock`. Touched by a thread until it is released."""

    def __init__(self, path: Path) -> None:
        self._path, self._released = path, threading.Event()
        self._identity = os.stat(path).st_ino
        threading.Thread(target=self._refresh, name="lock", daemon=True).start()

    def _refresh(self) -> None:
        while not self._released.wait(REFRESH_SECONDS):
            with suppress(OSError):  # the file system is unavailable, possibly only for a while
                os.utime(self._path)

    def release(self) -> None:
        self._released.set()
        with suppress(OSError):
            if os.stat(self._path).st_ino == self._identity:
                self._path.unlink()


def try_lock(descriptor: int, held_file: Path) -> Callable[[], None] | None:
    """Lock an open file or folder, without waiting. Returns None where another process holds the lock, otherwise a function
    that releases it, to be called before the descriptor is closed.

    `held_file` is the lock where the file system has none. Raises OSError.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lambda: None  # the kernel does, once the descriptor is closed
    except BlockingIOError:
        return None
    except OSError as problem:
        if problem.errno not in NO_LOCKS_ERRNOS:
            raise
    for _ in range(2):
        try:
            os.close(os.open(held_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644))
            return HeldFile(held_file).release
        except FileExistsError:
            if not _remove_if_stale(held_file):
                return None
    return None


def is_at(path: Path, descriptor: int) -> bool:
    """Whether an open file is the one at `path`, which the previous holder may have removed."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def remove_lock_alone(lock: Path) -> None:
    """Remove the file of a lock that this process holds, and its folder, where nothing else is in it."""
    with suppress(OSError):
        if [entry.name for entry in lock.parent.iterdir()] == [lock.name]:
            lock.unlink()
            lock.parent.rmdir()


@contextmanager
def hold_lock(path: Path, is_done: Callable[[], bool], flags: int = os.O_RDWR | os.O_CREAT) -> Iterator[bool]:
    """Acquire the lock file `path` when no other process holds it. Yields False if `is_done` becomes true while another one
    holds it.

    `flags` are those with which it is opened: os.O_RDONLY of a folder.
    """
    descriptor = os.open(path, flags, 0o644)
    place = path.absolute()  # "." has neither a name nor a parent
    held_file = place.parent / f".{place.name.removeprefix('.')}.held"
    release = None
    try:
        while (release := try_lock(descriptor, held_file)) is None:
            if is_done():
                yield False
                return
            time.sleep(POLL_SECONDS)
        yield True
    finally:
        if release is not None:
            release()
        os.close(descriptor)


def _remove_if_stale(path: Path) -> bool:
    """Remove a lock whose holder has ended. Returns whether it did, or found it gone."""
    aside = path.with_name(f"{path.name}.{os.uname().nodename}-{os.getpid()}")
    try:
        aside.touch()  # by the clock of the file system, not of this host
        before = path.stat()
        if aside.stat().st_mtime - before.st_mtime < STALE_AFTER_SECONDS:
            return False
        os.rename(path, aside)
        if (now := aside.stat()).st_mtime != before.st_mtime or now.st_ino != before.st_ino:
            os.link(aside, path)  # another process had removed the stale one, and this was its own
            return False
        return True
    except FileNotFoundError:
        return True
    finally:
        aside.unlink(missing_ok=True)
