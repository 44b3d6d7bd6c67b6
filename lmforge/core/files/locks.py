"""A lock that one process holds at a time, on any file system: filelock's.

This module does not import torch.

`flock` where the file system has it: the kernel releases it with the process, however that ends.
Lustre and NFS may be mounted without it. There the lock is a second file, which its holder touches
repeatedly; one that has not been touched for a while belongs to a host that is gone. A holder that
was only suspended, or cut off, learns that it has lost the lock (`is_lost`).
"""

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # its import takes longer than that of all that `lmforge --help` needs besides
    from filelock import BaseFileLock

# The errors of a file system without locks.
NO_LOCKS_ERRNOS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
POLL_SECONDS = 0.02
# Hosts see changes of a network file system seconds late.
LEASE_SECONDS = 90.0
HEARTBEATS = 18  # in that time; after two that fail a lock is lost


def try_lock(path: Path, is_done: Callable[[], bool] | None = None) -> "BaseFileLock | None":
    """Lock a file, which is created if missing and stays.

    The lock may be released by any thread. Raises OSError.

    Waits until another process releases it, or `is_done`: then, and at once without `is_done`, the
    result is None. Without `flock` it also waits until a holder on another host has had
    LEASE_SECONDS to touch its lock.
    """
    from filelock import FileLock, SoftFileLease

    try:
        return _acquire(FileLock(path, thread_local=False, fallback_to_soft=False), is_done)
    except OSError as problem:
        if problem.errno not in NO_LOCKS_ERRNOS:
            raise
    lease = SoftFileLease(
        f"{path}.held", lease_duration=LEASE_SECONDS, heartbeat_interval=LEASE_SECONDS / HEARTBEATS, thread_local=False
    )
    deadline = time.monotonic() + 1.1 * LEASE_SECONDS
    return _acquire(lease, is_done or (lambda: time.monotonic() > deadline))


def is_lost(lock: "BaseFileLock") -> bool:
    """Whether a lock that `try_lock` gave may have another holder by now.

    Only one without `flock` can be lost.
    """
    return getattr(lock, "compromise", None) is not None


def _acquire(lock: "BaseFileLock", is_done: Callable[[], bool] | None) -> "BaseFileLock | None":
    from filelock import Timeout

    try:
        lock.acquire(poll_interval=POLL_SECONDS, blocking=is_done is not None, cancel_check=is_done)
    except Timeout:
        return None
    return lock


@contextmanager
def hold_lock(path: Path, is_done: Callable[[], bool] | None = None) -> Iterator[bool]:
    """A block with the lock of `try_lock`. Yields whether this process has it."""
    lock = try_lock(path, is_done)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.release()
