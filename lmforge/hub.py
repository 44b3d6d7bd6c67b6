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

from lmforge.atomic_files import DISK_FULL_ERRNOS
from lmforge.errors import UserError

MODEL_NAME_PATTERN = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(@(?P<revision>[\w.][\w./-]*))?")
SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
# What says how a model is built and how its text is cut; weights are named by their index.
CONFIG_AND_TOKENIZER_FILES = re.compile(r"[^/]+\.(json|jinja)|tokenizer\.model|merges\.txt|vocab\.txt")
# Of a folder that was downloaded: which revision it holds, and what was checked.
DOWNLOAD_RECORD = ".lmforge-download.json"
PARTIAL_SUFFIX = ".partial"
LOCK_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class HubFile:
    """A file as the hub describes it: its size, and its SHA-256 where it is large, else git's SHA-1 of it."""

    name: str
    size: int
    digest: str

    @property
    def is_lfs(self) -> bool:
        return len(self.digest) == 64

    def matches(self, path: Path) -> bool:
        """Whether a file on the disk holds what the hub holds."""
        if path.stat().st_size != self.size:
            return False
        digest = hashlib.sha256() if self.is_lfs else hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)
        with open(path, "rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
        return digest.hexdigest() == self.digest


@dataclass(frozen=True)
class DownloadResult:
    """What came of a download: where it is, at which commit, and which files were fetched now and which were there."""

    folder: Path
    commit: str
    downloaded: tuple[HubFile, ...]
    already_present: tuple[HubFile, ...]


def parse_model_name(name: str, revision: str | None = None) -> tuple[str, str]:
    """`org/name[@revision]` as (org/name, revision), "main" where none is said. Raises UserError for anything else."""
    parts = MODEL_NAME_PATTERN.fullmatch(name)
    if parts is None:
        raise UserError(f"{name}: not the name of a model on the hub; give organisation/model, or organisation/model@revision")
    if revision and parts["revision"] and revision != parts["revision"]:
        raise UserError(f"{name}: names one revision and --revision {revision} another; give one of them")
    return parts["name"], revision or parts["revision"] or "main"


def is_hub_name(source: str | Path) -> bool:
    """Whether `source` can only be a model on the hub: it has the form of such a name, and there is no such path."""
    return MODEL_NAME_PATTERN.fullmatch(str(source)) is not None and not Path(source).exists()


def resolve_model_folder(source: Path, required: Literal["weights", "config.json", "tokenizer.json"] = "weights") -> Path:
    """The folder of a model: `source` itself, or where the cache has the model that it names, fetched first if need be.

    What is in the cache is taken as it is: the hub is not asked whether there is something newer. Weights are fetched only
    where they are needed. Raises UserError where the model can neither be found nor fetched.
    """
    if not is_hub_name(source):
        return source
    name, revision = parse_model_name(str(source))
    there = find_cached(name, revision, required)
    return there or download(name, revision, include_weights=required == "weights", report=_print_to_stderr).folder


def download(
    name: str,
    revision: str,
    folder: Path | None = None,
    *,
    include_weights: bool = True,
    report: Callable[[str], None] = print,
) -> DownloadResult:
    """Fetch a model into `folder`, or into the cache, unless it is there. Raises UserError where that cannot be done."""
    from huggingface_hub import constants

    _refuse_offline(name, revision)
    info = _list_repo(name, revision)
    listed = {file.name: file for file in info.files}
    keep = folder or Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    store: _FolderStore | _CacheStore = _FolderStore(folder) if folder else _CacheStore(keep, info.commit, revision)
    with _disk_errors_as_user_errors(keep), _download_lock(keep, report):
        fetched: list[HubFile] = []
        present: list[HubFile] = []

        def take(names: list[str]) -> None:
            for each in sorted(names):
                file = listed[each]
                if store.has(file):
                    present.append(file)
                else:
                    report(f"{each}: {file.size:,} bytes")
                    _download_file(name, info.commit, file, store.path_of(file))
                    fetched.append(file)
                store.mark_complete(file)

        take([each for each in listed if CONFIG_AND_TOKENIZER_FILES.fullmatch(each)])
        if "config.json" not in listed and include_weights:
            raise UserError(f"{name}: has no config.json on the hub, so it is not a model that can be opened")
        if include_weights:
            take(_weight_file_names(name, listed, store.folder))
        store.finish(name, info.commit, (*fetched, *present))
    return DownloadResult(store.folder, info.commit, tuple(fetched), tuple(present))


def _weight_file_names(name: str, listed: dict[str, HubFile], folder: Path) -> list[str]:
    if SAFE_WEIGHTS_INDEX_NAME in listed and SAFE_WEIGHTS_NAME not in listed:
        try:
            names = set(json.loads((folder / SAFE_WEIGHTS_INDEX_NAME).read_text("utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError):
            raise UserError(f"{name}: its {SAFE_WEIGHTS_INDEX_NAME} is not an index of weights") from None
        if absent := sorted(map(str, names - listed.keys())):
            raise UserError(f"{name}: its index names {absent[0]}, which is not on the hub")
        return list(names)
    if SAFE_WEIGHTS_NAME not in listed:
        raise UserError(f"{name}: has no safetensors weights on the hub; pickled ones (.bin, .pth) are not fetched")
    return [SAFE_WEIGHTS_NAME]


class _FolderStore:
    """A plain folder, with a record of what was checked: what is in it already need not be read again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._checked = set(map(tuple, json.loads((folder / DOWNLOAD_RECORD).read_text("utf-8"))["files"]))
        except (OSError, ValueError, KeyError, TypeError):
            self._checked = set()
        if folder.exists() and not self._checked and any(folder.glob("*.safetensors")):
            raise UserError(f"{folder}: holds a model that was not downloaded by lmforge; choose another folder")

    def has(self, file: HubFile) -> bool:
        path = self.path_of(file)
        known = (file.name, file.size, file.digest) in self._checked
        return path.is_file() and (path.stat().st_size == file.size if known else file.matches(path))

    def path_of(self, file: HubFile) -> Path:
        return self.folder / file.name

    def mark_complete(self, file: HubFile) -> None:
        """Note that this file is whole, at once: a download that is cut off later need not check it again."""
        self._checked.add((file.name, file.size, file.digest))
        _write_text(self.folder / DOWNLOAD_RECORD, json.dumps({"files": sorted(self._checked)}, indent=1) + "\n")

    def finish(self, name: str, commit: str, files: tuple[HubFile, ...]) -> None:
        content = {"name": name, "commit": commit, "files": sorted((f.name, f.size, f.digest) for f in files)}
        _write_text(self.folder / DOWNLOAD_RECORD, json.dumps(content, indent=1) + "\n")


class _CacheStore:
    """The hub library's cache: contents under their digests, and a folder a commit of links to them."""

    def __init__(self, repo_folder: Path, commit: str, revision: str) -> None:
        self._repo_folder, self._commit, self._revision = repo_folder, commit, revision
        self.folder = repo_folder / "snapshots" / commit

    def has(self, file: HubFile) -> bool:
        place = self.path_of(file)
        return place.is_file() and place.stat().st_size == file.size

    def path_of(self, file: HubFile) -> Path:
        return self._repo_folder / "blobs" / file.digest

    def mark_complete(self, file: HubFile) -> None:
        link = self.folder / file.name
        if link.exists():
            return
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(self.path_of(file), link.parent))

    def finish(self, name: str, commit: str, files: tuple[HubFile, ...]) -> None:
        if self._revision != commit:
            (self._repo_folder / "refs" / self._revision).parent.mkdir(parents=True, exist_ok=True)
            _write_text(self._repo_folder / "refs" / self._revision, commit)


def find_cached(name: str, revision: str, required: str = "weights") -> Path | None:
    """The folder in which the cache has this model whole, without asking the hub; None where it has not."""
    from huggingface_hub import constants

    keep = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    reference = keep / "refs" / revision
    commit = reference.read_text("utf-8").strip() if reference.is_file() else revision
    folder = keep / "snapshots" / commit
    if required != "weights":
        return folder if (folder / required).exists() else None
    if not (folder / "config.json").exists():
        return None
    if (folder / SAFE_WEIGHTS_NAME).exists():
        return folder
    try:
        needed = set(json.loads((folder / SAFE_WEIGHTS_INDEX_NAME).read_text("utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
    return folder if all((folder / file).exists() for file in needed) else None


@dataclass(frozen=True)
class _RepoListing:
    commit: str
    files: tuple[HubFile, ...]


def _refuse_offline(name: str, revision: str) -> None:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise UserError(
            f"{name}: no such folder, and {revision} of it is not in the cache {constants.HF_HUB_CACHE}; HF_HUB_OFFLINE is set,"
            " so the hub is not asked: unset it, or fetch the model where there is a network with lmforge download"
        )


def _list_repo(name: str, revision: str) -> _RepoListing:
    from huggingface_hub import HfApi

    with _hub_errors_as_user_errors(name, revision):
        info = HfApi(library_name="lmforge").model_info(name, revision=revision, files_metadata=True)
    files = []
    for each in info.siblings or ():
        digest = each.lfs.sha256 if each.lfs is not None else each.blob_id
        if each.size is not None and digest and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", digest):
            files.append(HubFile(each.rfilename, each.size, digest))
    return _RepoListing(str(info.sha), tuple(files))


def _download_file(name: str, commit: str, file: HubFile, destination: Path) -> None:
    """Bring one file to `place`, going on from what an earlier attempt left."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    partial = destination.with_name(f".{file.digest}{PARTIAL_SUFFIX}")
    destination.parent.mkdir(parents=True, exist_ok=True)
    # Compressed on the way, a file could not be gone on with.
    headers = {**build_hf_headers(library_name="lmforge"), "Accept-Encoding": "identity"}
    while True:
        left = partial.stat().st_size if partial.exists() else 0
        if left > file.size:
            partial.unlink()
            left = 0
        with open(partial, "ab") as growing:
            with _hub_errors_as_user_errors(name, commit, file.name):
                http_get(
                    hf_hub_url(name, file.name, revision=commit),
                    growing,
                    resume_size=left,
                    headers=headers,
                    expected_size=file.size,
                    displayed_filename=file.name,
                )
            growing.flush()
            os.fsync(growing.fileno())
        if file.matches(partial):
            os.replace(partial, destination)
            return
        partial.unlink()
        if not left:  # or else what was left of an earlier attempt may have been at fault: once more, from the start
            raise UserError(
                f"{name}: {file.name} did not arrive as the hub describes it (its checksum differs) and was thrown away;"
                " try again"
            )


@contextmanager
def _hub_errors_as_user_errors(name: str, revision: str, file: str = "") -> Iterator[None]:
    """The hub library's errors as mistakes of one line."""
    from huggingface_hub import constants, errors

    endpoint = constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError:
        raise UserError(
            f"{name}: gated: accept its terms at {endpoint}/{name}, then log in (hf auth login, or HF_TOKEN in the environment)"
        ) from None
    except errors.RevisionNotFoundError:
        raise UserError(f"{name}: has no revision {revision} on the hub; leave it out for its newest") from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"{name}: neither a folder here nor a model on {endpoint} that can be seen without permission; check the name,"
            " or log in (hf auth login, or HF_TOKEN in the environment)"
        ) from None
    except errors.HfHubHTTPError as problem:
        answer = getattr(problem.response, "status_code", "an error")
        raise UserError(f"{name}: {endpoint} answered with {answer}{_for_file(file)}; try again later") from None
    except OSError as problem:
        if problem.errno in DISK_FULL_ERRNOS:
            raise
        raise UserError(f"{name}: {_one_line(problem)}{_for_file(file)}; run it again to go on from there") from None
    except Exception as problem:  # the library raises those of whichever HTTP client it is built on
        raise UserError(
            f"{name}: no such folder, not in the cache, and {endpoint} cannot be reached{_for_file(file)}"
            f" ({_one_line(problem)}); see to the network and run it again to go on from there"
        ) from None


def _for_file(file: str) -> str:
    return f" for {file}" if file else ""


def _one_line(problem: BaseException) -> str:
    return " ".join(f"{type(problem).__name__}: {problem}".split())[:160]


@contextmanager
def _disk_errors_as_user_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        what = "no room to download into it" if problem.errno in DISK_FULL_ERRNOS else "cannot be written"
        raise UserError(f"{folder}: {what} ({problem.strerror}); run it again to go on from there") from None


@contextmanager
def _download_lock(folder: Path, report: Callable[[str], None]) -> Iterator[None]:
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
                    report(f"{folder}: another process is downloading into it; waiting")
                waiting = True
                time.sleep(LOCK_POLL_SECONDS)
        yield


def _write_text(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def _print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
