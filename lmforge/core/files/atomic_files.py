"""Atomic writes: a file or a folder appears under its name complete or not at all, and survives a
power failure once it is there.

Every file that another process may read, or that a crash must not damage, is written through this
module. Heartbeats (ops/monitor/heartbeat.py, overwritten in place) are the exception, for reasons
given there, and downloads (hub.py) are huggingface_hub's.
Object stores have no rename: core/checkpoint/ writes the manifest last there. No torch here.
"""

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, TextIO
from uuid import uuid4

from lmforge.core.errors import DISK_FULL_ERRNOS, UserError

PARTIAL_SUFFIX = ".partial"
DELETED_SUFFIX = ".deleted"


def check_output(
    path: Path,
    option: str = "",
    *,
    kind: str = "",
    is_of_kind: Callable[[Path], bool] = lambda path: False,
    other: str = "file",
) -> None:
    """Decides for every path that a user names and a command writes: what is there stays, unless it
    is what the command writes.

    Call it before the work begins. Raises UserError where there is something of another kind than
    `kind`, or its folder cannot be there; `option`, such as "--out", begins the message, and
    `other` ends it.
    """
    where = f"{option}: {path}" if option else f"{path}:"
    if os.path.lexists(path) and not is_of_kind(path):
        what = f"exists and is not {kind}" if kind else "exists already"
        raise UserError(f"{where} {what}; name another {other}")
    above = next(each for each in path.absolute().parents if os.path.lexists(each))
    try:
        with TemporaryFile(dir=above):
            pass
    except OSError as problem:
        raise UserError(
            f"{where} cannot be written ({above}: {problem.strerror}); name another {other}"
        ) from None


def partial_path(path: Path) -> Path:
    """A name beside `path` to write under, which no other process uses."""
    return path.with_name(f".{path.name}.{uuid4().hex}{PARTIAL_SUFFIX}")


@contextmanager
def atomic_write(path: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """A file to write that appears as `path` when the block ends without an exception, and not at
    all otherwise.

    Several processes may write it at once; the last one's stays. `sync=False` leaves out fsync, for
    files that may be lost with the machine. Raises UserError naming the folder when the disk is
    full.
    """
    partial = partial_path(path)
    try:
        with _full_disk_as_user_error(path):
            with open(partial, "wb") as file:
                yield file
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(partial, path)
            if sync:
                fsync_path(path.parent)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _full_disk_as_user_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        reason = f"no space to write {path.name} ({error.strerror}); free some and run again"
        raise UserError(f"{path.parent}: {reason}") from None


def atomic_write_text(path: Path, text: str, *, sync: bool = True) -> None:
    """Write `text` as UTF-8, atomically."""
    with atomic_write(path, sync=sync) as file:
        file.write(text.encode())


def without_non_finite(value: Any) -> Any:
    """`value`, of JSON's types, with None for NaN and infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {name: without_non_finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [without_non_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def atomic_write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    atomic_write_text(path, json.dumps(value, indent=1) + "\n")


@contextmanager
def create_file(path: Path) -> Iterator[TextIO]:
    """A new text file to write, which is deleted again if the block fails.

    Raises UserError where `path` exists or cannot be written; the file is created at once, so that
    a command can fail before its work.
    """
    check_output(path)
    try:
        with open(path, "x", encoding="utf-8") as file:
            try:
                yield file
                file.flush()
            except BaseException:
                path.unlink()
                raise
    except OSError as problem:
        raise UserError(
            f"{path}: cannot be written ({problem.strerror}); name another file"
        ) from None


@contextmanager
def atomic_folder(folder: Path, *, replace: bool) -> Iterator[Path]:
    """A folder to fill that appears as `folder` when the block ends without an exception, and not
    at all otherwise.

    With `replace`, what was there is deleted once the new folder has its name, and stays if
    anything fails. Without, a folder that another process finished first stays, and this one is
    dropped.
    """
    partial = partial_path(folder)
    previous = folder.with_name(f".{folder.name}.{uuid4().hex}.previous")
    try:
        with _full_disk_as_user_error(folder):
            partial.mkdir(parents=True)
            yield partial
            for path in (*partial.rglob("*"), partial):
                fsync_path(path)
            if replace and folder.exists():
                folder.rename(previous)
            try:
                partial.rename(folder)
            except OSError:
                if replace or not folder.exists():
                    raise
            fsync_path(folder.parent)
    finally:
        if previous.exists() and not folder.exists():
            previous.rename(folder)
        for leftover in (partial, previous):
            shutil.rmtree(leftover, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Delete a folder; renamed first, so that a deletion that is cut off leaves nothing under its
    name.

    Raises NotADirectoryError where it is a file, which is left as it is.
    """
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    beside = folder.with_name(f".{folder.name}{DELETED_SUFFIX}")
    shutil.rmtree(beside, ignore_errors=True)
    folder.rename(beside)
    shutil.rmtree(beside)


def fsync_path(path: Path) -> None:
    """Make the content of a file, or the renames inside a folder, outlive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
