"""Models and datasets by their names on the Hugging Face hub: found in the local cache, or downloaded once, and kept there.

An existing folder takes precedence over a name. Weights are downloaded as safetensors, the rest as JSON and the plain files of
tokenizers; pickles and code are not. The calls to the hub are huggingface_hub's public ones. Two promises are ours, because
that library keeps neither: a download that was cut off is resumed, by another process too, and no file takes its name before
its size and checksum (SHA-256 for weights) match the hub's. The cache is the library's, so transformers finds its models too.
"""

import hashlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from typing_extensions import TypedDict

from lmforge.core.errors import DISK_FULL_ERRNOS, UserError
from lmforge.core.files.atomic_files import PARTIAL_SUFFIX, atomic_write_json, atomic_write_text, check_output
from lmforge.core.files.locks import hold_lock
from lmforge.core.files.untrusted import cut, is_inner_path, quoted, read_json
from lmforge.core.records.kinds import MODEL_NAME_PATTERN, is_hub_name

COMMIT_PATTERN = re.compile(r"[0-9a-f]{40}")
DIGEST_PATTERN = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
CONFIG_AND_TOKENIZER_FILES = re.compile(
    r"[^/]+\.(json|jinja)|additional_chat_templates/[^/]+\.jinja|tokenizer\.model|merges\.txt|vocab\.txt"
)
# The files that `datasets` reads, and the dataset card, which says how the files are divided.
DATA_FILES = re.compile(
    r"(?:README\.md|.+\.(?:jsonl?|csv|tsv|txt|parquet|arrow)(?:\.(?:gz|zst|xz|bz2))?|.+\.(?:zip|tar|tar\.gz))"
)
# In a folder that was downloaded to, and in a complete dataset of the cache: {"files": the [name, size, digest] of each file
# that was verified}.
OWN_FILES_PREFIX = ".lmforge-download."
DOWNLOAD_RECORD = f"{OWN_FILES_PREFIX}json"
MAX_INDEX_BYTES = 2**28
BLOCK_BYTES = 1 << 20
MAX_ATTEMPTS, RETRY_SECONDS = 5, 1.0
TIMEOUT_SECONDS, REPORT_EVERY_SECONDS = 30.0, 10.0
# A compute node without a network may silently drop packets.
LOOKUP_SECONDS = 10.0

Report = Callable[[str], None]
Kind = Literal["model", "dataset"]


class HubFile(NamedTuple):
    """A file as the hub lists it: its size, and its SHA-256 if it is stored as a large file, else git's SHA-1."""

    name: str
    size: int
    digest: str

    def matches(self, path: Path) -> bool:
        """Whether a file on the disk has this size and digest."""
        if path.stat().st_size != self.size:
            return False
        is_sha256 = len(self.digest) == 64
        digest = hashlib.sha256() if is_sha256 else hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: digest).hexdigest() == self.digest


@dataclass(frozen=True)
class DownloadResult:
    """Where a model is, at which commit, which files were downloaded now and which were already there."""

    folder: Path
    commit: str
    downloaded: list[HubFile]
    already_present: list[HubFile]


class WeightIndex(TypedDict):  # model.safetensors.index.json
    weight_map: dict[str, str]


def parse_model_name(name: str, revision: str | None = None) -> tuple[str, str]:
    """`org/name[@revision]` as (org/name, revision), "main" by default. Raises UserError for anything else."""
    parts = MODEL_NAME_PATTERN.fullmatch(name)
    if parts is None:
        form = "organisation/model or organisation/model@revision"
        raise UserError(f"{cut(name)}: not the name of a model on the hub; give {form}")
    if revision and parts["revision"] and revision != parts["revision"]:
        raise UserError(f"{name}: names one revision and --revision {revision} another; give one of them")
    chosen = revision or parts["revision"] or "main"
    if not is_inner_path(chosen):  # the cache has a file of that name
        raise UserError(f"{cut(name)}: {quoted(chosen)} is not a revision of a model on the hub; leave it out for its newest")
    return parts["name"], chosen


def resolve_model_folder(source: Path, required: Literal["weights", "config.json", "tokenizer.json"] = "weights") -> Path:
    """The folder of a model: `source` itself, or where the cache has the model that it names, downloaded first if need be.

    A cached model is taken as it is: the hub is not asked for a newer one. Weights are downloaded only if they are `required`.
    Raises UserError if the model can neither be found nor downloaded.
    """
    if not is_hub_name(source):
        return source
    name, revision = parse_model_name(str(source))
    report = partial(print, file=sys.stderr, flush=True)
    cached = find_cached(name, revision, required)
    return cached or download(name, revision, include_weights=required == "weights", report=report).folder


