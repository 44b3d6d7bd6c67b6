"""Models by their names on the Hugging Face hub: found in the local cache, or fetched once, checked, and kept there.

A folder that exists is always meant before a name. Weights come as safetensors, the rest as JSON and the plain files of
tokenizers; pickles and code are left where they are. A file grows under another name and is renamed once its size and
checksum are the hub's, so that what was cut off goes on where it stopped, in another process too: the hub's own library
begins such a file again. The cache is that library's, and what lies in it is found by transformers as well.
"""

import fcntl
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lmforge.data.sealing import NO_ROOM
from lmforge.errors import Mistake

NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(@(?P<revision>[\w.][\w./-]*))?")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# What says how a model is built and how its text is cut; weights are named by their index.
DESCRIBING = re.compile(r"[^/]+\.(json|jinja)|tokenizer\.model|merges\.txt|vocab\.txt")
# Of a folder that was downloaded: which revision it holds, and what was checked.
RECORD = ".lmforge-download.json"
PARTIAL = ".partial"
LOOK_AGAIN_SECONDS = 0.5


@dataclass(frozen=True)
class HubFile:
    """A file as the hub describes it: its size, and its SHA-256 where it is large, else git's SHA-1 of it."""

    name: str
    bytes: int
    digest: str

    @property
    def is_large(self) -> bool:
        return len(self.digest) == 64

    def fits(self, path: Path) -> bool:
        """Whether a file on the disk holds what the hub holds."""
        if path.stat().st_size != self.bytes:
            return False
        digest = hashlib.sha256() if self.is_large else hashlib.sha1(b"blob %d\0" % self.bytes, usedforsecurity=False)
        with open(path, "rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
        return digest.hexdigest() == self.digest


@dataclass(frozen=True)
class Fetched:
    """What came of a download: where it is, at which commit, and which files were fetched now and which were there."""

    folder: Path
    commit: str
    fetched: tuple[HubFile, ...]
    present: tuple[HubFile, ...]


def split_name(name: str, revision: str | None = None) -> tuple[str, str]:
    """`org/name[@revision]` as (org/name, revision), "main" where none is said. Raises Mistake for anything else."""
    parts = NAME.fullmatch(name)
    if parts is None:
        raise Mistake(f"{name}: not the name of a model on the hub; give organisation/model, or organisation/model@revision")
    if revision and parts["revision"] and revision != parts["revision"]:
        raise Mistake(f"{name}: names one revision and --revision {revision} another; give one of them")
    return parts["name"], revision or parts["revision"] or "main"


def is_name(source: str | Path) -> bool:
    """Whether `source` can only be a model on the hub: it has the form of such a name, and there is no such path."""
    return NAME.fullmatch(str(source)) is not None and not Path(source).exists()


def local_folder(source: Path, needs: Literal["weights", "config.json", "tokenizer.json"] = "weights") -> Path:
    """The folder of a model: `source` itself, or where the cache has the model that it names, fetched first if need be.

    What is in the cache is taken as it is: the hub is not asked whether there is something newer. Weights are fetched only
    where they are needed. Raises Mistake where the model can neither be found nor fetched.
    """
    if not is_name(source):
        return source
    name, revision = split_name(str(source))
    there = cached(name, revision, needs)
    return there or download(name, revision, weights=needs == "weights", say=_to_standard_error).folder


def download(
    name: str,
    revision: str,
    folder: Path | None = None,
    *,
    weights: bool = True,
    say: Callable[[str], None] = print,
) -> Fetched:
    """Fetch a model into `folder`, or into the cache, unless it is there. Raises Mistake where that cannot be done."""
    from huggingface_hub import constants

    _refuse_offline(name, revision)
    info = _described(name, revision)
    listed = {file.name: file for file in info.files}
    keep = folder or Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    store: _Folder | _Cache = _Folder(folder) if folder else _Cache(keep, info.commit, revision)
    with _telling_of_disk(keep), _alone(keep, say):
        fetched: list[HubFile] = []
        present: list[HubFile] = []

        def take(names: list[str]) -> None:
            for each in sorted(names):
                file = listed[each]
                if store.has(file):
                    present.append(file)
                else:
                    say(f"{each}: {file.bytes:,} bytes")
                    _fetch(name, info.commit, file, store.place(file))
                    fetched.append(file)
                store.link(file)

        take([each for each in listed if DESCRIBING.fullmatch(each)])
        if "config.json" not in listed and weights:
            raise Mistake(f"{name}: has no config.json on the hub, so it is not a model that can be opened")
        if weights:
            take(_weight_files(name, listed, store.folder))
        store.finish(name, info.commit, (*fetched, *present))
    return Fetched(store.folder, info.commit, tuple(fetched), tuple(present))


def _weight_files(name: str, listed: dict[str, HubFile], folder: Path) -> list[str]:
    if INDEX in listed and SINGLE not in listed:
        try:
            names = set(json.loads((folder / INDEX).read_text("utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError):
            raise Mistake(f"{name}: its {INDEX} is not an index of weights") from None
        if absent := sorted(map(str, names - listed.keys())):
            raise Mistake(f"{name}: its index names {absent[0]}, which is not on the hub")
        return list(names)
    if SINGLE not in listed:
        raise Mistake(f"{name}: has no safetensors weights on the hub; pickled ones (.bin, .pth) are not fetched")
    return [SINGLE]


class _Folder:
    """A plain folder, with a record of what was checked: what is in it already need not be read again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._checked = set(map(tuple, json.loads((folder / RECORD).read_text("utf-8"))["files"]))
        except (OSError, ValueError, KeyError, TypeError):
            self._checked = set()
        if folder.exists() and not self._checked and any(folder.glob("*.safetensors")):
            raise Mistake(f"{folder}: holds a model that was not downloaded by lmforge; choose another folder")

    def has(self, file: HubFile) -> bool:
        path = self.place(file)
        known = (file.name, file.bytes, file.digest) in self._checked
        return path.is_file() and (path.stat().st_size == file.bytes if known else file.fits(path))

    def place(self, file: HubFile) -> Path:
        return self.folder / file.name

    def link(self, file: HubFile) -> None:
        """Note that this file is whole, at once: a download that is cut off later need not check it again."""
        self._checked.add((file.name, file.bytes, file.digest))
        _write(self.folder / RECORD, json.dumps({"files": sorted(self._checked)}, indent=1) + "\n")

    def finish(self, name: str, commit: str, files: tuple[HubFile, ...]) -> None:
        content = {"name": name, "commit": commit, "files": sorted((f.name, f.bytes, f.digest) for f in files)}
        _write(self.folder / RECORD, json.dumps(content, indent=1) + "\n")


class _Cache:
    """The hub library's cache: contents under their digests, and a folder a commit of links to them."""

    def __init__(self, keep: Path, commit: str, revision: str) -> None:
        self._keep, self._commit, self._revision = keep, commit, revision
        self.folder = keep / "snapshots" / commit

    def has(self, file: HubFile) -> bool:
        place = self.place(file)
        return place.is_file() and place.stat().st_size == file.bytes

    def place(self, file: HubFile) -> Path:
        return self._keep / "blobs" / file.digest

    def link(self, file: HubFile) -> None:
        link = self.folder / file.name
        if link.exists():
            return
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(self.place(file), link.parent))

    def finish(self, name: str, commit: str, files: tuple[HubFile, ...]) -> None:
        if self._revision != commit:
            (self._keep / "refs" / self._revision).parent.mkdir(parents=True, exist_ok=True)
            _write(self._keep / "refs" / self._revision, commit)


def cached(name: str, revision: str, needs: str = "weights") -> Path | None:
    """The folder in which the cache has this model whole, without asking the hub; None where it has not."""
    from huggingface_hub import constants

    keep = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    reference = keep / "refs" / revision
    commit = reference.read_text("utf-8").strip() if reference.is_file() else revision
    folder = keep / "snapshots" / commit
    if needs != "weights":
        return folder if (folder / needs).exists() else None
    if not (folder / "config.json").exists():
        return None
    if (folder / SINGLE).exists():
        return folder
    try:
        needed = set(json.loads((folder / INDEX).read_text("utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
    return folder if all((folder / file).exists() for file in needed) else None


@dataclass(frozen=True)
class _Described:
    commit: str
    files: tuple[HubFile, ...]


def _refuse_offline(name: str, revision: str) -> None:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise Mistake(
            f"{name}: no such folder, and {revision} of it is not in the cache {constants.HF_HUB_CACHE}; HF_HUB_OFFLINE is set,"
            " so the hub is not asked: unset it, or fetch the model where there is a network with lmforge download"
        )


def _described(name: str, revision: str) -> _Described:
    from huggingface_hub import HfApi

    with _telling_of_hub(name, revision):
        info = HfApi(library_name="lmforge").model_info(name, revision=revision, files_metadata=True)
    files = []
    for each in info.siblings or ():
        digest = each.lfs.sha256 if each.lfs is not None else each.blob_id
        if each.size is not None and digest and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", digest):
            files.append(HubFile(each.rfilename, each.size, digest))
    return _Described(str(info.sha), tuple(files))


def _fetch(name: str, commit: str, file: HubFile, place: Path) -> None:
    """Bring one file to `place`, going on from what an earlier attempt left."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    partial = place.with_name(f".{file.digest}{PARTIAL}")
    place.parent.mkdir(parents=True, exist_ok=True)
    # Compressed on the way, a file could not be gone on with.
    headers = {**build_hf_headers(library_name="lmforge"), "Accept-Encoding": "identity"}
    while True:
        left = partial.stat().st_size if partial.exists() else 0
        if left > file.bytes:
            partial.unlink()
            left = 0
        with open(partial, "ab") as growing:
            with _telling_of_hub(name, commit, file.name):
                http_get(
                    hf_hub_url(name, file.name, revision=commit),
                    growing,
                    resume_size=left,
                    headers=headers,
                    expected_size=file.bytes,
                    displayed_filename=file.name,
                )
            growing.flush()
            os.fsync(growing.fileno())
        if file.fits(partial):
            os.replace(partial, place)
            return
        partial.unlink()
        if not left:  # or else what was left of an earlier attempt may have been at fault: once more, from the start
            raise Mistake(
                f"{name}: {file.name} did not arrive as the hub describes it (its checksum differs) and was thrown away;"
                " try again"
            )


@contextmanager
def _telling_of_hub(name: str, revision: str, file: str = "") -> Iterator[None]:
    """The hub library's errors as mistakes of one line."""
    from huggingface_hub import constants, errors

    endpoint = constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError:
        raise Mistake(
            f"{name}: gated: accept its terms at {endpoint}/{name}, then log in (hf auth login, or HF_TOKEN in the environment)"
        ) from None
    except errors.RevisionNotFoundError:
        raise Mistake(f"{name}: has no revision {revision} on the hub; leave it out for its newest") from None
    except errors.RepositoryNotFoundError:
        raise Mistake(
            f"{name}: neither a folder here nor a model on {endpoint} that can be seen without permission; check the name,"
            " or log in (hf auth login, or HF_TOKEN in the environment)"
        ) from None
    except errors.HfHubHTTPError as problem:
        answer = getattr(problem.response, "status_code", "an error")
        raise Mistake(f"{name}: {endpoint} answered with {answer}{_about(file)}; try again later") from None
    except OSError as problem:
        if problem.errno in NO_ROOM:
            raise
        raise Mistake(f"{name}: {_one_line(problem)}{_about(file)}; run it again to go on from there") from None
    except Exception as problem:  # the library raises those of whichever HTTP client it is built on
        raise Mistake(
            f"{name}: no such folder, not in the cache, and {endpoint} cannot be reached{_about(file)}"
            f" ({_one_line(problem)}); see to the network and run it again to go on from there"
        ) from None


def _about(file: str) -> str:
    return f" for {file}" if file else ""


def _one_line(problem: BaseException) -> str:
    return " ".join(f"{type(problem).__name__}: {problem}".split())[:160]


@contextmanager
def _telling_of_disk(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        what = "no room to download into it" if problem.errno in NO_ROOM else "cannot be written"
        raise Mistake(f"{folder}: {what} ({problem.strerror}); run it again to go on from there") from None


@contextmanager
def _alone(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """One process at a time downloads into a folder; the others wait for as long as that takes."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lmforge-download.lock", "a", encoding="utf-8") as lock:
        waiting = False
        while True:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):
                if not waiting:
                    say(f"{folder}: another process is downloading into it; waiting")
                waiting = True
                time.sleep(LOOK_AGAIN_SECONDS)
        yield


def _write(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def _to_standard_error(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
