"""Warnings about the disk of the checkpoints, before the next one fails.

It is checked in a thread, because a file server that does not answer blocks for ever.
"""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lmforge.core.distributed.host_memory import format_memory

CHECK_SECONDS = 10.0
# Below this fraction of free inodes there is a warning; a checkpoint makes a few files for each
# rank.
MIN_INODE_FRACTION = 0.005


class DiskMonitor:
    """Checks the disk of `folder`.

    `next_checkpoint_bytes` gives the size of the next checkpoint.
    """

    def __init__(self, folder: Path, next_checkpoint_bytes: Callable[[], int]) -> None:
        self._folder = folder
        self._next_checkpoint_bytes = next_checkpoint_bytes
        self._shortages: set[str] = set()

    def start(self, warn: Callable[[str], None]) -> Callable[[], None]:
        """Check in a thread until the returned function is called."""
        stopped = threading.Event()
        threading.Thread(target=self._run, args=(warn, stopped), name="disk", daemon=True).start()
        return stopped.set

    def _run(self, warn: Callable[[str], None], stopped: threading.Event) -> None:
        while True:
            with suppress(OSError):
                for line in self.check():
                    warn(line)
            if stopped.wait(CHECK_SECONDS):
                return

    def check(self) -> list[str]:
        """Lines about space and inodes that became low since the last check, or are sufficient
        again. Raises OSError.
        """
        stats = os.statvfs(self._folder)
        free = stats.f_bavail * stats.f_frsize
        needed = self._next_checkpoint_bytes()
        lines = self._on_change(
            "room",
            free < needed,
            f"{self._folder}: {format_memory(free)} free, and the next checkpoint needs"
            f" {format_memory(needed)}: free some space, or saving it will fail",
            f"{self._folder}: {format_memory(free)} free again, enough for the next checkpoint",
        )
        # Some file systems do not count inodes, and report 0 of 0.
        few = stats.f_files > 0 and stats.f_favail < MIN_INODE_FRACTION * stats.f_files
        return lines + self._on_change(
            "inodes",
            few,
            f"{self._folder}: {stats.f_favail:,} inodes free of {stats.f_files:,}: without inodes"
            " no file can be created, even with free space; delete small files",
            f"{self._folder}: {stats.f_favail:,} inodes free again",
        )

    def _on_change(self, what: str, short: bool, trouble: str, relief: str) -> list[str]:
        if short == (what in self._shortages):
            return []
        (self._shortages.add if short else self._shortages.discard)(what)
        return [trouble if short else relief]