def cache_folder() -> Path:
    """The folder of the library's cache, which need not exist."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def find_cached(name: str, revision: str, required: str = "weights") -> Path | None:
    """The folder in which the cache has all that is `required` of this model, else None. Does not ask the hub."""
    from huggingface_hub import try_to_load_from_cache

    with hub_errors_as_user_errors(name, revision):
        path = try_to_load_from_cache(name, "config.json" if required == "weights" else required, revision=revision)
    if not isinstance(path, str):
        return None
    folder = Path(path).parent
    if required != "weights" or (folder / SAFE_WEIGHTS_NAME).exists():
        return folder
    with suppress(OSError, UserError):
        if all((folder / file).exists() for file in indexed_weight_files(folder)):
            return folder
    return None


def indexed_weight_files(folder: Path) -> list[str]:
    """The weight files that a folder's index names, sorted. Raises UserError if it is not an index; OSError passes."""
    path = folder / SAFE_WEIGHTS_INDEX_NAME
    index = read_json(path, WeightIndex, max_bytes=MAX_INDEX_BYTES, hint="copy the file again")
    return sorted(set(index["weight_map"].values()))


def download(
    name: str,
    revision: str,
    folder: Path | None = None,
    *,
    kind: Kind = "model",
    include_weights: bool = True,
    report: Report = print,
) -> DownloadResult:
    """Download a model or a dataset into `folder`, or into the cache, except what is there already.

    `report` is called with lines on the progress. Raises UserError if it cannot be downloaded.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise UserError(offline_message(name, revision, kind))
    commit, listed = _list_files(name, revision, kind)
    root = folder or cache_folder() / f"{kind}s--{name.replace('/', '--')}"
    with _download_into(root, report):
        destination = _Destination(folder or root / "snapshots" / commit, None if folder else root / "blobs")
        result = DownloadResult(destination.folder, commit, [], [])
        chosen = _files_to_download(name, listed, destination.folder, include_weights)
        for file in chosen if kind == "model" else _data_files(name, listed):
            if destination.has(file):
                result.already_present.append(file)
            else:
                report(f"{file.name}: {file.size:,} bytes")
                _download_file(name, commit, file, destination.path_of(file), report, kind)
                result.downloaded.append(file)
            destination.mark_complete(file)
        if kind == "dataset" and folder is None:
            atomic_write_json(result.folder / DOWNLOAD_RECORD, {"files": [*result.downloaded, *result.already_present]})
        if folder is None and revision != commit:
            reference = root / "refs" / revision
            reference.parent.mkdir(parents=True, exist_ok=True)
            atomic_write_text(reference, commit)
    return result


def read_download_record(folder: Path) -> list[HubFile] | None:
    """The files of a folder's DOWNLOAD_RECORD; None where it has none that can be read."""
    with suppress(OSError, UserError, KeyError):
        return read_json(folder / DOWNLOAD_RECORD, dict[str, list[HubFile]], max_bytes=MAX_INDEX_BYTES)["files"]
    return None


def download_command(name: str, revision: str, kind: Kind = "model") -> str:
    """The command to run where there is a network."""
    at = "" if revision == "main" else f"@{revision}"
    return f"lmforge download {name}{at}{' --dataset' if kind == 'dataset' else ''}"


def offline_message(name: str, revision: str, kind: Kind) -> str:
    """The reason why the hub is not contacted, and what to do."""
    return (
        f"{name}: no such folder, and {revision} of it is not in the cache {cache_folder()}; HF_HUB_OFFLINE is set, so the hub"
        f" is not asked; run `{download_command(name, revision, kind)}` where there is a network, or unset it"
    )


def _data_files(name: str, listed: dict[str, HubFile]) -> list[HubFile]:
    """The files of a dataset that are read; no code."""
    chosen = [listed[each] for each in sorted(listed) if DATA_FILES.fullmatch(each)]
    if all(file.name == "README.md" for file in chosen):
        kinds = "JSON lines, CSV, Parquet, Arrow, text, archives of them"
        raise UserError(f"{name}: has no data on the hub that is read ({kinds})")
    return chosen


