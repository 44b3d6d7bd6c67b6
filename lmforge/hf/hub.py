"""Models and datasets by their names on the Hugging Face hub.

They are found in the local cache, or downloaded once and kept there. An existing folder takes
precedence over a name. Weights are downloaded as safetensors, the rest as JSON and the plain files
of tokenizers; pickles and code are not. The download itself, its retries and the cache are those of
huggingface_hub's `snapshot_download`, so transformers finds the models too. What is here chooses
the files, and says in one line what is wrong.
"""

import glob
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from typing_extensions import TypedDict

from lmforge.core.errors import DISK_FULL_ERRNOS, UserError
from lmforge.core.files.atomic_files import check_output
from lmforge.core.files.untrusted import cut, read_json
from lmforge.core.records.kinds import MODEL_NAME_PATTERN, is_hub_name

SAFE_WEIGHTS_NAME = "model.safetensors"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
CONFIG_AND_TOKENIZER_FILES = re.compile(
    r"[^/]+\.(json|jinja)|additional_chat_templates/[^/]+\.jinja|tokenizer\.model|merges\.txt|vocab\.txt"
)
# The files that `datasets` reads, and the dataset card, which says how the files are divided.
DATA_FILES = re.compile(
    r"(?:README\.md|.+\.(?:jsonl?|csv|tsv|txt|parquet|arrow)(?:\.(?:gz|zst|xz|bz2))?|.+\.(?:zip|tar|tar\.gz))"
)
# The library's own files in a folder that it has downloaded to.
LIBRARY_FOLDER = ".cache/huggingface"
# Written into a dataset's snapshot in the cache once all its files are there.
COMPLETE_MARK = ".lmforge-complete"
MAX_INDEX_BYTES = 2**28
# A compute node without a network may silently drop packets.
LOOKUP_SECONDS = 10.0

Report = Callable[[str], None]
Kind = Literal["model", "dataset"]


@dataclass(frozen=True)
class DownloadResult:
    """The folder of a model or dataset, its commit, and the sizes of its files by their names."""

    folder: Path
    commit: str
    sizes: dict[str, int]


class WeightIndex(TypedDict):  # model.safetensors.index.json
    weight_map: dict[str, str]


def parse_model_name(name: str) -> tuple[str, str]:
    """`org/name[@revision]` as (org/name, revision), "main" by default.

    Raises UserError for anything else.
    """
    parts = MODEL_NAME_PATTERN.fullmatch(name)
    if parts is None:
        form = "organisation/model or organisation/model@revision"
        raise UserError(f"{cut(name)}: not the name of a model on the hub; give {form}")
    return parts["name"], parts["revision"] or "main"


def resolve_model_folder(
    source: Path, required: Literal["weights", "config.json", "tokenizer.json"] = "weights"
) -> Path:
    """The folder of a model: `source` itself, or that of the model in the cache that it names.

    The model is downloaded first if need be. A cached model is taken as it is: the hub is not asked
    for a newer one. Weights are downloaded only if they are `required`. Raises UserError if the
    model can neither be found nor downloaded.
    """
    if not is_hub_name(source):
        return source
    name, revision = parse_model_name(str(source))
    cached = find_cached(name, revision, required)
    if cached:
        return cached
    report = partial(print, file=sys.stderr, flush=True)
    return download(name, revision, include_weights=required == "weights", report=report).folder


def cache_folder() -> Path:
    """The folder of the library's cache, which need not exist."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def find_cached(name: str, revision: str, required: str = "weights") -> Path | None:
    """The folder in which the cache has all that is `required` of this model, else None.

    Does not ask the hub.
    """
    from huggingface_hub import try_to_load_from_cache

    file = "config.json" if required == "weights" else required
    with hub_errors_as_user_errors(name, revision):
        path = try_to_load_from_cache(name, file, revision=revision)
    if not isinstance(path, str):
        return None
    folder = Path(path).parent
    if required != "weights" or (folder / SAFE_WEIGHTS_NAME).exists():
        return folder
    with suppress(OSError, UserError):
        if all((folder / file).exists() for file in indexed_weight_files(folder)):
            return folder
    return None


def read_weight_map(folder: Path) -> dict[str, str]:
    """The file of each tensor that a folder's index names.

    Raises UserError if it is not an index; OSError passes.
    """
    path = folder / SAFE_WEIGHTS_INDEX_NAME
    index = read_json(path, WeightIndex, max_bytes=MAX_INDEX_BYTES, hint="copy the file again")
    return index["weight_map"]


def indexed_weight_files(folder: Path) -> list[str]:
    """The weight files that a folder's index names, sorted.

    Raises UserError if it is not an index; OSError passes.
    """
    return sorted(set(read_weight_map(folder).values()))


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

    `report` is called with a line before the download. Raises UserError if it cannot be downloaded.
    """
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if constants.HF_HUB_OFFLINE:
        raise UserError(offline_message(name, revision, kind))
    if not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi(library_name="lmforge")
    ask = api.model_info if kind == "model" else api.dataset_info
    try:
        with hub_errors_as_user_errors(name, revision, kind):
            info = ask(name, revision=revision, files_metadata=True, timeout=LOOKUP_SECONDS)
            listed = {each.rfilename: each.size or 0 for each in info.siblings or ()}
            if kind == "dataset":
                chosen = _data_files(name, listed)
            else:
                chosen = _model_files(name, listed, include_weights)
            if folder is not None and not (folder / LIBRARY_FOLDER).is_dir():
                for file in chosen:
                    check_output(folder / file, other="folder")
            report(
                f"{name}: {len(chosen)} files, {sum(listed[file] for file in chosen):,} bytes,"
                " unless they are there"
            )

            def fetch(files: list[str]) -> Path:
                patterns = [glob.escape(file) for file in files]
                where = snapshot_download(
                    name,
                    repo_type=kind,
                    revision=revision,
                    local_dir=folder,
                    allow_patterns=patterns,
                    library_name="lmforge",
                )
                return Path(where)

            downloaded = fetch(chosen)
            if SAFE_WEIGHTS_INDEX_NAME in chosen and SAFE_WEIGHTS_NAME not in chosen:
                weights = indexed_weight_files(downloaded)
                for file in weights:
                    if file not in listed:
                        raise UserError(f"{name}: its index names {file}, which is not on the hub")
                chosen += weights
                fetch(weights)
            # Where the hub fails between two requests, the library takes what the cache has.
            for file in chosen:
                if not (downloaded / file).is_file():
                    raise UserError(f"{name}: {file} was not downloaded; run it again")
        if kind == "dataset" and folder is None:
            (downloaded / COMPLETE_MARK).touch()
    except OSError as problem:
        what = "cannot be written"
        if problem.errno in DISK_FULL_ERRNOS:
            what = "no space to download into it"
        raise UserError(
            f"{folder or cache_folder()}: {what} ({problem.strerror}); run it again"
        ) from None
    return DownloadResult(
        folder or downloaded, str(info.sha), {file: listed[file] for file in chosen}
    )


