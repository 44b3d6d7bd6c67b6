"""Which hosts share a folder: each writes an empty file with a new name, and looks for those of the
others. Paths, device numbers and mount tables do not tell. No clock is read. A network file system
caches that a name is absent only after a lookup. The names are random, so the first lookup asks the
server.
"""

import os
from contextlib import suppress
from pathlib import Path
from uuid import uuid4


class FolderMarker:
    """A file of this host in a folder or, if that does not exist yet, in its nearest existing
    parent. If no file can be written, other hosts do not see this host.
    """

    def __init__(self, folder: Path) -> None:
        above = [folder.absolute(), *folder.absolute().parents]
        # How many folders are missing: hosts for which this differs do not share the folder.
        missing = next(number for number, each in enumerate(above) if os.path.isdir(each))
        self._folder = above[missing]
        self._prefix = f".lmforge-host-{missing}-"
        name = f"{self._prefix}{uuid4().hex}"
        try:
            (self._folder / name).touch(exist_ok=False)
            self.shared_name: str | None = name
        except OSError:
            self.shared_name = None

    def sees(self, name: str) -> bool:
        """Whether the marker of another host, given by its `shared_name`, is in this host's
        folder.
        """
        return name.startswith(self._prefix) and os.path.exists(self._folder / name)

    def remove(self) -> None:
        if self.shared_name is not None:
            with suppress(OSError):
                (self._folder / self.shared_name).unlink()