def _files_to_download(name: str, listed: dict[str, HubFile], folder: Path, include_weights: bool) -> Iterator[HubFile]:
    """Configuration and tokenizer, then the weights. Their index, which is among the former, is read from `folder`."""
    yield from (listed[each] for each in sorted(listed) if CONFIG_AND_TOKENIZER_FILES.fullmatch(each))
    if not include_weights:
        return
    if "config.json" not in listed:
        raise UserError(f"{name}: has no config.json on the hub, so it is not a model that can be opened")
    names = [SAFE_WEIGHTS_NAME]
    if SAFE_WEIGHTS_NAME not in listed:
        if SAFE_WEIGHTS_INDEX_NAME not in listed:
            raise UserError(f"{name}: has no safetensors weights on the hub; pickled ones (.bin, .pth) are not downloaded")
        names = indexed_weight_files(folder)
    if absent := sorted(set(names) - listed.keys()):
        raise UserError(f"{name}: its index names {absent[0]}, which is not on the hub")
    yield from (listed[each] for each in names)


class _Destination:
    """Where a model is downloaded to: a plain folder, or a snapshot in the library's cache, which links to blobs.

    Blobs are named after the digest that was verified. A plain folder has a record of the files that were verified, so that
    they need not be read again.
    """

    def __init__(self, folder: Path, blobs: Path | None) -> None:
        self.folder, self._blobs = folder, blobs
        self._verified = {file.name: file for file in read_download_record(folder) or ()}
        if not blobs and not self._verified and any(folder.glob("*.safetensors")):
            raise UserError(f"{folder}: holds a model that was not downloaded by lmforge; choose another folder")

    def path_of(self, file: HubFile) -> Path:
        return self._blobs / file.digest if self._blobs else self.folder / file.name

    def has(self, file: HubFile) -> bool:
        path = self.path_of(file)
        verified = self._blobs or self._verified.get(file.name) == file
        if path.is_file() and (path.stat().st_size == file.size if verified else file.matches(path)):
            return True
        if not self._blobs and file.name not in self._verified:
            check_output(path, other="folder")
        return False

    def mark_complete(self, file: HubFile) -> None:
        """Record at once that this file was verified, so that it need not be checked again after an interruption."""
        link = self.folder / file.name
        if not self._blobs and self._verified.get(file.name) != file:
            self._verified[file.name] = file
            atomic_write_json(self.folder / DOWNLOAD_RECORD, {"files": sorted(self._verified.values())})
        elif self._blobs and not link.exists():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(self.path_of(file), link.parent))


def _list_files(name: str, revision: str, kind: Kind) -> tuple[str, dict[str, HubFile]]:
    """The commit of a revision, and its files by name. Raises UserError where one of them would be written elsewhere."""
    from huggingface_hub import HfApi

    api = HfApi(library_name="lmforge")
    ask = api.model_info if kind == "model" else api.dataset_info
    with hub_errors_as_user_errors(name, revision, kind=kind):
        info = ask(name, revision=revision, files_metadata=True, timeout=LOOKUP_SECONDS)
    commit, files = str(info.sha), {}
    if not COMMIT_PATTERN.fullmatch(commit):
        raise UserError(f"{name}: the hub answered with the commit {quoted(commit)}, which is none; check HF_ENDPOINT")
    for each in info.siblings or ():
        # Git has no such names but the last, which would pass files off as verified: this hub is damaged or means harm.
        if not is_inner_path(each.rfilename) or Path(each.rfilename).name.startswith(OWN_FILES_PREFIX):
            listed = f"lists a file {quoted(each.rfilename)}"
            raise UserError(f"{name}: the hub {listed}, which is not written; nothing is downloaded")
        digest = each.lfs.sha256 if each.lfs is not None else each.blob_id
        if each.size is not None and digest and DIGEST_PATTERN.fullmatch(digest):
            files[each.rfilename] = HubFile(each.rfilename, each.size, digest)
    return commit, files


def _download_file(name: str, commit: str, file: HubFile, path: Path, report: Report, kind: Kind) -> None:
    """Download one file to `path`, resuming what an earlier attempt left. Raises UserError; OSError on a full disk."""
    unfinished = path.with_name(f".{file.digest}{PARTIAL_SUFFIX}")
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        resumed = unfinished.exists() and unfinished.stat().st_size > 0
        with unfinished.open("ab") as growing:
            with hub_errors_as_user_errors(name, commit, file.name, kind):
                _append_rest(name, commit, file, growing, report, kind)
            growing.flush()
            os.fsync(growing.fileno())
        if file.matches(unfinished):
            os.replace(unfinished, path)
            return
        unfinished.unlink()
        if not resumed:  # otherwise the rest of an earlier attempt may be damaged: try again from the start
            wrong = "did not arrive as the hub describes it (its checksum differs) and was deleted"
            raise UserError(f"{name}: {file.name} {wrong}; try again")


