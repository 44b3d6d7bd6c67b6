"""Folders in places where others may prepare names, such as /dev/shm and a host's own disk.

A folder whose name can be computed may be a link to something of the user's, or another user's,
before it is made. So one for a process has a random name and a token, by which a later process
knows it again; and one that is shared by name is used only if its owner can be trusted.
"""

import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

TOKEN_NAME = ".lmforge-token"


def make_own_folder(parent: Path, prefix: str) -> tuple[Path, str]:
    """A new folder that only this user can open, in a folder that is made if missing, and its
    token. Raises OSError.
    """
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    token = uuid4().hex
    (folder / TOKEN_NAME).write_text(token, encoding="ascii")
    return folder, token


def remove_own_folder(folder: Path, token: str) -> bool:
    """Delete a folder that `make_own_folder` has made, and nothing else: a link, a folder of
    another user, and one without the token stay. Returns whether it was deleted.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        # From here on everything is in the folder that was opened, whatever its name is by now.
        with suppress(OSError):
            file = os.open(
                TOKEN_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=descriptor
            )
            with open(file, encoding="ascii", errors="replace") as stored:
                if (
                    os.fstat(descriptor).st_uid != os.geteuid()
                    or stored.read(len(token) + 1) != token
                ):
                    return False
            with os.scandir(descriptor) as entries:
                others = [entry for entry in entries if entry.name != TOKEN_NAME]
            for entry in others:
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.name, dir_fd=descriptor)
                else:
                    os.unlink(entry.name, dir_fd=descriptor)
            # The token last: what an interrupted deletion leaves can be deleted, also where a file
            # server keeps open files.
            if os.listdir(descriptor) == [TOKEN_NAME]:
                os.unlink(TOKEN_NAME, dir_fd=descriptor)
                os.rmdir(folder)
                return True
    finally:
        os.close(descriptor)
    return False


def is_trusted_folder(folder: Path) -> bool:
    """Whether there is a folder, no link, of this user, of root, or of the owner of the folder that
    it is in.
    """
    try:
        found = folder.lstat()
        parent = folder.parent.stat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid in (os.geteuid(), 0, parent.st_uid)
