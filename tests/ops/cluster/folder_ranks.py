"""Run by test_folders.py on 4 ranks: hosts of 2, 1 and 1 ranks fill a folder, and report whether
they did.
"""

import ctypes
import os
import sys
from pathlib import Path

from lmforge.core.distributed import distributed as cluster

NEW_NAMESPACES = 0x10000000 | 0x00020000  # of users and of mounts


def mount_own(folder: Path) -> None:
    """Mount an empty file system there, which only this process sees."""
    user, group = os.getuid(), os.getgid()
    library = ctypes.CDLL(None, use_errno=True)
    assert library.unshare(NEW_NAMESPACES) == 0, os.strerror(ctypes.get_errno())
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"0 {user} 1"),
        ("gid_map", f"0 {group} 1"),
    ):
        Path("/proc/self", name).write_text(text)
    assert library.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, None) == 0, os.strerror(
        ctypes.get_errno()
    )


if __name__ == "__main__":
    folder, output, which = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    rank = int(os.environ["RANK"])
    os.environ |= {
        "LOCAL_RANK": "1" if rank == 1 else "0",
        "LOCAL_WORLD_SIZE": "2" if rank < 2 else "1",
    }
    if (which == "ranks 2 and 3 have their own" and rank > 1) or (
        which == "rank 3 has its own" and rank == 3
    ):
        mount_own(folder.parent)
        folder.mkdir(exist_ok=True)
    if which == "rank 3 has none yet" and rank == 3:
        mount_own(folder.parent)
    with cluster.init_distributed("cpu", threads=1) as dist_ctx:
        dist_ctx.run_once_per_folder(lambda: (output / f"{rank}").touch(), folder)
        assert not [*folder.glob(".*")], "a marker was left"
