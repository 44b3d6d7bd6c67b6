"""Which hosts share a folder: each leaves an empty file of a new name there, and looks for those of the others.

Paths, device numbers and mount tables do not say it. No clock is read. A network file system remembers that a name was absent
only once it has been asked for it: these names are random, so the first look asks the server.
"""

import os
from contextlib import suppress
from pathlib import Path
from uuid import uuid4


class FolderMarker:
    """A file of this host in a folder or, where that does not exist yet, in the nearest folder above it that does.

    Where none can be written, there is none, and others do not see this host.
    """

    def __init__(self, folder: Path) -> None:
        above = [folder.absolute(), *folder.absolute().parents]
        # How many folders are missing: hosts for which this differs do not share the folder.
        missing = next(number for number, each in enumerate(above) if os.path.isdir(each))
        self._place, self._prefix = above[missing], f".lmforge-host-{missing}-"
        name = f"{self._prefix}{uuid4().hex}"
        try:
            (self._place / name).touch(exist_ok=False)
            self.shared_name: str | None = name
        except OSError:
            self.shared_name = None

    def sees(self, name: str) -> bool:
        """Whether the marker of another host, by its `shared_name`, is where this host would have put it."""
        return name.startswith(self._prefix) and os.path.exists(self._place / name)

    def remove(self) -> None:
        if self.shared_name is not None:
            with suppress(OSError):
                (self._place / self.shared_name).unlink()
