"""The files of a checkpoint: hashed block by block as they are written, and verified block by block
as they are read.

PyTorch's own reader does not detect a flipped bit. This reader verifies the blocks of each part
that it reads, so that an intact checkpoint is read only once and a corrupt one is never used. These
are file systems for PyTorch Distributed Checkpoint, on anything that behaves like a `pathlib.Path`:
a local folder, or an address through fsspec.
"""

import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem

from lmforge.core.errors import RunFailed, UserError
from lmforge.core.files.atomic_files import DISK_FULL_ERRNOS, PARTIAL_SUFFIX
from lmforge.core.files.checksums import ChecksummedFile, DamagedFile, parse_checksums
from lmforge.core.files.untrusted import describe_os_error
from lmforge.core.records.manifests import CorruptCheckpoint, FileDigests, unreadable
from lmforge.core.records.runs import (
    CHECKPOINT_FOLDER_HINT,
    Run,
    checkpoint_step,
    describe_storage_error,
    is_local,
    storage_errors,
)

BLOCK_BYTES = 1 << 22
OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss")


class _HashingFile(io.RawIOBase):
    """A file being written, and the digests of its blocks so far."""

    def __init__(self, raw: Any, file_system: "HashingFileSystem") -> None:
        self._raw = raw
        self._file_system = file_system
        self._hash = xxhash.xxh3_64()
        self._written = 0
        self._digests: list[str] = []

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        hashed = sent = 0
        while hashed < len(view):
            part = view[hashed : hashed + BLOCK_BYTES - self._written % BLOCK_BYTES]
            self._hash.update(part)
            hashed += len(part)
            self._written += len(part)
            if self._written % BLOCK_BYTES == 0:
                self._digests.append(self._hash.hexdigest())
                self._hash.reset()
        with self._file_system.record_error():
            while sent < len(view):
                sent += self._raw.write(view[sent:])
        return len(view)

    def tell(self) -> int:
        return self._written

    def fileno(self) -> int:
        return int(self._raw.fileno())

    def file_digests(self) -> FileDigests:
        rest = [self._hash.hexdigest()] if self._written % BLOCK_BYTES else []
        return {"bytes": self._written, "xxh3": [*self._digests, *rest]}


class _VerifiedFile(ChecksummedFile, io.RawIOBase):
    """A file that is read in any order, with every block verified.

    Raises CorruptCheckpoint, naming the file.
    """

    def __init__(self, raw: Any, name: str, digests: FileDigests) -> None:
        super().__init__(
            digests["bytes"], parse_checksums(digests["xxh3"]), BLOCK_BYTES, remember=False
        )
        self._raw = raw
        self._name = name
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = (
            offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        )
        return self._position

    def readinto(self, buffer: Any) -> int:
        out = memoryview(buffer).cast("B")[: max(0, self._size - self._position)]
        try:
            self._read_verified(out, self._position)
        except DamagedFile as problem:
            raise CorruptCheckpoint(
                f"{self._name} does not hold what was written ({problem.strerror})"
            ) from None
        except OSError as problem:
            raise CorruptCheckpoint(describe_os_error(problem, self._name)) from None
        self._position += len(out)
        return len(out)

    def _pread(self, out: memoryview, offset: int) -> int:
        self._raw.seek(offset)
        return int(self._raw.readinto(out))

    def _current_size(self) -> int:
        return int(self._raw.seek(0, os.SEEK_END))


class _PathFileSystem(FileSystem):
    """PyTorch's file system, for any object that behaves like a local path."""

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix

    def exists(self, path: Any) -> bool:
        return bool(path.exists())

    def rm_file(self, path: Any) -> None:
        path.unlink()


class HashingFileSystem(_PathFileSystem):
    """Hashes files as they are written; `files` has the digests of finished ones, by name.

    `first_error` is the first error of the storage: PyTorch's zip writer reports it as an
    unexpected position.
    """

    def __init__(self) -> None:
        self.files: dict[str, FileDigests] = {}
        self.first_error: OSError | None = None

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        # Unbuffered on a disk: writes are large.
        with (
            self.record_error(),
            path.open(mode, **({"buffering": 0} if is_local(path) else {})) as raw,
        ):
            file = _HashingFile(raw, self)
            yield file
            self.files[path.name] = file.file_digests()

    @contextmanager
    def record_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            self.first_error = self.first_error or problem
            raise

    def rename(self, path: Any, new_path: Any) -> None:
        path.rename(new_path)
        self.files[new_path.name] = self.files.pop(path.name)


class VerifyingFileSystem(_PathFileSystem):
    """Verifies files as they are read, against the digests of the manifest."""

    def __init__(self, files: Mapping[str, FileDigests]) -> None:
        self._files = files

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        if path.name not in self._files:
            raise CorruptCheckpoint(f"{path.name} is not in its manifest")
        try:
            with path.open(mode, **({"buffering": 0} if is_local(path) else {})) as raw:
                yield _VerifiedFile(raw, path.name, self._files[path.name])
        except FileNotFoundError:
            raise CorruptCheckpoint(f"{path.name} is missing") from None
        except OSError as problem:
            raise unreadable(problem, path) from None


def check_writable(run: Run) -> None:
    """Raise UserError where a run's checkpoints cannot be written, before it trains instead of at
    its first save. A separate folder for checkpoints is created. The one in the run's directory is
    created later, and is checked only if it exists.
    """
    folder = run.checkpoints_folder
    if run.external_checkpoints is None and not folder.is_dir():
        return
    with storage_errors(folder, "checkpoints cannot be written", CHECKPOINT_FOLDER_HINT):
        make_folder(folder)
        probe = folder / f".probe-{uuid4().hex}"
        probe.write_text("", encoding="utf-8")
        probe.unlink()
        for entry in folder.iterdir() if is_local(folder) else ():
            place = entry.with_name(entry.name.removesuffix(PARTIAL_SUFFIX))
            if checkpoint_step(place) is not None and not entry.is_dir():
                raise UserError(f"{entry}: a file, where a checkpoint would be; move it away")


def make_folder(path: Path) -> None:
    """Make a folder and its parents.

    Object stores have no folders, and would make a bucket instead.
    """
    if getattr(path, "protocol", "") not in OBJECT_STORES:
        path.mkdir(parents=True, exist_ok=True)


def digest_file(path: Path) -> FileDigests:
    """Size and block digests of a file as it is now."""
    digests = []
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digests.append(xxhash.xxh3_64_hexdigest(block))
    return {"bytes": path.stat().st_size, "xxh3": digests}


class CheckpointWriter(dcp.FileSystemWriter):
    """PyTorch's writer with our file system, for tensors that are already in host memory."""

    def __init__(self, folder: Path, files: HashingFileSystem) -> None:
        super().__init__(folder.name, sync_files=is_local(folder), per_thread_copy_ahead=0)
        self.fs = files
        self.path = folder

    @property
    def checkpoint_id(self) -> str:
        return str(self.path)


@contextmanager
def translate_storage_errors(where: str, files: HashingFileSystem) -> Iterator[None]:
    """Any error of the storage as RunFailed with one line.

    PyTorch's own checksums are off: ours are checked by block.
    """
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    except (RunFailed, UserError):
        raise
    except Exception as raised:
        problem = files.first_error or raised
        if isinstance(problem, OSError) and problem.errno in DISK_FULL_ERRNOS:
            what = "the disk is full"
        else:
            what = describe_storage_error(problem)
        raise RunFailed(f"{where} could not be written: {what}") from raised
    finally:
        torch.serialization.set_crc32_options(before)
