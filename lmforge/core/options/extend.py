"""Adds the options of plugins to the config classes, so that they are read, checked and explained
like any other.

An entry of the registry with options has a section of its name in the section where its kind is
chosen: `[optimizer.NAME]`.
"""

import hashlib
import sys
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

from pydantic import BaseModel, create_model

from lmforge.core import registry
from lmforge.core.errors import UserError
from lmforge.core.options.help_text import format_help
from lmforge.core.options.options import Options, _section_class, section
from lmforge.core.registry import KINDS, Entry

OptionsT = TypeVar("OptionsT", bound=Options)

# Configs are sent between ranks, so their classes are found by name; every rank has the same
# plugins and so the same names.
_classes = ModuleType("lmforge.core.options.extended")
sys.modules[_classes.__name__] = _classes


def extended(options_class: type[OptionsT]) -> type[OptionsT]:
    """The class with the sections of everything that is registered and has options; itself where
    there is nothing of these.

    Raises UserError for options that cannot be a section.
    """
    return _extended(
        options_class, tuple(entry for entry in registry.entries() if entry.options is not None)
    )


def extended_section(options_class: type[OptionsT], name: str) -> type[Options]:
    """The class of one section of a config, with the options of plugins.

    Raises UserError as `extended` does.
    """
    section_class = _section_class(extended(options_class).model_fields[name])
    assert section_class is not None
    assert issubclass(section_class, Options)
    return section_class


def entry_options(chosen: Options, entry: Entry) -> Any:
    """The options of an entry itself, in the section where it was chosen; None where it has
    none.
    """
    return getattr(chosen, entry.option_name) if entry.options is not None else None


@cache
def _extended(options_class: type[OptionsT], entries: tuple[Entry, ...]) -> type[OptionsT]:
    by_section: dict[str, list[Entry]] = {}
    for entry in entries:
        by_section.setdefault(KINDS[entry.kind].section, []).append(entry)
    fields: dict[str, Any] = {}
    for name, own in by_section.items():
        if name == "":
            if "text_suffixes" in options_class.model_fields:  # the verb that reads documents
                fields |= _sections(options_class, own)
        elif (field := options_class.model_fields.get(name)) is not None and (
            inner := _section_class(field)
        ) is not None:
            inner = _derive(inner, _sections(inner, own))
            fields[name] = (inner, section(inner, field.description or ""))
    return _derive(options_class, fields) if fields else options_class


def _sections(options_class: type[BaseModel], entries: list[Entry]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for entry in entries:
        name = entry.option_name
        what = f"{entry.origin}: {entry.kind} {entry.name}"
        if name in options_class.model_fields or name in fields:
            raise UserError(
                f"{what}: there is another option {name}, so it cannot have options under this"
                " name; choose another"
            )
        _check_options(entry.options, what)
        assert entry.options is not None
        summary = " ".join((entry.options.__doc__ or "").partition("\n\n")[0].split()).rstrip(".")
        description = f"{entry.kind.replace('_', ' ')} {entry.name}" + (
            f": {summary}" if summary else ""
        )
        fields[name] = (entry.options, section(entry.options, description))
    return fields


def _check_options(options: Any, what: str) -> None:
    if not (isinstance(options, type) and issubclass(options, Options)):
        raise UserError(
            f"{what}: options: expected a class derived from lmforge.Options, got {options!r}"
        )
    if required := [name for name, field in options.model_fields.items() if field.is_required()]:
        raise UserError(f"{what}: the option {required[0]} has no default; give it one")
    try:
        options()
        format_help(options)
    except (KeyError, TypeError) as problem:
        reason = (
            f"an option of a type that no recipe can give ({problem}); use int, float, bool, str,"
            " Path, Literal or a tuple"
        )
        raise UserError(f"{what}: {reason}") from None
    except ValueError as problem:
        raise UserError(
            f"{what}: its own rules refuse its defaults: {' '.join(str(problem).split())}"
        ) from None


def _derive(options_class: type[Any], fields: dict[str, Any]) -> type[Any]:
    """A subclass with further fields, under a name that follows from its content."""
    content = [
        (name, annotation.__module__, annotation.__qualname__)
        for name, (annotation, _) in fields.items()
    ]
    digest = hashlib.sha256(repr((options_class.__qualname__, content)).encode()).hexdigest()[:12]
    name = f"{options_class.__name__}_{digest}"
    derived: type[Any] = create_model(
        name,
        __base__=options_class,
        __module__=_classes.__name__,
        __doc__=options_class.__doc__,
        **fields,
    )
    setattr(_classes, name, derived)
    return derived
