"""Copies of folders on a host's own disk, which is faster than the shared one: made once, then
reused. A copy is named after its folder and a digest of the content, so another version is another
copy. Each file is read back and compared before it is renamed; a marker, written last, means that
the copy is complete. An interrupted copy is completed.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import BinaryIO

import xxhash

from lmforge.core.data.shards.format import SHARDS_MANIFEST
from lmforge.core.errors import UserError, format_bytes
from lmforge.core.files.atomic_files import PARTIAL_SUFFIX, atomic_write, atomic_write_json
from lmforge.core.files.checksums import DamagedFile
from lmforge.core.files.locks import hold_lock
from lmforge.core.files.own_folders import is_trusted_folder
from lmforge.core.files.untrusted import (
    MAX_MANIFEST_BYTES,
    describe_os_error,
    read_bounded,
    read_json,
)
from lmforge.core.records.manifests import UNFINISHED

MARKER = ".lmforge-staged.json"
BLOCK_BYTES = 16 * 2**20
# A network file system answers several requests at once.
THREADS = 8
# Space that is left free for other files of the host.
RESERVED_BYTES = 2**28
# A hidden file that belongs to a folder: of a checkpoint, where each tensor is in it.
HIDDEN_PARTS = (".metadata",)


def find_staged(stage_to: Path | None, source: Path) -> Path:
    """The complete copy of a folder, or the folder itself where there is none."""
    if stage_to is None or not source.is_dir():
        return source
    copy = _copy_path(stage_to, source)
    return copy if is_trusted_folder(copy) and (copy / MARKER).is_file() else source


def stage_folder(stage_to: Path, source: Path, report: Callable[[str], None] = print) -> Path:
    """Make a copy of a local folder in `stage_to`, unless it exists, and return its path.

    One process makes it; others on this host wait for it.

    Raises UserError where there is not enough room, or a file cannot be read or written.
    """
    copy = _copy_path(stage_to, source)
    try:
        copy.mkdir(parents=True, exist_ok=True)
        if not is_trusted_folder(copy):
            raise UserError(
                f"data.stage_to: {copy}: a link, or of another user; name a folder of your own, or"
                " leave it out"
            )
        with hold_lock(
            copy.with_name(f".{copy.name}.lock"), partial(_is_complete, copy)
        ) as is_held:
            if is_held and not _is_complete(copy):
                _fill(copy, source, stage_to, report)
    except OSError as problem:
        raise UserError(
            f"data.stage_to: {describe_os_error(problem, copy)}; name another folder, or leave"
            " it out"
        ) from None
    return copy


def _copy_path(stage_to: Path, source: Path) -> Path:
    source = source.absolute()
    manifest = source / SHARDS_MANIFEST
    # Of a token folder or a checkpoint: it has the checksum of everything else.
    if manifest.is_file():
        held: object = xxhash.xxh3_64_hexdigest(read_bounded(manifest, MAX_MANIFEST_BYTES))
    else:
        held = [
            (name, stat.st_size, stat.st_mtime_ns) for name, stat in _list_files(source).items()
        ]
    digest = xxhash.xxh3_64_hexdigest(json.dumps([str(source), held]).encode())
    return stage_to.absolute() / f"{source.name}-{digest}"


def _list_files(folder: Path) -> dict[str, os.stat_result]:
    """The files of a folder by their names in it; hidden ones and what is unfinished are left
    out.
    """
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        left_out = any(
            part == UNFINISHED or (part.startswith(".") and part not in HIDDEN_PARTS)
            for part in name.parts
        )
        if not left_out and path.is_file():
            files[str(name)] = path.stat()
    return files


def _is_complete(copy: Path) -> bool:
    """Whether the marker is there, and every file that it lists, of its size."""
    try:
        sizes = read_json(copy / MARKER, dict[str, int], max_bytes=MAX_MANIFEST_BYTES)
        return all((copy / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, UserError):
        return False


def _fill(copy: Path, source: Path, stage_to: Path, report: Callable[[str], None]) -> None:
    (copy / MARKER).unlink(missing_ok=True)
    for left in copy.rglob(f".*{PARTIAL_SUFFIX}"):
        left.unlink()
    files = _list_files(source)
    missing = [name for name, stat in files.items() if not _has_size(copy / name, stat.st_size)]
    size = sum(files[name].st_size for name in missing)
    free = shutil.disk_usage(copy).free
    if size + RESERVED_BYTES > free:
        raise UserError(
            f"data.stage_to: {stage_to}: {format_bytes(size)} of {source} are to be copied and"
            f" {format_bytes(free)} are free; free some space, name another folder, or leave it out"
        )
    report(f"data.stage_to: {format_bytes(size)} of {source} are copied to {copy}")
    with ThreadPoolExecutor(THREADS, "stage") as threads:
        for _ in threads.map(lambda name: _copy_file(source / name, copy / name), missing):
            pass
    atomic_write_json(copy / MARKER, {name: stat.st_size for name, stat in files.items()})


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _copy_file(source: Path, target: Path) -> None:
    """Copy one file, with its time, and compare what is on the disk with what was read.

    Raises OSError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = xxhash.xxh3_64()
    with source.open("rb") as reading, atomic_write(target) as writing:
        while block := reading.read(BLOCK_BYTES):
            digest.update(block)
            writing.write(block)
        writing.flush()
        os.fsync(writing.fileno())
        stat = os.fstat(reading.fileno())
        os.utime(writing.fileno(), ns=(stat.st_atime_ns, stat.st_mtime_ns))
        if _digest_on_disk(writing) != digest.hexdigest():
            raise DamagedFile(errno.EIO, "is not on the disk as it was written", str(target))


def _digest_on_disk(written: BinaryIO) -> str:
    with open(written.name, "rb") as file:
        if hasattr(os, "posix_fadvise"):  # from the disk, not from memory
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()
