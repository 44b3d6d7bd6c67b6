"""Hugging Face datasets as sources of text: by name, streamed from the hub, or a local folder.

They need the extra `hf`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lmforge.core.errors import UserError, how_to_install
from lmforge.core.files.untrusted import expand_home, list_names
from lmforge.core.records.kinds import is_hub_name
from lmforge.hf.hub import (
    COMPLETE_MARK,
    LOOKUP_SECONDS,
    cache_folder,
    hub_errors_as_user_errors,
    offline_message,
    parse_model_name,
)
from lmforge.text.sources.folders import list_files
from lmforge.text.sources.records import ReadProgress
from lmforge.text.sources.text_sources import FileSource, SourceFile, stat_files
from lmforge.text.sources.units import TEXT_FIELD_HINT, Document, SourceUnit, record_documents

# Files that `Dataset.save_to_disk` and `DatasetDict.save_to_disk` write.
SAVED_DATASET = "state.json"
SAVED_DATASETS = "dataset_dict.json"
DEFAULT_SPLIT = "train"
UNIT_BYTES = 16 << 20


@dataclass(frozen=True)
class DatasetLocation:
    """The arguments that open one split of a dataset again in another process.

    `revision` is a commit of the hub, else None.
    """

    spec: str
    subset: str | None
    split: str
    revision: str | None

    @lru_cache(maxsize=1)  # noqa: B019 (a process reads many units of one dataset)
    def open(self) -> Any:
        """The `Dataset` or `IterableDataset`. Raises UserError naming what is wrong."""
        with _library_errors(self.spec):
            return self._load()

    def _load(self) -> Any:
        import datasets

        path = expand_home(self.spec)
        if _is_saved(path):
            loaded = datasets.load_from_disk(str(path))
            if isinstance(loaded, datasets.DatasetDict):
                if self.split not in loaded:
                    raise UserError(
                        f"{self.spec}: no split {self.split!r}: there are {list_names(loaded)}"
                    )
                loaded = loaded[self.split]
            return loaded
        if path.is_dir():
            return datasets.load_dataset(str(path), self.subset, split=self.split, streaming=True)
        assert self.revision is not None
        name, _ = parse_model_name(self.spec)
        load = partial(datasets.load_dataset, name=self.subset, split=self.split, streaming=True)
        downloaded = find_cached_dataset(name, self.revision)
        if downloaded:  # no network is needed
            return load(str(downloaded))
        return load(name, revision=self.revision)


@contextmanager
def _library_errors(spec: str) -> Iterator[None]:
    """A context in which exceptions of `datasets` and the hub become a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        words = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{spec}: cannot be read as a Hugging Face dataset: {words}") from error


@dataclass(frozen=True)
class DatasetUnit(SourceUnit):
    """One of `num_shards` contiguous parts of a dataset."""

    location: DatasetLocation
    shard: int
    num_shards: int
    size: int
    text_field: str

    @property
    def file(self) -> str:
        return f"{self.shard}"

    def documents(self, progress: ReadProgress, all_fields: bool) -> Iterator[Document]:
        dataset = self.location.open()
        with _library_errors(self.location.spec):
            part = dataset.shard(self.num_shards, self.shard, contiguous=True)
            if not all_fields and part.column_names is not None:
                part = part.select_columns([self.text_field])
            describe = partial("{}, row {} of part {}".format, self.location.spec)
            for number, row in enumerate(part, start=1):
                place = partial(describe, number, self.shard + 1)
                yield from record_documents(row, self.text_field, place, progress)


@dataclass(frozen=True)
class DatasetSource(FileSource):
    """One split of a dataset.

    `files` are those of a local folder; of one on the hub the revision says what is in it.
    """

    location: DatasetLocation
    text_field: str

    def _identity(self, files: list[tuple[str, int, int]]) -> list[Any]:
        where = self.location
        return [
            self.text_field,
            where.spec if not files else "",
            where.subset,
            where.split,
            where.revision,
            files,
        ]

    def units(self) -> list[SourceUnit]:
        """All units of work, in a fixed order.

        Raises UserError for a dataset without the column.
        """
        dataset = self.location.open()
        with _library_errors(self.spec):
            names = dataset.column_names or sorted(next(iter(dataset), {}))
            if self.text_field not in names:
                raise UserError(
                    f"{self.spec}: no column {self.text_field!r}: there are {list_names(names)}"
                    f"{TEXT_FIELD_HINT}"
                )
            # A streamed dataset is divided by its files.
            shards = getattr(dataset, "num_shards", None)
            if not shards:
                shards = max(1, min(len(dataset), -(-self.size // UNIT_BYTES)))
        size = self.size // shards
        return [
            DatasetUnit(self.location, shard, shards, size, self.text_field)
            for shard in range(shards)
        ]


def is_dataset(spec: str, split: str | None, subset: str | None) -> bool:
    """Return True where `spec` is a Hugging Face dataset.

    It is a name on the hub, a folder that `save_to_disk` wrote, or one with a split named.
    """
    path = expand_home(spec)
    if not path.is_dir():
        return is_hub_name(spec)
    return bool(split or subset) or _is_saved(path)


def _is_saved(path: Path) -> bool:
    return (path / SAVED_DATASETS).is_file() or (path / SAVED_DATASET).is_file()


def open_dataset_source(
    spec: str, text_field: str, split: str | None, subset: str | None
) -> DatasetSource:
    """One split of a dataset that `is_dataset`, by default "train".

    Raises UserError if it cannot be found or the extra `hf` is missing.
    """
    if find_spec("datasets") is None:
        raise UserError(
            f"{spec}: a Hugging Face dataset needs the package datasets: {how_to_install('hf')}"
        )
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    path = expand_home(spec)
    revision = None
    files: tuple[SourceFile, ...] = ()
    if path.is_dir():
        files = stat_files(list_files(path), path)
    else:
        with _library_errors(spec):
            name, requested = parse_model_name(spec)
            downloaded = find_cached_dataset(name, requested)
            revision = downloaded.name if downloaded else _find_commit(name, requested)
    return DatasetSource(
        spec, files, DatasetLocation(spec, subset, split or DEFAULT_SPLIT, revision), text_field
    )


def _find_commit(name: str, revision: str) -> str:
    """The commit of a dataset on the hub.

    Raises UserError where the hub cannot be reached; its other errors are not caught.
    """
    from huggingface_hub import HfApi, constants

    is_offline = os.environ.get("HF_DATASETS_OFFLINE", "").upper() in constants.ENV_VARS_TRUE_VALUES
    if constants.HF_HUB_OFFLINE or is_offline:
        raise UserError(offline_message(name, revision, "dataset"))
    try:
        return str(HfApi().dataset_info(name, revision=revision, timeout=LOOKUP_SECONDS).sha)
    except Exception as problem:
        if getattr(problem, "response", None) is not None:
            raise
        with hub_errors_as_user_errors(name, revision, kind="dataset"):
            raise


def find_cached_dataset(name: str, revision: str) -> Path | None:
    """The cache folder that has the complete dataset at a commit, by which it is named, or None.

    Does not contact the hub.
    """
    root = cache_folder() / f"datasets--{name.replace('/', '--')}"
    reference = root / "refs" / revision
    with suppress(OSError):
        if reference.is_file():
            revision = reference.read_text(encoding="utf-8").strip()
        folder = root / "snapshots" / revision
        if (folder / COMPLETE_MARK).is_file():
            return folder
    return None
