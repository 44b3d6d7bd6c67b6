"""Reading options: a TOML recipe and a command line become one validated tree of pydantic models.

The trees themselves are in `config.py`. Nothing here knows what an option means: it merges, validates and explains.
Recipe and command line go through the same validation, so that one mistake has one wording.
"""

import difflib
import json
import tomllib
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from lmforge.errors import Mistake


class Options(BaseModel):
    """A group of options; keys that are not declared are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def option(default: Any, meaning: str, **bounds: Any) -> Any:
    """Declare one option: its default, its meaning in one line, and pydantic bounds such as `gt=0`."""
    return Field(default, description=meaning, **bounds)


def argument(default: Any, meaning: str) -> Any:
    """Declare an option that may also be given by position on the command line."""
    return Field(default, description=meaning, json_schema_extra={"positional": True})


Tree = TypeVar("Tree", bound=Options)


def read_recipe(path: Path) -> dict[str, Any]:
    """The nested table of a TOML file. Raises Mistake when it is missing, not UTF-8 or not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Mistake(f"{path}: no such recipe") from None
    except UnicodeDecodeError as problem:
        raise Mistake(f"{path}: not UTF-8 text (byte {problem.start})") from None
    except tomllib.TOMLDecodeError as problem:
        raise Mistake(f"{path}: not valid TOML: {problem}") from None
    except OSError as problem:
        raise Mistake(f"{path}: {problem.strerror}") from None


def parse(tree: type[Tree], arguments: list[str], recipe: dict[str, Any] | None = None, recipe_name: str = "") -> Tree:
    """`recipe` overridden by command-line `arguments` (`--section.option value`), validated as a `tree`.

    Raises Mistake with one line that names the option, where it was given and what was expected.
    """
    given = _from_command_line(tree, arguments)
    merged: dict[str, Any] = json.loads(json.dumps(recipe or {}, default=str))
    for path, value in given.items():
        table = merged
        for part in path[:-1]:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise Mistake(f"{recipe_name}: {part}: expected a section")
        table[path[-1]] = value
    return validate(tree, merged, recipe_name, frozenset(given))


def validate(
    tree: type[Tree], table: dict[str, Any], where: str = "", from_command_line: frozenset[tuple[str, ...]] = frozenset()
) -> Tree:
    """`table` as a `tree`, strictly: a number in quotes is not a number."""
    try:
        # JSON mode is strict about types and still takes text for a path and a list for a tuple.
        return tree.model_validate_json(json.dumps(table), strict=True)
    except ValidationError as problem:
        error = problem.errors()[0]
        path = tuple(str(part) for part in error["loc"] if isinstance(part, str))
        raise Mistake(_explain(tree, path, error, where, path in from_command_line)) from None


def _explain(tree: type[Options], path: tuple[str, ...], error: Any, where: str, typed: bool) -> str:
    name = ".".join(path)
    place = f"--{name}" if typed or not where else f"{where}: {name}" if name else where
    got = json.dumps(error["input"], default=str)
    context = error.get("ctx", {})
    kind = error["type"]
    if kind == "extra_forbidden":
        return f"{place}: no such option{_nearest(tree, path)}"
    if kind in ("value_error", "assertion_error"):
        message = str(context.get("error", error["msg"]))
        return f"{where}: {message}" if where else message
    expected = {
        "int_type": "a whole number",
        "int_parsing": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "float_parsing": "a number",
        "bool_type": "true or false",
        "bool_parsing": "true or false",
        "string_type": "text",
        "path_type": "a path",
        "list_type": "a list",
        "tuple_type": "a list",
        "dict_type": "a table",
        "model_type": "a section",
        "model_attributes_type": "a section",
        "missing": "a value",
        "greater_than": f"a number above {context.get('gt')}",
        "greater_than_equal": f"a number of at least {context.get('ge')}",
        "less_than": f"a number below {context.get('lt')}",
        "less_than_equal": f"a number of at most {context.get('le')}",
        "literal_error": str(context.get("expected", "")),
        "finite_number": "a finite number",
        "too_short": "a longer list",
        "too_long": "a shorter list",
    }.get(kind)
    if expected is None:
        return f"{place}: {error['msg']}, got {got}"
    if kind == "missing":
        return f"{place}: missing; give it in the recipe or as --{name}"
    return f"{place}: expected {expected}, got {got}"


def _nearest(tree: type[Options], path: tuple[str, ...]) -> str:
    names = {".".join(known) for known, _ in fields(tree)} | {known[0] for known, _ in fields(tree)}
    typed = ".".join(path).replace("-", "_")
    close = difflib.get_close_matches(typed, sorted(names), n=1, cutoff=0.6)
    if not close:
        leaf = {name.rpartition(".")[2]: name for name in names}
        close = [leaf[word] for word in difflib.get_close_matches(typed.rpartition(".")[2], sorted(leaf), n=1, cutoff=0.75)]
    return f"; did you mean {close[0]}?" if close else ""


