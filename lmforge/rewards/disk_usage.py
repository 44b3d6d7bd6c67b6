"""How much disk a confined program takes: what is in its folder, and the deleted files that it holds.

code_server.py checks this while a program runs, and ends a program that uses too much. Only the standard library is imported.
"""

import math
import os
import stat
from contextlib import suppress

from lmforge.rewards import confinement

MAX_FOLDER_FILES = 1000
# The limit of the list of a program's mappings; that of an ordinary program has some 20,000.
MAX_MAPPINGS_BYTES = 4 << 20


def deleted_bytes(pid: int, tasks: list[str], folder: str) -> float:
    """The bytes on disk of deleted files that the program with these threads has open or mapped.

    One that is only mapped counts as if full. Infinite if there are too many mappings to read.
    """
    with confinement.as_confined_user():
        for task in tasks:  # all have the same descriptors and memory, but the first may have ended
            process = f"/proc/{pid}/task/{task}"
            with suppress(OSError), open(f"{process}/maps", "rb") as file:
                mappings = file.read(MAX_MAPPINGS_BYTES)
                if len(mappings) == MAX_MAPPINGS_BYTES:
                    return math.inf
                if mappings:
                    return sum((_mapped_files(mappings, folder) | _open_files(f"{process}/fd")).values())
    return 0


def _mapped_files(mappings: bytes, folder: str) -> dict[int, int]:
    """The largest size that each deleted file of a list of mappings can have, by its inode."""
    beginning = os.fsencode(folder) + b"/"
    lines = [line for line in mappings.splitlines() if line.endswith(b" (deleted)") and beginning in line]
    return {int(line.split()[4]): confinement.MAX_FILE_BYTES for line in lines}


def _open_files(descriptors: str) -> dict[int, int]:
    """The bytes on disk of each deleted file in a folder of descriptors, by its inode."""
    sizes = {}
    for descriptor in os.listdir(descriptors):
        with suppress(OSError):
            status = os.stat(f"{descriptors}/{descriptor}")
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                sizes[status.st_ino] = status.st_blocks * 512
    return sizes


def folder_bytes(folder: str) -> float:
    """The bytes on disk of what a folder holds; infinite if it has too many files or too long paths."""
    files = size = 0
    folders = [folder]
    while folders:
        path = folders.pop()
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    files += 1
                    with suppress(FileNotFoundError):
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if files > MAX_FOLDER_FILES:
                        return math.inf
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except PermissionError:
            if _make_readable(path, folder):
                folders.append(path)
        except (FileNotFoundError, NotADirectoryError):
            continue  # deleted or replaced meanwhile
        except OSError:
            return math.inf
    return size


def _make_readable(path: str, folder: str) -> bool:
    """Make a folder within `folder` readable, which the program made unreadable. Never follows a link out of it."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY)
        opened = f"/proc/self/fd/{descriptor}"
        try:
            if os.readlink(opened).startswith(f"{folder}/"):
                os.chmod(opened, 0o700)
                return os.access(path, os.R_OK | os.X_OK)
        finally:
            os.close(descriptor)
    return False
