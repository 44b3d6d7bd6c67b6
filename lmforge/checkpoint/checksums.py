"""Files of a checkpoint, hashed block by block as they are written and checked block by block as they are read.

PyTorch's own reader loads a flipped bit in silence. Here whoever reads a part of a file checks just the blocks of that
part, so that a sound checkpoint is read once and a spoiled one is never used. These are file systems for PyTorch
Distributed Checkpoint, on anything that behaves like a `pathlib.Path`: a folder, or an address through fsspec.
"""

import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
from torch.distributed.checkpoint.filesystem import FileSystemBase

from lmforge.errors import UserError
from lmforge.runs import is_local

BLOCK_BYTES = 1 << 22
OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss")
FileDigests = dict[str, Any]  # {"bytes": int, "xxh3": [a hex digest of every BLOCK bytes]}


class CorruptCheckpoint(UserError):
    """Why a folder cannot be used as a checkpoint."""


class _HashingFile(io.RawIOBase):
    """A file being written, and the digests of its blocks so far."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._hash = xxhash.xxh3_64()
        self._block_filled = 0
        self._written = 0
        self._digests: list[str] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), BLOCK_BYTES):
            self._update_hash(view[begin : begin + BLOCK_BYTES])
        self._written += len(view)
        sent = 0
        while sent < len(view):
            sent += self._raw.write(view[sent:])
        return len(view)

    def _update_hash(self, data: memoryview) -> None:
        first = data[: BLOCK_BYTES - self._block_filled]
        self._hash.update(first)
        self._block_filled += len(first)
        if self._block_filled == BLOCK_BYTES:
            self._digests.append(self._hash.hexdigest())
            self._hash.reset()
            self._block_filled = 0
            if rest := data[len(first) :]:
                self._update_hash(rest)

    def tell(self) -> int:
        return self._written

    def flush(self) -> None:
        self._raw.flush()

    def fileno(self) -> int:
        return int(self._raw.fileno())

    def file_digests(self) -> FileDigests:
        rest = [self._hash.hexdigest()] if self._block_filled else []
        return {"bytes": self._written, "xxh3": [*self._digests, *rest]}


class ChecksummedFile(io.RawIOBase):
    """A file that is read in any order, of which no byte is given out before its block was found to be as written.

    Raises CorruptCheckpoint, naming the file.
    """

    def __init__(self, raw: Any, name: str, digests: FileDigests) -> None:
        self._raw = raw
        self._name = name
        self._digests: list[str] = digests["xxh3"]
        self._size: int = digests["bytes"]
        self._position = 0
        self._cached_block: tuple[int, bytes] = (-1, b"")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        out = memoryview(buffer).cast("B")
        wanted = max(0, min(len(out), self._size - self._position))
        done = 0
        while done < wanted:
            number, skip = divmod(self._position, BLOCK_BYTES)
            whole = min(BLOCK_BYTES, self._size - number * BLOCK_BYTES)
            if skip == 0 and wanted - done >= whole:  # straight to where it is wanted
                self._read_block(number, out[done : done + whole])
                taken = whole
            else:
                data = self._load_block(number, whole)
                taken = min(whole - skip, wanted - done)
                out[done : done + taken] = data[skip : skip + taken]
            done += taken
            self._position += taken
        return wanted

    def _load_block(self, number: int, size: int) -> bytes:
        if self._cached_block[0] != number:
            data = bytearray(size)
            self._read_block(number, memoryview(data))
            self._cached_block = number, bytes(data)
        return self._cached_block[1]

    def _read_block(self, number: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            try:
                self._raw.seek(number * BLOCK_BYTES + done)
                got = self._raw.readinto(into[done:])
            except OSError as problem:
                raise CorruptCheckpoint(f"{self._name} cannot be read ({problem.strerror or problem})") from None
            if not got:
                raise CorruptCheckpoint(
                    f"{self._name} ends after {number * BLOCK_BYTES + done:,} bytes instead of {self._size:,}"
                )
            done += got
        if xxhash.xxh3_64_hexdigest(into) != self._digests[number]:
            raise CorruptCheckpoint(f"{self._name} does not hold what was written (its checksum differs)")


class _PathFileSystem(FileSystemBase):
    """What a file system of DCP does with paths, whatever it does with files."""

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix

    def init_path(self, path: Any) -> Any:
        return path

    def mkdir(self, path: Any) -> None:
        make_folder(path)

    def exists(self, path: Any) -> bool:
        return bool(path.exists())

    def rm_file(self, path: Any) -> None:
        path.unlink()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, Path)


class HashingFileSystem(_PathFileSystem):
    """Files as they are written; `files` describes those that are done, by name.

    `problem` is the first error of the storage: PyTorch's zip writer reports it as a position it did not expect.
    """

    def __init__(self) -> None:
        self.files: dict[str, FileDigests] = {}
        self.first_error: OSError | None = None

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        try:
            # Unbuffered on a disk: what is written is large.
            with path.open(mode, **({"buffering": 0} if is_local(path) else {})) as raw:
                file = _HashingFile(_ErrorRecordingFile(raw, self))
                yield file
                self.files[path.name] = file.file_digests()
        except OSError as problem:
            self.first_error = self.first_error or problem
            raise

    def rename(self, path: Any, new_path: Any) -> None:
        path.rename(new_path)
        self.files[new_path.name] = self.files.pop(path.name)


class _ErrorRecordingFile:
    """A raw file whose failure to write is noted before PyTorch hides it."""

    def __init__(self, raw: Any, system: HashingFileSystem) -> None:
        self._raw, self._file_system = raw, system

    def write(self, data: memoryview) -> int:
        try:
            return int(self._raw.write(data))
        except OSError as problem:
            self._file_system.first_error = self._file_system.first_error or problem
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


class VerifyingFileSystem(_PathFileSystem):
    """Files as they are read, checked against what the manifest says of them."""

    def __init__(self, files: Mapping[str, FileDigests]) -> None:
        self._files = files

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        if path.name not in self._files:
            raise CorruptCheckpoint(f"{path.name} is not in its manifest")
        try:
            with path.open(mode, **({"buffering": 0} if is_local(path) else {})) as raw:
                yield ChecksummedFile(raw, path.name, self._files[path.name])
        except FileNotFoundError:
            raise CorruptCheckpoint(f"{path.name} is missing") from None

    def rename(self, path: Any, new_path: Any) -> None:
        raise io.UnsupportedOperation("reading")


def make_folder(path: Path) -> None:
    """Make a folder and those above it. Object stores have none, and would make a bucket instead."""
    if getattr(path, "protocol", "") not in OBJECT_STORES:
        path.mkdir(parents=True, exist_ok=True)


def digest_file(path: Path, sync: bool = False) -> FileDigests:
    """Size and block digests of a file as it is on the disk now; with `sync` it is there for good."""
    digests = []
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digests.append(xxhash.xxh3_64_hexdigest(block))
        if sync and is_local(path):
            os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "xxh3": digests}
