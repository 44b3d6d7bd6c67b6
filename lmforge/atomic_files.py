"""A file exists whole or it does not exist: how everything a preparation writes comes to the disk."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from lmforge.errors import UserError

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def atomic_write(path: Path, unique_temporary: bool = False) -> Iterator[BinaryIO]:
    """A file to write that appears under its name, synced, when the block ends well, and not at all otherwise.

    With `unique` several processes, of other hosts too, may write it at once: the last one's stays. UserError naming the
    folder when the disk is full.
    """
    beside = path.with_name(f"{path.name}{f'.{uuid4().hex}' if unique_temporary else ''}.partial")
    try:
        with open(beside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        fsync_folder(path.parent)
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        beside.unlink(missing_ok=True)
        raise UserError(f"{path.parent}: no room to write {path.name} ({error.strerror}): free some and run again") from None


def fsync_folder(folder: Path) -> None:
    """Make renames in a folder outlive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