def fields(tree: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Every option of a tree as (path, field), depth first in the order of declaration."""
    for name, field in tree.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from fields(kind, (*above, name))
        else:
            yield (*above, name), field


def _members(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [member for part in typing.get_args(annotation) for member in _members(part)]
    return [annotation]


def _is_list(field: FieldInfo) -> bool:
    return any(typing.get_origin(member) in (list, tuple) for member in _members(field.annotation))


def _looks_like_option(text: str) -> bool:
    return text.startswith("--") and len(text) > 2


def _from_command_line(tree: type[Options], arguments: list[str]) -> dict[tuple[str, ...], Any]:
    known = dict(fields(tree))
    positional = [path for path, field in known.items() if (field.json_schema_extra or {}).get("positional")]  # type: ignore[union-attr]
    given: dict[tuple[str, ...], Any] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not _looks_like_option(word):
            free = [path for path in positional if path not in given or _is_list(known[path])]
            if not free:
                raise Mistake(f"unexpected argument {word!r}; options begin with --")
            if _is_list(known[free[0]]):
                given.setdefault(free[0], []).append(word)
            else:
                given[free[0]] = _value(known[free[0]], word)
            continue
        name, equals, attached = word[2:].partition("=")
        path, negated = tuple(name.replace("-", "_").split(".")), False
        if path not in known and path[-1].startswith("no_"):
            positive = (*path[:-1], path[-1].removeprefix("no_"))
            if positive in known and bool in _members(known[positive].annotation):
                path, negated = positive, True
        if path not in known:
            raise Mistake(f"--{name}: no such option{_nearest(tree, path)}")
        field = known[path]
        if negated:
            given[path] = False
        elif equals:
            given[path] = _value_list(field, attached) if _is_list(field) else _value(field, attached)
        elif _is_list(field):
            values = []
            while rest and not _looks_like_option(rest[0]):
                values.append(rest.pop(0))
            given[path] = _value_list(field, values[0]) if len(values) == 1 else [_scalar(word) for word in values]
        elif bool in _members(field.annotation) and (not rest or rest[0].lower() not in ("true", "false")):
            given[path] = True
        elif rest and not _looks_like_option(rest[0]):
            given[path] = _value(field, rest.pop(0))
        else:
            raise Mistake(f"--{name}: needs a value")
    return given


def _scalar(text: str) -> Any:
    """`text` as a number, a truth value or nothing where it reads as one."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.lower() in ("none", "null"):
        return None
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        return int(number) if number == number and abs(number) < 2**53 and number == int(number) and "." not in text else number
    return text


def _value(field: FieldInfo, text: str) -> Any:
    members = _members(field.annotation)
    if type(None) in members and text.lower() == "none":
        return None
    is_text = any(member in (str, Path) or typing.get_origin(member) is typing.Literal for member in members)
    return text if is_text else _scalar(text)


def _value_list(field: FieldInfo, text: str) -> Any:
    if text.startswith("["):
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            pass
    of_text = any(str in typing.get_args(member) for member in _members(field.annotation))
    return [text] if of_text else [_scalar(part) for part in text.split(",")]


def describe(tree: type[Options]) -> str:
    """Help for every option: its name, kind, default and meaning, one line each."""
    rows: list[tuple[str, str, str]] = []
    for path, field in fields(tree):
        positional = (field.json_schema_extra or {}).get("positional")  # type: ignore[union-attr]
        rows.append((f"  {'' if not positional else '[--]'}{'' if positional else '--'}{'.'.join(path)} {_kind(field)}", field.description or "", _default(field)))
    width = min(max(len(row[0]) for row in rows), 46)
    lines, section = [], None
    for (path, _), (left, meaning, default) in zip(fields(tree), rows, strict=True):
        if len(path) > 1 and path[0] != section:
            section = path[0]
            about = tree.model_fields[section].description
            lines.append(f"\n[{section}]" + (f"  {about}" if about else ""))
        lines.append(f"{left:<{width}}  {meaning}{default}")
    return "\n".join(lines)


def _kind(field: FieldInfo) -> str:
    words = []
    for member in _members(field.annotation):
        origin = typing.get_origin(member)
        if origin is typing.Literal:
            words.append("|".join(str(choice) for choice in typing.get_args(member)))
        elif origin in (list, tuple):
            words.append("LIST")
        elif member is not type(None):
            words.append({int: "INT", float: "NUMBER", bool: "", str: "TEXT", Path: "PATH"}.get(member, ""))
    return "|".join(word for word in words if word)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return " (required)"
    value = field.default
    if value is None or value == "" or value is False:
        return ""
    if value is True:
        return f" (default: on; --no-... turns it off)"
    if isinstance(value, (tuple, list)):
        return f" (default: {' '.join(str(part) for part in value)})" if value else ""
    return f" (default: {value})"


def to_toml(tree: Options) -> str:
    """A tree as TOML that `read_recipe` opens again: sections in order, options without a value left out."""
    top, sections = [], []
    for name, value in tree.model_dump(mode="json").items():
        if isinstance(value, dict):
            inner = [f"{key} = {_toml(item)}" for key, item in value.items() if item is not None]
            sections.append("\n".join([f"[{name}]", *inner]))
        elif value is not None:
            top.append(f"{name} = {_toml(value)}")
    return "\n\n".join((["\n".join(top)] if top else []) + sections) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    # A JSON string, number or truth value is TOML too; JSON escapes DEL-free text exactly as TOML wants it.
    return json.dumps(value, ensure_ascii=False)
