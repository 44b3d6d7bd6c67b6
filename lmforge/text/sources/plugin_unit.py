"""Documents of a file that a plugin reads.

`register("document_source", "mbox", …)` reads files with the suffix .mbox. The implementation is
called as `(file, options)`, with an open binary file (decompressed where its name ends in .gz or
.zst) and the options of its own. It gives the documents in a fixed order, each as its text, or as a
record with the text in `--text_field`. One that is registered with `gives="tokens"` is called as
`(path, options)`, and gives arrays of ids, which `token_files.py` reads.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from lmforge.core import registry
from lmforge.core.errors import UserError
from lmforge.core.foreign_code import describe_exception
from lmforge.core.options.options import Options
from lmforge.core.plugins import describe_plugins, load_plugins
from lmforge.core.registry import BUILT_IN, Entry
from lmforge.text.sources.records import ReadProgress, open_decompressed
from lmforge.text.sources.units import Document, FileUnit, record_documents


def gives_tokens(entry: Entry) -> bool:
    """Return True for a document source that gives ids instead of texts."""
    return bool(entry.facts.get("gives") == "tokens")


@dataclass(frozen=True)
class PluginReaders:
    """The plugins that are loaded wherever documents are read.

    options: those of what they register, as JSON by name.
    """

    plugins: tuple[str, ...] = ()
    options: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of_options(cls, options: Options) -> Self:
        """The plugins in the options of `lmforge prepare`, which are extended by those of plugins."""
        own = {
            entry.name: getattr(options, entry.option_name)
            for entry in registry.entries("document_source")
            if entry.options is not None
        }
        texts = tuple((name, each.model_dump_json()) for name, each in own.items())
        return cls(options.plugins, texts)  # type: ignore[attr-defined]

    def reads(self, suffix: str) -> bool:
        """Return True if a plugin reads files with this suffix, with its dot, as text."""
        entry = registry.find("document_source", suffix.removeprefix("."))
        return entry is not None and entry.origin != BUILT_IN and not gives_tokens(entry)

    def reads_tokens(self, suffix: str) -> bool:
        """Return True if a plugin reads files with this suffix, with its dot, as tokens."""
        entry = registry.find("document_source", suffix.removeprefix("."))
        return entry is not None and gives_tokens(entry)

    def identity(self) -> list[Any]:
        """Everything that the documents depend on besides the files."""
        return [describe_plugins(self.plugins), self.options]

    def documents(self, name: str, file: Any) -> Iterator[Any]:
        """The documents that the plugin yields for an open file, or for a path of tokens.

        Raises UserError where it fails.
        """
        load_plugins(self.plugins)  # a worker process has not loaded it yet
        entry = registry.get("document_source", name)
        options = None
        if entry.options is not None:
            options = entry.options(**json.loads(dict(self.options).get(name, "{}")))
        yield from entry.build(file, options)


NO_READERS = PluginReaders()


@dataclass(frozen=True)
class PluginUnit(FileUnit):
    """One file of a kind that a plugin reads."""

    kind: str
    readers: PluginReaders

    def documents(self, progress: ReadProgress, all_fields: bool) -> Iterator[Document]:
        number = 0
        with open_decompressed(self.path) as file:
            try:
                for given in self.readers.documents(self.kind, file):
                    number += 1
                    record = {self.text_field: given} if isinstance(given, str) else given
                    where = f"{self.path}, document {number}"
                    if not isinstance(record, dict):
                        record = UserError(
                            f"{where}: the plugin gave {type(given).__name__}, not text or a record"
                        )
                    progress.bytes = file.disk_position
                    yield from record_documents(
                        record, self.text_field, partial(str, where), progress
                    )
            except UserError:
                raise
            except Exception as error:
                place = f"{self.path}, after {number} documents"
                raise UserError(
                    f"{place}: document source {self.kind} raised {describe_exception(error)}"
                ) from error
        progress.bytes = self.size
