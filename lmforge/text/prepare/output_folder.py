"""The folder that a preparation writes: locked by one process at a time, and for one plan.

Its content is described in `core/data/shards/folder.py`.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lmforge.core.data.shards.folder import TokenFolder, read_token_folder_manifest
from lmforge.core.data.shards.format import RESTORE_HINT, SHARD_SUFFIXES, SHARDS_MANIFEST
from lmforge.core.data.shards.storage import LocalStorage
from lmforge.core.errors import UserError
from lmforge.core.files.atomic_files import PARTIAL_SUFFIX, atomic_write_json, check_output
from lmforge.core.files.locks import hold_lock
from lmforge.core.files.untrusted import read_json
from lmforge.core.records.manifests import UNFINISHED
from lmforge.text.sources.records import UNUSABLE

LOCK = ".lock"
LOCKS = {LOCK, f"{LOCK}.held"}  # the second on a file system without flock
# In the unfinished folder, for the processes of the preparation.
EVALUATION_NGRAMS = "evaluation-ngrams.npz"


@contextmanager
def lock_output_folder(out: Path, plan: dict[str, Any], overwrite: bool) -> Iterator[bool]:
    """Lock a folder for one plan. Yields whether it is finished already."""
    if (
        out.is_dir()
        and not (out / UNFINISHED).is_dir()
        and set(os.listdir(out)) - LOCKS
        and not _is_preparation(out)
    ):
        # Before the lock, which may have the name of a file there.
        check_output(out, kind="a preparation", other="folder")
    with lock_folder(out):
        yield _open_plan(out, plan, overwrite)


@contextmanager
def lock_folder(out: Path) -> Iterator[None]:
    """Lock a folder, which is created if missing, so that no other process writes to it.

    Raises UserError if another process holds the lock.
    """
    with ExitStack() as stack:
        try:
            out.mkdir(parents=True, exist_ok=True)
            is_held = stack.enter_context(hold_lock(out / LOCK))
        except OSError as error:
            raise UserError(
                f"{out}: cannot be created as a token folder: {error.strerror}; choose another"
                " folder"
            ) from None
        if not is_held:
            raise UserError(
                f"{out}: another preparation is writing here; wait for it, or name another folder"
            )
        try:
            yield
        finally:
            (out / LOCK).unlink(missing_ok=True)


def _open_plan(out: Path, plan: dict[str, Any], overwrite: bool) -> bool:
    """Write this plan to a folder, and return whether it is finished.

    Raises UserError if it holds anything else.
    """
    path = out / UNFINISHED / "plan.json"
    finished = _is_preparation(out)
    begun = finished or (path.is_file() and _has_results(out))
    if begun and overwrite:
        _remove_preparation(out)
        finished = begun = False
    elif not begun:
        # A preparation that ended before it wrote more than its plan, or while it was removed,
        # leaves nothing usable.
        expected = ("part-", "plan.json", EVALUATION_NGRAMS)
        if path.parent.is_dir() and all(
            entry.name.removeprefix(".").startswith(expected) and entry.is_file()
            for entry in path.parent.iterdir()
        ):
            _remove_preparation(out)
        if set(os.listdir(out)) - LOCKS:
            check_output(out, kind="a preparation", other="folder")
    if begun:
        if finished:
            written = TokenFolder.open(out).manifest.plan
        else:
            written = read_json(path, dict[str, Any], hint=RESTORE_HINT)
        changed = [name for name in plan if written.get(name) != plan[name]]
        if changed:
            names = ", ".join(changed)
            raise UserError(
                f"{out}: holds a preparation with other {names}; name another folder, or add"
                " --overwrite"
            )
        _remove_partial_files(out)
    else:
        path.parent.mkdir()
        atomic_write_json(path, plan)
    return finished


def _is_preparation(out: Path) -> bool:
    """Return True where a folder has the manifest of a preparation.

    A damaged one counts if there are shards beside it.
    """
    try:
        read_token_folder_manifest(LocalStorage(out))
    except FileNotFoundError:
        return False
    except UserError:
        return any(out.glob("*-00000.tokens"))
    return True


def _has_results(out: Path) -> bool:
    """Return True where a folder holds more than a plan, such as a tokenizer or parts."""
    names = {each.name for each in (*out.iterdir(), *(out / UNFINISHED).iterdir())}
    return not names <= {UNFINISHED, "plan.json", EVALUATION_NGRAMS, *LOCKS}


def _remove_preparation(folder: Path) -> None:
    """Delete what a preparation wrote, the manifest first, and nothing else."""
    # Interrupted, this leaves an unfinished preparation, which the next one removes.
    (folder / UNFINISHED).mkdir(exist_ok=True)
    for name in (SHARDS_MANIFEST, UNUSABLE):
        (folder / name).unlink(missing_ok=True)
    number = "[0-9]" * 5
    patterns = [f"*-{number}{suffix}" for suffix in SHARD_SUFFIXES]
    for pattern in (*patterns, f"*-{number}.best-fit-*", "best-fit-*.json"):
        for file in folder.glob(pattern):
            file.unlink()
    _remove_partial_files(folder)
    for name in ("tokenizer", UNFINISHED):
        shutil.rmtree(folder / name, ignore_errors=True)


def _remove_partial_files(folder: Path) -> None:
    """Delete leftovers of interrupted atomic writes.

    The folder is locked, so no other process writes to it.
    """
    for pattern in (f".*{PARTIAL_SUFFIX}", f"{UNFINISHED}/.*{PARTIAL_SUFFIX}"):
        for file in folder.glob(pattern):
            file.unlink()
