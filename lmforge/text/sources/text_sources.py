"""Sources of text: each as a list of units of work that any process can read.

A source has names, sizes and times of files; its units read the text (`units.py`). It does not
tokenize, shuffle or write.
"""

import sysconfig
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lmforge.core import registry
from lmforge.core.errors import UserError, how_to_install
from lmforge.core.files.checksums import hash_json
from lmforge.core.files.untrusted import cut, expand_home, list_names
from lmforge.text.sources.folders import (
    COMPRESSION_SUFFIXES,
    DESCRIPTIONS,
    FileSplit,
    choose_split,
    content_suffix,
    find_splits,
    list_files,
    unread_configs,
)
from lmforge.text.sources.plugin_unit import NO_READERS, PluginReaders, PluginUnit, gives_tokens
from lmforge.text.sources.records import JSON_SUFFIXES, open_decompressed, open_parquet
from lmforge.text.sources.units import (
    HTML_SUFFIXES,
    TABLE_DELIMITERS,
    TEXT_FIELD_HINT,
    JsonlUnit,
    ParquetUnit,
    PythonUnit,
    SourceUnit,
    TableUnit,
    TextUnit,
)

CONVERSIONS = {
    "convert its rows to .jsonl or .parquet, with the text in one field": (
        ".xls",
        ".xlsx",
        ".ods",
        ".arrow",
        ".feather",
        ".avro",
        ".orc",
        ".sqlite",
        ".db",
    ),
    "extract its text to a .txt": (
        ".pdf",
        ".doc",
        ".docx",
        ".odt",
        ".rtf",
        ".epub",
        ".mobi",
        ".ppt",
        ".pptx",
    ),
    "unpack it: of packed files .gz and .zst are read": (
        ".tar",
        ".zip",
        ".tgz",
        ".bz2",
        ".xz",
        ".7z",
        ".rar",
        ".lz4",
    ),
}
OTHER_CONVERSION = (
    "if it is plain text, name its suffix in --text_suffixes; if not, extract its text"
)
ROW_SUFFIXES = JSON_SUFFIXES | TABLE_DELIMITERS.keys() | {".parquet"}
TEXT_UNIT_BYTES = 2 << 20
JSONL_UNIT_BYTES = 16 << 20
# A corpus gets about this many units where they can be smaller, since at the end all processes wait
# for the last unit.
MANY_UNITS = 1024
SNIFFED_BYTES = 1 << 16

# Parts of the standard library that do not read as code: encodings and the files below are
# generated tables, pydoc_data is a manual, and tests are mostly literals. Installed packages are
# not part of the library.
STDLIB_EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)
STDLIB_EXCLUDED_FILES = frozenset(
    {"html/entities.py", "msilib/schema.py", "msilib/sequence.py", "stringprep.py"}
)


@dataclass(frozen=True)
class SourceFile:
    path: str
    name: str  # relative to the source, so that a moved corpus is the same corpus
    size: int
    modified_ns: int


@dataclass(frozen=True)
class FileSource(ABC):
    """The files of a corpus, sorted by name.

    `left_out` counts those of a folder that are not read, by split or suffix.
    """

    spec: str
    files: tuple[SourceFile, ...]
    left_out: tuple[tuple[str, int], ...] = field(default=(), kw_only=True)

    @property
    def size(self) -> int:
        """Bytes on the disk, 0 where no files are known."""
        return sum(file.size for file in self.files)

    def fingerprint(self) -> str:
        """A hash that changes with the files, or when they are read in another way.

        It changes when a file is added, removed, resized or touched.
        """
        files = [(file.name, file.size, file.modified_ns) for file in self.files]
        return hash_json(self._identity(files))

    @abstractmethod
    def _identity(self, files: list[tuple[str, int, int]]) -> list[Any]:
        """Everything that the documents depend on, as JSON.

        `files` tell the version of each file.
        """


