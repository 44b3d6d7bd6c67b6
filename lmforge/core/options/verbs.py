"""The verbs of the command line: options and function of each.

A verb that is registered is in `lmforge --help` and in pipelines.

A verb is registered by name (builtin_names.py): its function, "module:name", which is called with
the options and returns the exit status; and as facts `config`, the class of its options, and what
else `Verb` says. So reading the names imports nothing that the verbs need.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields

from lmforge.core.errors import UserError
from lmforge.core.options.options import Options
from lmforge.core.registry import Entry, entries, find, import_named


@contextmanager
def imports_not_garbage() -> Iterator[None]:
    """A context for imports, in which the garbage collector is paused; it excludes afterwards what
    they have made.

    Importing torch creates hundreds of thousands of lasting objects, which it would scan repeatedly
    for half a second.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def _one_line(options: type[Options]) -> str:
    return " ".join((options.__doc__ or "").split())


@dataclass(frozen=True)
class Verb:
    """A verb: its options, and the function that carries it out.

    options: a class whose docstring begins with the verb's usage and summary, `lmforge VERB
    ARGUMENTS: SUMMARY.` entry: that of its function, which is called with the options and returns
    the exit status.
    distributed: the options name a number of processes; `lmforge` starts that many ranks, which
    call the function together.
    writes: its work is what it writes or serves, not what it prints: it goes on where nothing reads
    its output.
    pass_arguments: the function is called with the command line too, without the verb.
    parse: the function, "module:name", that makes the options of a command line, where its words
    are not all options of the verb.
    """

    options: type[Options]
    entry: Entry
    distributed: bool = False
    writes: bool = False
    pass_arguments: bool = False
    parse: str | None = None

    @property
    def usage(self) -> str:
        return _one_line(self.options).partition(": ")[0]

    @property
    def summary(self) -> str:
        return _one_line(self.options).partition(": ")[2].removesuffix(".")

    def load(self) -> Callable[..., int]:
        with imports_not_garbage():
            function: Callable[..., int] = self.entry.load()
        return function


class _Verbs(Mapping[str, Verb]):
    """The verbs by their names; the options of one are imported when it is asked for."""

    def __getitem__(self, name: str) -> Verb:
        entry = find("verb", name)
        if entry is None:
            raise KeyError(name)
        facts = dict(entry.facts)
        config = facts.pop("config")
        options = import_named(config) if isinstance(config, str) else config
        if unknown := facts.keys() - {field.name for field in fields(Verb)}:
            raise UserError(f"verb {name}: {min(unknown)}: a verb has no such fact")
        return Verb(options, entry, **facts)

    def __iter__(self) -> Iterator[str]:
        return (entry.name for entry in entries("verb"))

    def __len__(self) -> int:
        return len(entries("verb"))


VERBS = _Verbs()
