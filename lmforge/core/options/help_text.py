"""Help for options, as `--help` prints it: name, type, meaning and default of each, in one line."""

import json
import typing
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lmforge.core import registry
from lmforge.core.options.options import (
    MAX_NAME_WIDTH,
    OptionPath,
    Options,
    _is_list,
    _is_parsed,
    _is_positional,
    _registered_kind,
    _section_class,
    _table_class,
    _value_types,
    iter_options,
)


def format_help(options_class: type[Options], everything: bool = True) -> str:
    """Help for options: name, type, meaning and default, one line each.

    Where a class names its essential ones, they are all that is listed unless `everything` is asked
    for, and their sections come first.
    """
    known = dict(iter_options(options_class))
    essential = {path: known[path] for path in (tuple(name.split(".")) for name in options_class.ESSENTIAL.split())}
    order = {section: at for at, section in enumerate(dict.fromkeys(path[0] for path in essential))}
    if short := bool(essential) and not everything:
        listed = list(essential.items())
    else:
        # An option that is in no section comes before those that are, as in a recipe.
        listed = sorted(
            known.items(), key=lambda item: (not _is_positional(item[1]), len(item[0]) > 1, order.get(item[0][0], len(order)))
        )
    rows = []
    for path, field in listed:
        usage = f"{'[--]' if _is_positional(field) else '--'}{'.'.join(path)} {type_name(field)}"
        rows.append((path, usage, f"{field.description}{default_text(field)}"))
        if table := _table_class(field):
            rows += [
                (path, f"    {'.'.join(key)} {type_name(inner)}", f"{inner.description}{default_text(inner)}")
                for key, inner in iter_options(table)
            ]
    width = min(max(len(usage) for _, usage, _ in rows), MAX_NAME_WIDTH)
    lines: list[str] = []
    heading: OptionPath = ()
    for path, usage, meaning in rows:
        if path[:-1] != heading and not short:
            heading = path[:-1]
            lines.append(f"\n[{'.'.join(heading)}]  {_section_description(options_class, heading)}")
        lines.append(f"  {usage:<{width}}  {meaning}")
    return "\n".join(lines)


def _section_description(options_class: type[BaseModel], path: OptionPath) -> str:
    """The meaning of a section, which may be in another."""
    field = options_class.model_fields[path[0]]
    inner = _section_class(field)
    return _section_description(inner, path[1:]) if inner and len(path) > 1 else field.description or ""


def type_name(field: FieldInfo) -> str:
    """What kind of value an option takes, as help writes it."""
    if kind := _registered_kind(field):
        return ("|".join(registry.names(kind)) or "TEXT") + (" …" if _is_list(field) else "")
    if _is_list(field):
        return "TABLE …" if _table_class(field) else "TEXT …"
    member = next(member for member in _value_types(field) if member is not type(None))
    if typing.get_origin(member) is typing.Literal:
        return "|".join(typing.get_args(member))
    if _is_parsed(field):
        return "TEXT"
    return {int: "INT", float: "NUMBER", bool: "[true|false]", str: "TEXT", Path: "PATH"}[member]


def default_text(field: FieldInfo) -> str:
    """The default as help writes it after the description; nothing where that says it."""
    if field.is_required():
        return " (required)"
    if "(default: " in (field.description or ""):
        return ""
    value = "none" if field.default in (None, ()) else field.default
    return f" (default: {value if isinstance(value, str | Path) else json.dumps(value, default=str, ensure_ascii=False)})"
