"""A file exists whole or it does not exist: how everything a preparation writes comes to the disk."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from lmforge.errors import Mistake

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def sealing(path: Path, unique: bool = False) -> Iterator[BinaryIO]:
    """A file to write that appears under its name, synced, when the block ends well, and not at all otherwise.

    With `unique` several processes, of other hosts too, may write it at once: the last one's stays. Mistake naming the
    folder when the disk is full.
    """
    beside = path.with_name(f"{path.name}{f'.{uuid4().hex}' if unique else ''}.partial")
    try:
        with open(beside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        sync_folder(path.parent)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        beside.unlink(missing_ok=True)
        raise Mistake(f"{path.parent}: no room to write {path.name} ({error.strerror}): free some and run again") from None


def sync_folder(folder: Path) -> None:
    """Make renames in a folder outlive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