@dataclass(frozen=True)
class TextSource(FileSource):
    """A corpus of text."""

    text_field: str
    readers: PluginReaders = NO_READERS

    def _identity(self, files: list[tuple[str, int, int]]) -> list[Any]:
        identity: list[Any] = [self.text_field, files]
        if any(self.readers.reads(content_suffix(file.name)) for file in self.files):
            identity.append(self.readers.identity())
        if any(self._is_page(file) for file in self.files):
            identity.append(f"trafilatura {version('trafilatura')}")
        return identity

    def _is_page(self, file: SourceFile) -> bool:
        """Return True for a page of HTML, whose text is extracted."""
        suffix = content_suffix(file.name)
        return suffix in HTML_SUFFIXES and not self.readers.reads(suffix)

    def check_packages(self) -> None:
        """Raise UserError where a package is missing that its files need."""
        page = next((file for file in self.files if self._is_page(file)), None)
        if page is not None and find_spec("trafilatura") is None:
            raise UserError(
                f"{page.path}: a page of HTML needs the package trafilatura;"
                f" {how_to_install('html')}"
            )

    def units(self) -> list[SourceUnit]:
        """All units of work, in a fixed order."""
        units: list[SourceUnit] = []
        texts: list[SourceFile] = []
        size = 0
        unit_bytes = min(JSONL_UNIT_BYTES, max(TEXT_UNIT_BYTES, self.size // MANY_UNITS))
        for file in self.files:
            suffix = content_suffix(file.name)
            if self.readers.reads(suffix):
                units.append(
                    PluginUnit(file.path, file.size, self.text_field, suffix[1:], self.readers)
                )
            elif suffix == ".parquet":
                units.extend(_parquet_units(file, self.text_field))
            elif suffix in TABLE_DELIMITERS:
                units.append(TableUnit(file.path, file.size, self.text_field))
            elif suffix not in JSON_SUFFIXES:
                if texts and size + file.size > TEXT_UNIT_BYTES:
                    units.append(self._text_unit(texts))
                    texts = []
                    size = 0
                texts.append(file)
                size += file.size
            elif Path(file.name).suffix in COMPRESSION_SUFFIXES:
                units.append(JsonlUnit(file.path, file.size, self.text_field, 0, None))
            else:
                for start in range(0, file.size, unit_bytes):
                    stop = min(start + unit_bytes, file.size)
                    units.append(JsonlUnit(file.path, stop - start, self.text_field, start, stop))
        if texts:
            units.append(self._text_unit(texts))
        return units

    def _text_unit(self, files: list[SourceFile]) -> SourceUnit:
        unit = PythonUnit if self.spec == "stdlib" else TextUnit
        return unit(tuple(file.path for file in files), sum(file.size for file in files))


def known_suffixes() -> frozenset[str]:
    """Suffixes of files whose documents can be read as text, those of plugins included."""
    return frozenset(
        f".{entry.name}" for entry in registry.entries("document_source") if not gives_tokens(entry)
    )


def open_text_source(
    spec: str,
    text_field: str = "text",
    text_suffixes: Collection[str] = (),
    readers: PluginReaders = NO_READERS,
    split: FileSplit = "train",
) -> TextSource:
    """The corpus that `spec` names: "stdlib", a file, or a folder searched to any depth.

    "stdlib" is the standard library of the running Python. A text file is one document, of HTML the
    page's text; a line of a .jsonl or a row of a .parquet, .csv or .tsv holds one in `text_field`.
    .gz and .zst are decompressed. Files with `text_suffixes` are text too; `readers` read those of
    plugins. Of a folder with files of several splits those of `split` are read. Raises UserError if
    there is nothing to read, or for a single file of another kind.
    """
    suffixes = {suffix.lower() for suffix in text_suffixes}
    left_out = Counter[str]()
    known = known_suffixes() | suffixes
    if spec == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        paths = []
        for path in list_files(root, STDLIB_EXCLUDED_FOLDERS):
            is_excluded = path.relative_to(root).as_posix() in STDLIB_EXCLUDED_FILES
            is_generated = path.name.startswith("_sysconfigdata")
            if path.suffix == ".py" and not is_excluded and not is_generated:
                paths.append(path)
    elif (root := expand_home(spec)).is_dir():
        every = list(list_files(root))
        # Among other files a .json is more often a settings file than a corpus.
        paths = [
            path for path in every if content_suffix(path.name) in known and path.suffix != ".json"
        ]
        left_out.update(
            content_suffix(path.name) or "without a suffix"
            for path in sorted(set(every).difference(paths))
        )
        if not paths:
            raise UserError(
                f"{spec}: holds no text: looked for files such as .txt, .md, .py, .jsonl,"
                " .jsonl.gz, .parquet"
            )
        paths, others = _documents_of_split(paths, root, split, {".txt", *suffixes})
        left_out.update(others + Counter(unread_configs(root)))
    elif root.is_file():
        if content_suffix(root.name) not in known:
            _check_is_text(root)
        paths = [root]
        root = root.parent
    else:
        raise UserError(f'{spec}: no such file or folder: give a path, or "stdlib"')
    files = stat_files(paths, root)
    if not any(file.size for file in files):
        raise UserError(f"{spec}: empty: there is no text in it")
    source = TextSource(spec, files, text_field, readers, left_out=tuple(left_out.most_common()))
    source.check_packages()
    return source


def _documents_of_split(
    paths: list[Path], root: Path, split: FileSplit, plain_suffixes: Collection[str]
) -> tuple[list[Path], Counter[str]]:
    """The files of a split, and the numbers of others.

    Code and pages are of no split, and plain texts only where the names of all tell one:
    "test-drive.txt" may be a document of many.
    """
    rows = [path for path in paths if content_suffix(path.name) in ROW_SUFFIXES]
    texts = [path for path in paths if content_suffix(path.name) in plain_suffixes]
    of_splits = {
        path for members in find_splits([*rows, *texts], root).values() for path in members
    }
    members = rows + texts if of_splits.issuperset(texts) else rows
    splits = find_splits(members, root)
    if not splits or (split not in splits and len(members) < len(paths)):
        return paths, Counter()
    chosen, left_out = choose_split(members, root, split)
    cards = {path for path in paths if path.name in DESCRIPTIONS}
    return [*chosen, *{*paths}.difference(members, cards)], left_out


def _check_is_text(path: Path) -> None:
    """Raise UserError, with what to do, for a file of an unknown kind.

    Without a suffix it is text, unless binary.
    """
    suffix = content_suffix(path.name)
    ways = (way for way, suffixes in CONVERSIONS.items() if suffix in suffixes)
    way = next(ways, OTHER_CONVERSION)
    if suffix:
        raise UserError(f"{path}: {suffix} files are not read; {way}")
    with open_decompressed(path) as file:
        if b"\0" in file.read(SNIFFED_BYTES):
            raise UserError(f"{path}: a binary file: {way}")


def stat_files(paths: Iterable[Path], root: Path) -> tuple[SourceFile, ...]:
    """The files of a corpus that is in the folder `root`, sorted by name."""
    stats = [(path, path.stat()) for path in paths]
    files = [
        SourceFile(
            str(path.absolute()), path.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns
        )
        for path, stat in stats
    ]
    return tuple(sorted(files, key=lambda file: file.name))


def _parquet_units(file: SourceFile, name: str) -> list[SourceUnit]:
    import pyarrow

    with open_parquet(file.path) as parquet:
        schema = parquet.schema_arrow
        metadata = parquet.metadata
    if name not in schema.names:
        raise UserError(
            f"{file.path}: no field {name!r}: there are {list_names(schema.names)}{TEXT_FIELD_HINT}"
        )
    dtype = schema.field(name).type
    if not (pyarrow.types.is_string(dtype) or pyarrow.types.is_large_string(dtype)):
        raise UserError(f"{file.path}: the field {name!r} is not text but {cut(str(dtype))}")
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    return [
        ParquetUnit(file.path, group.total_byte_size, name, number, group.num_rows)
        for number, group in enumerate(groups)
    ]
