"""A user's function document → document or None, which is called first for each document.

It is in a file of the user's.
A document is a dict: of a record all its fields, of a text file its text and its `path`. The text
is in the field that `--text_field` names. The function returns the document, changed or not, or
None to leave it out. It may be called more than once for a document, in any order and in any
process, so it must return the same each time.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import xxhash

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import expand_home, read_bounded
from lmforge.core.foreign_code import import_file
from lmforge.text.sources.units import Document

MODULE_NAME = "prepare_hook"


@dataclass(frozen=True)
class DocumentHook:
    """A function by file and name. `digest` is the hash of the file, not of what it imports."""

    path: str
    function: str
    text_field: str
    digest: str

    @classmethod
    def open(cls, spec: str, text_field: str) -> Self:
        """The hook that `FILE.py:FUNCTION` names. Raises UserError if there is no such function."""
        file, _, function = spec.rpartition(":")
        path = expand_home(file).absolute()
        if not path.is_file():
            raise UserError(f"hook {spec}: no such file; name a function as FILE.py:FUNCTION")
        hook = cls(str(path), function, text_field, xxhash.xxh3_128_hexdigest(read_bounded(path)))
        _load_function(hook.path, hook.function, hook.digest)
        return hook

    def __call__(self, document: Document) -> str | None:
        """The text of the document that the function returns; None if it drops the document.

        Raises UserError.
        """
        function = _load_function(self.path, self.function, self.digest)
        where = f"{document.location()}: hook {Path(self.path).name}:{self.function}"
        try:
            result = function({**document.fields, self.text_field: document.text})
        except (Exception, SystemExit) as error:
            words = " ".join(str(error).split())
            raise UserError(f"{where} raised {type(error).__name__}: {words}") from error
        if result is None:
            return None
        if not isinstance(result, dict) or not isinstance(result.get(self.text_field), str):
            what = "a dict without text" if isinstance(result, dict) else type(result).__name__
            raise UserError(
                f"{where} returned {what}: expected the document, with text in {self.text_field!r},"
                " or None"
            )
        text: str = result[self.text_field]
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(
                f"{where} returned half of a surrogate pair, which UTF-8 cannot encode"
            ) from None
        return text


@lru_cache(maxsize=1)
def _load_function(path: str, name: str, digest: str) -> Callable[[dict[str, Any]], Any]:
    """Import the file, once in a process.

    Raises UserError if that fails, or if the file does not match the digest.
    """
    if xxhash.xxh3_128_hexdigest(read_bounded(Path(path))) != digest:
        raise UserError(f"hook {path}: changed during the preparation; start it again")
    module = import_file(Path(path), MODULE_NAME, "hook")
    function = getattr(module, name, None)
    if not callable(function):
        own = [
            each.__name__
            for each in vars(module).values()
            if inspect.isfunction(each) and each.__module__ == MODULE_NAME
        ]
        raise UserError(
            f"hook {path}: no function {name!r}: there are {', '.join(sorted(own)) or 'none'}"
        )
    return function
