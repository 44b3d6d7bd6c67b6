"""The choice of a folder's files that are read.

They are those of one split, as the names tell it to `datasets`, without those that are no data.
"""

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lmforge.core.errors import UserError, format_count
from lmforge.core.files.untrusted import cut, list_names

FileSplit = Literal["train", "validation"]
# The names by which `datasets` tells splits (its data_files.py), between these characters.
SPLIT_KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
BETWEEN_WORDS = "-._ 0-9"
SHARD_NAME = re.compile(r"(.+)-\d{5}-of-\d{5}.*\..*")
# Files that `datasets` writes or finds beside data.
DESCRIPTIONS = frozenset(
    {
        "README.md",
        "config.json",
        "dataset_info.json",
        "dataset_infos.json",
        "dataset_dict.json",
        "state.json",
    }
)
COMPRESSION_SUFFIXES = {".gz": "gzip", ".zst": "zstd"}
SHOWN = 5
MAX_CARD_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class FolderFiles:
    """The files of a folder that are read, sorted by their paths in it.

    left_out: the numbers of others, by what they are.
    """

    paths: tuple[Path, ...]
    left_out: tuple[tuple[str, int], ...]

    def describe(self, root: Path) -> str:
        """A note about files that are left out, and those in subfolders; empty if there are none."""
        inner = sorted({str(path.parent.relative_to(root)) for path in self.paths} - {"."})
        notes = []
        if inner:
            notes.append(f"reads {list_names(inner)} within it")
        if self.left_out:
            notes.append(f"leaves out {describe_left_out(self.left_out)}")
        return ", ".join(notes)


def describe_left_out(left_out: Collection[tuple[str, int]]) -> str:
    """Words such as `3 files (.pdf 2, split test 1)`."""
    named = ", ".join(f"{cut(kind)} {count:,}" for kind, count in [*left_out][:SHOWN])
    more = ", …" if len(left_out) > SHOWN else ""
    return f"{format_count(sum(count for _, count in left_out), 'file')} ({named}{more})"


def content_suffix(name: str) -> str:
    """The suffix of a file's name without that of the compression, in lower case."""
    path = Path(name)
    if path.suffix in COMPRESSION_SUFFIXES:
        path = Path(path.stem)
    return path.suffix.lower()


def list_files(root: Path, excluded: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Every file below a folder, without hidden ones."""

    def stop(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from None

    for folder, folders, names in os.walk(root, onerror=stop):
        folders[:] = [name for name in folders if name not in excluded and not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def find_splits(paths: Collection[Path], root: Path) -> dict[str, list[Path]]:
    """The files of each split that names of files or folders below `root` tell; empty if none does.

    They are told as `datasets` does it: by shards in a folder `data`, such as
    data/train_sft-00000-of-00003.parquet; else by the names of folders, else by those of files. A
    file that names several splits is in all of them.
    """
    splits: dict[str, list[Path]] = {}
    for path in paths:
        shard = SHARD_NAME.fullmatch(path.name)
        if shard and path.parent == root / "data":
            splits.setdefault(shard[1], []).append(path)
    for of_folders in (True, False):
        if splits:
            break
        for split, words in SPLIT_KEYWORDS.items():
            end = f"(?:$|[{BETWEEN_WORDS}])" if of_folders else f"[{BETWEEN_WORDS}]"
            named = re.compile(f"(?:^|[{BETWEEN_WORDS}])(?:{'|'.join(words)}){end}")
            for path in paths:
                parts = path.relative_to(root).parts
                if any(map(named.search, parts[:-1] if of_folders else parts[-1:])):
                    splits.setdefault(split, []).append(path)
    return splits


def choose_split(
    paths: Collection[Path], root: Path, split: FileSplit
) -> tuple[list[Path], Counter[str]]:
    """The files of a split, and the numbers of those that are left out, by their splits.

    Where no name tells a split these are all files. For validation the split test is taken where
    there is no other. Raises UserError where there is no file of the split.
    """
    splits = find_splits(paths, root)
    if not splits:
        return [*paths], Counter()
    found = splits.get(split)
    if found is None and split == "validation":
        found = splits.get("test")
    if found is None:
        raise UserError(
            f"{root}: no file of the split {split!r} by its name: there are {list_names(splits)};"
            " name the files that you mean"
        )
    others = {path: f"split {name}" for name, members in splits.items() for path in members}
    left_out = sorted({*paths}.difference(found))
    return found, Counter(others.get(path, "no split") for path in left_out)


def unread_configs(root: Path) -> dict[str, int]:
    """An entry for the counts of files left out, where a dataset card names the files of splits.

    `datasets` reads these names.
    """
    with suppress(OSError), open(root / "README.md", encoding="utf-8", errors="replace") as card:
        if card.readline().strip() == "---":
            header, _, _ = card.read(MAX_CARD_CHARACTERS).partition("\n---")
            if "data_files:" in header:
                return {"configs of README.md": 1}
    return {}


def find_files(root: Path, suffixes: Collection[str], split: FileSplit) -> FolderFiles:
    """The files of one split with one of these suffixes, compressed or not, in a folder tree."""
    every = [
        path
        for path in list_files(root)
        if path.name not in DESCRIPTIONS and path.suffix != ".lock"
    ]
    known = [path for path in every if content_suffix(path.name) in suffixes]
    chosen, left_out = choose_split(known, root, split)
    left_out.update(
        content_suffix(path.name) or "without a suffix"
        for path in sorted({*every}.difference(known))
    )
    left_out.update(unread_configs(root))
    return FolderFiles(tuple(sorted(chosen)), tuple(left_out.most_common()))