def download_command(name: str, revision: str, kind: Kind) -> str:
    """The command to run where there is a network."""
    at = "" if revision == "main" else f"@{revision}"
    option = " --dataset" if kind == "dataset" else ""
    return f"lmforge download {name}{at}{option}"


def offline_message(name: str, revision: str, kind: Kind) -> str:
    """The reason why the hub is not contacted, and what to do."""
    return (
        f"{name}: no such folder, and {revision} of it is not in the cache {cache_folder()};"
        " HF_HUB_OFFLINE is set, so the hub is not asked; run"
        f" `{download_command(name, revision, kind)}` where there is a network, or unset it"
    )


def _data_files(name: str, listed: Iterable[str]) -> list[str]:
    """The files of a dataset that are read; no code."""
    chosen = [each for each in sorted(listed) if DATA_FILES.fullmatch(each)]
    if all(file == "README.md" for file in chosen):
        kinds = "JSON lines, CSV, Parquet, Arrow, text, archives of them"
        raise UserError(f"{name}: has no data on the hub that is read ({kinds})")
    return chosen


def _model_files(name: str, listed: Collection[str], include_weights: bool) -> list[str]:
    """The files of a model: configuration, tokenizer, and the weights where they are one file.

    Otherwise their index is among the files, which names those of the weights.
    """
    chosen = [each for each in sorted(listed) if CONFIG_AND_TOKENIZER_FILES.fullmatch(each)]
    if not include_weights:
        return [each for each in chosen if each != SAFE_WEIGHTS_INDEX_NAME]
    if "config.json" not in listed:
        raise UserError(
            f"{name}: has no config.json on the hub, so it is not a model that can be opened"
        )
    if SAFE_WEIGHTS_NAME in listed:
        return [*chosen, SAFE_WEIGHTS_NAME]
    if SAFE_WEIGHTS_INDEX_NAME not in listed:
        raise UserError(
            f"{name}: has no safetensors weights on the hub; pickled ones (.bin, .pth) are not"
            " downloaded"
        )
    return chosen


@contextmanager
def hub_errors_as_user_errors(name: str, revision: str, kind: Kind = "model") -> Iterator[None]:
    """A context in which exceptions of the hub's library become UserErrors of one line.

    The OSErrors of the disk pass.
    """
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    try:
        yield
    except UserError:
        raise
    except Exception as caught:  # the library raises those of whichever HTTP client it is built on
        problem: BaseException = caught
        # Says only that the cache lacks it too.
        if isinstance(caught, errors.LocalEntryNotFoundError):
            problem = caught.__cause__ or caught
        if isinstance(problem, OSError) and problem.errno is not None:
            raise
        status = getattr(getattr(problem, "response", None), "status_code", "an error")
        text = " ".join(f"{type(problem).__name__}: {problem}".split())[:160]
        reasons: dict[type[Exception], str] = {
            errors.HFValidationError: f"not a name that the hub accepts ({text})",
            errors.GatedRepoError: (
                f"gated: accept its terms at {hub}/{name}, then log in (hf auth login, or HF_TOKEN"
                " in the environment)"
            ),
            errors.RevisionNotFoundError: (
                f"has no revision {revision} on the hub; leave it out for its newest"
            ),
            errors.RepositoryNotFoundError: (
                f"neither a folder here nor a {kind} on {hub} that can be seen without permission;"
                " check the name, or log in (hf auth login, or HF_TOKEN in the environment)"
            ),
            errors.HfHubHTTPError: f"{hub} answered with {status}; try again later",
            OSError: f"{text}; run it again",
            Exception: (
                f"no such folder, not in the cache, and {hub} cannot be reached ({text}); check the"
                f" network and run it again, or run `{download_command(name, revision, kind)}`"
                " where there is one"
            ),
        }
        raise UserError(
            f"{name}: {next(why for kind, why in reasons.items() if isinstance(problem, kind))}"
        ) from None
