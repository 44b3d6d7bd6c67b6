"""The registry of everything that a recipe chooses by name, built in or from plugins.

An entry has a kind (objective, optimizer, …), a name, an implementation that is imported when it is
first used, and, if it has any, a class of options. Nothing here imports torch or knows what an
entry does: `core/options/builtin_names.py` registers the built-in names, `plugins.py` loads files
and packages of users, `core/options/extend.py` puts their options into the config classes.
"""

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from lmforge.core.errors import UserError, did_you_mean
from lmforge.core.files.untrusted import cut, quoted
from lmforge.core.foreign_code import describe_exception

BUILT_IN = "lmforge"
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


@dataclass(frozen=True)
class RegistryKind:
    """What can be registered.

    `section` holds the options of its entries, each in a section of its own name: that section of a
    recipe where the kind is chosen, or "" for the options of `lmforge prepare`.
    """

    name: str
    section: str
    chosen_by: str
    # Whether plugins may register names, and with options that reach the implementation.
    is_open: bool = True
    has_options: bool = True


KINDS = {
    kind.name: kind
    for kind in (
        RegistryKind("verb", "", "the command line", has_options=False),
        RegistryKind("doctor_check", "", "lmforge doctor", is_open=False),
        RegistryKind("chat_tools", "", "lmforge chat --tools", is_open=False),
        RegistryKind("stage", "run", "run.stage", is_open=False),
        RegistryKind("monitor", "log", "every run", is_open=False),
        RegistryKind("run_check", "log", "every run", has_options=False),
        RegistryKind("attempt_observer", "log", "every run", has_options=False),
        RegistryKind("observer", "log", "every run", has_options=False),
        RegistryKind("memory_advice", "log", "every run", is_open=False),
        RegistryKind("data_sheets", "log", "every run", is_open=False),
        RegistryKind("objective", "objective", "objective.name"),
        RegistryKind("optimizer", "optimizer", "optimizer.name"),
        RegistryKind("schedule", "schedule", "schedule.name"),
        RegistryKind(
            "checkpointing_mode",
            "parallel",
            "parallel.activation_checkpointing",
            has_options=False,
        ),
        RegistryKind("mixer", "model", "the config of a model", is_open=False),
        RegistryKind("packing", "data", "data.packing", is_open=False),
        RegistryKind("engine", "parallel", "parallel.engine", is_open=False),
        RegistryKind("transform", "parallel", "parallel", is_open=False),
        RegistryKind("model_family", "model", "model.model_type"),
        RegistryKind("implementation", "model", "model.implementation", is_open=False),
        RegistryKind("weight_source", "model", "model.source", is_open=False),
        RegistryKind("document_source", "", "the suffix of a file"),
        RegistryKind("checkpoint_layout", "layout", "--layout"),
        RegistryKind("algorithm", "rollout", "rollout.loss_type", has_options=False),
        RegistryKind("reward", "rollout", "rollout.reward_functions"),
        RegistryKind("environment", "rollout", "rollout.environment"),
        RegistryKind("tracker", "log", "log.trackers"),
        RegistryKind("callback", "train", "train.callbacks"),
    )
}


@dataclass(frozen=True, eq=False)
class Entry:
    """The entry of a name.

    implementation  what the kind is called with (docs/extending.md), or "module:name" of it,
                    imported by `load`
    options         a class of options (`lmforge.Options`), every one with a default; None: there
                    are none
    origin          "lmforge", or the plugin that registered it, for messages
    facts           what else the kind has to know without the implementation, such as `like` of a
                    model family
    """

    kind: str
    name: str
    implementation: Any
    options: type[Any] | None = None
    origin: str = BUILT_IN
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def option_name(self) -> str:
        """The name of the section with its options: dashes are underscores on a command line."""
        return self.name.replace("-", "_")

    def load(self) -> Any:
        """The implementation. Raises UserError where a plugin's cannot be imported."""
        if not isinstance(self.implementation, str):
            return self.implementation
        with self._plugin_errors(f"{self.implementation} cannot be imported:"):
            return import_named(self.implementation)

    def build(self, *arguments: Any) -> Any:
        """What the implementation returns for `arguments`.

        Raises UserError where a plugin's raises anything.
        """
        implementation = self.load()
        with self._plugin_errors("raised"):
            return implementation(*arguments)

    def call(self, method: str, *arguments: Any) -> Any:
        """What a method of the implementation returns for `arguments`.

        Raises UserError where a plugin's raises anything.
        """
        implementation = self.load()
        with self._plugin_errors(f"{method} raised"):
            return getattr(implementation, method)(*arguments)

    @contextmanager
    def _plugin_errors(self, what: str) -> Iterator[None]:
        """Turns any exception of a plugin into a UserError."""
        try:
            yield
        except (Exception, SystemExit) as error:
            if self.origin == BUILT_IN:
                raise
            words = (
                str(error)
                if isinstance(error, UserError)
                else f"{what} {describe_exception(error)}"
            )
            raise UserError(f"{self.origin}: {self.kind} {self.name}: {words}") from error