def _append_rest(name: str, commit: str, file: HubFile, growing: BinaryIO, report: Report, kind: Kind) -> None:
    """Append what is missing. MAX_ATTEMPTS in a row without progress raise what the hub's library or its HTTP client raised."""
    from huggingface_hub import get_session, hf_hub_url, hf_raise_for_status
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(name, file.name, revision=commit, repo_type=kind)
    headers = build_hf_headers(library_name="lmforge") | {"Accept-Encoding": "identity"}  # compressed, it could not be resumed
    attempts, reported = 0, time.monotonic()
    while (start := growing.tell()) < file.size:
        span = {"Range": f"bytes={start}-"} if start else {}
        try:
            with get_session().stream("GET", url, headers=headers | span, timeout=TIMEOUT_SECONDS) as response:
                hf_raise_for_status(response)
                if start and response.status_code == 200:  # the server sends the whole file
                    growing.truncate(0)
                for block in response.iter_raw(BLOCK_BYTES):
                    growing.write(block)
                    if time.monotonic() - reported > REPORT_EVERY_SECONDS:
                        reported = time.monotonic()
                        report(f"{file.name}: {growing.tell():,} of {file.size:,} bytes")
            return
        except Exception as problem:
            attempts = 0 if growing.tell() > start else attempts + 1
            if attempts == MAX_ATTEMPTS or not _is_temporary(problem):
                raise
            time.sleep(RETRY_SECONDS)


def _is_temporary(problem: Exception) -> bool:
    """Whether another attempt may succeed: the connection broke, or the server is overloaded."""
    status = getattr(getattr(problem, "response", None), "status_code", None)
    # HTTP clients do not raise OSErrors, so an OSError is from the disk.
    return not isinstance(problem, OSError) if status is None else status == 429 or status >= 500


@contextmanager
def hub_errors_as_user_errors(name: str, revision: str, file: str = "", kind: Kind = "model") -> Iterator[None]:
    """Exceptions of the hub's library as UserErrors of one line. OSError passes on a full disk."""
    from huggingface_hub import constants, errors

    hub, for_file = constants.ENDPOINT, f" for {file}" if file else ""
    try:
        yield
    except Exception as problem:  # the library raises those of whichever HTTP client it is built on
        if isinstance(problem, OSError) and problem.errno in DISK_FULL_ERRNOS:
            raise
        status = getattr(getattr(problem, "response", None), "status_code", "an error")
        text = " ".join(f"{type(problem).__name__}: {problem}".split())[:160]
        reasons: dict[type[Exception], str] = {
            errors.HFValidationError: f"not a name that the hub accepts ({text})",
            errors.GatedRepoError: f"gated: accept its terms at {hub}/{name}, then log in (hf auth login, or HF_TOKEN in the"
            " environment)",
            errors.RevisionNotFoundError: f"has no revision {revision} on the hub; leave it out for its newest",
            errors.RepositoryNotFoundError: f"neither a folder here nor a {kind} on {hub} that can be seen without permission;"
            " check the name, or log in (hf auth login, or HF_TOKEN in the environment)",
            errors.HfHubHTTPError: f"{hub} answered with {status}{for_file}; try again later",
            OSError: f"{text}{for_file}; run it again to resume",
            Exception: f"no such folder, not in the cache, and {hub} cannot be reached{for_file} ({text}); check the network"
            f" and run it again to resume, or run `{download_command(name, revision, kind)}` where there is one",
        }
        raise UserError(f"{name}: {next(why for kind, why in reasons.items() if isinstance(problem, kind))}") from None


@contextmanager
def _download_into(folder: Path, report: Report) -> Iterator[None]:
    """One process at a time downloads into a folder, however long the others wait. Errors of the disk are UserErrors."""

    @cache
    def report_wait() -> bool:
        report(f"{folder}: another process is downloading into it; waiting")
        return False

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with hold_lock(folder / f"{OWN_FILES_PREFIX}lock", report_wait):
            yield
    except OSError as problem:
        what = "no space to download into it" if problem.errno in DISK_FULL_ERRNOS else "cannot be written"
        raise UserError(f"{folder}: {what} ({problem.strerror}); run it again to resume") from None