def import_named(name: str) -> Any:
    """What "module:name" names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


_entries: dict[tuple[str, str], Entry] = {}
_origin: ContextVar[str] = ContextVar("origin", default="this program")
_unchecked: ContextVar[bool] = ContextVar("unchecked", default=False)


def register(
    kind: str,
    name: str,
    implementation: Any = None,
    *,
    options: type[Any] | None = None,
    **facts: Any,
) -> Any:
    """Make `name` a value of the option that chooses a `kind`: see `KINDS`, and docs/extending.md
    for what each is called with.

    `implementation` is a function or class, or "module:name", which is imported when it is first
    used. Without it this is a decorator of one. Raises UserError for an unknown kind or one of
    lmforge alone, a name that is taken, or one that is not letters, digits and dashes.
    """
    if kind not in KINDS:
        raise UserError(
            f"{kind}: nothing of this kind is registered{did_you_mean(kind, KINDS)}; there are"
            f" {', '.join(KINDS)}"
        )
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise UserError(
            f"{kind} {cut(str(name))!r}: expected a name of lower-case letters, digits, - and _"
        )
    if (there := _entries.get((kind, name))) is not None:
        raise UserError(f"{kind} {name}: this name is taken by {there.origin}; choose another")
    origin = _origin.get()
    if origin != BUILT_IN and not KINDS[kind].is_open:
        raise UserError(
            f"{kind} {name}: only lmforge registers names of this kind; docs/extending.md lists the"
            " others"
        )
    if options is not None and not KINDS[kind].has_options:
        raise UserError(f"{kind} {name}: this kind has no options; leave them out")
    if kind == "model_family" and origin != BUILT_IN and facts.get("like") not in names(kind):
        raise UserError(
            f"{kind} {name}: give like=…, the model_type whose config it has:"
            f" {', '.join(names(kind))}"
        )
    if kind == "verb" and "config" not in facts:
        raise UserError(f"{kind} {name}: give config=…, the class of its options")
    if kind == "checkpoint_layout" and not {"marker", "like"} <= facts.keys():
        raise UserError(
            f"{kind} {name}: give marker=…, a tensor that only it has, and like=…, the model_type"
            " that it becomes"
        )

    def add(given: Any) -> Any:
        if not callable(given) and not (
            isinstance(given, str) and re.fullmatch(r"[\w.]+:\w+", given)
        ):
            raise UserError(
                f"{kind} {name}: expected a function, a class or module:name, got"
                f" {cut(str(given))!r}"
            )
        _entries[kind, name] = Entry(kind, name, given, options, origin, facts)
        return given

    if implementation is None:
        return add
    add(implementation)
    return None


def names(kind: str) -> list[str]:
    """The names of a kind: first the built-in ones, each in the order of registration."""
    return [entry.name for entry in entries(kind)]


def entries(kind: str | None = None) -> list[Entry]:
    """Everything that is registered, or everything of a kind; built-in entries come first."""
    chosen = [entry for entry in _entries.values() if kind in (None, entry.kind)]
    return sorted(chosen, key=lambda entry: entry.origin != BUILT_IN)


def chosen(kind: str, **roots: Any) -> list[Entry]:
    """The entries of a kind: those with a fact `when` only where it is so.

    It names something of `roots`, such as "config.log.trackers", that is then set, not empty and
    not zero; of a tuple, some of it.
    """

    def is_chosen(entry: Entry) -> bool:
        if "when" not in entry.facts:
            return True
        root, *names = entry.facts["when"].split(".")
        value = reduce(getattr, names, roots[root])
        return any(value) if isinstance(value, tuple) else bool(value)

    return [entry for entry in entries(kind) if is_chosen(entry)]


def find(kind: str, name: str) -> Entry | None:
    return _entries.get((kind, name))


def get(kind: str, name: str) -> Entry:
    """The entry of a name. Raises UserError, with the nearest names, where there is none."""
    if (entry := find(kind, name)) is None:
        raise UserError(f"{KINDS[kind].chosen_by}: {unknown_name(kind, name)}")
    return entry


def unknown_name(kind: str, name: str) -> str:
    """The message about a name that is not registered."""
    known = names(kind)
    expected = (
        " or ".join(filter(None, [", ".join(known[:-1]), known[-1]]))
        if known
        else f"a registered {kind}"
    )
    return (
        f"expected {expected}, got"
        f" {quoted(name)}{did_you_mean(name, known) or '; a plugin may add it (--plugins FILE.py)'}"
    )


def is_known(kind: str, name: str) -> bool:
    """Whether a name may be chosen: it is registered, or names are not checked."""
    return _unchecked.get() or (kind, name) in _entries


@contextmanager
def names_unchecked() -> Iterator[None]:
    """A context in which any name may be chosen, for reading the recipe of a run without loading
    its plugins.
    """
    token = _unchecked.set(True)
    try:
        yield
    finally:
        _unchecked.reset(token)


@contextmanager
def registering(origin: str) -> Iterator[None]:
    """A context in which registrations belong to `origin`.

    If the block raises, they are removed.
    """
    before = dict(_entries)
    token = _origin.set(origin)
    try:
        yield
    except BaseException:
        _entries.clear()
        _entries.update(before)
        raise
    finally:
        _origin.reset(token)


def remove(origin: str) -> None:
    """Remove everything that `origin` has registered."""
    for key in [key for key, entry in _entries.items() if entry.origin == origin]:
        del _entries[key]
