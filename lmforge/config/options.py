"""Reading options: a TOML recipe and a command line become one validated tree of pydantic models.

The trees themselves are in `config/run.py`. Nothing here knows what an option means: it merges, validates and explains.
Recipe and command line go through the same validation, so that one mistake has one wording.
"""

import copy
import difflib
import json
import re
import tomllib
import types
import typing
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from lmforge.errors import UserError

OptionPath = tuple[str, ...]
MAX_NAME_WIDTH = 46
# What pydantic found wrong → what was expected; filled in with the bounds of the option.
EXPECTED_BY_ERROR_TYPE = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "model_type": "a section",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
    "finite_number": "a finite number",
    "literal_error": "{expected}",
}


class Options(BaseModel):
    """A group of options; keys that are not declared are refused."""

    # Validators are built when first used: help needs none, and answers the sooner.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)
    # Two ways to say one thing, as pairs of (section, option): the one that is typed stands in place of a recipe's other.
    ALTERNATIVES: ClassVar[tuple[tuple[tuple[str, str], tuple[str, str]], ...]] = ()


OptionsT = TypeVar("OptionsT", bound=Options)


def option(default: Any, description: str, **bounds: Any) -> Any:
    """Declare one option: its default, its meaning in one line, and pydantic bounds such as `gt=0`."""
    return Field(default, description=description, **bounds)


def argument(default: Any, description: str) -> Any:
    """Declare an option that may also be given by position on the command line."""
    return Field(default, description=description, json_schema_extra={"positional": True})


def section(options_class: type[Options], description: str) -> Any:
    """Declare a group of options inside another. A list of them is an option: `tuple[Tree, ...] = option((), …)`."""
    return Field(default_factory=options_class, description=description)


def read_recipe(path: Path) -> dict[str, Any]:
    """The nested table of a TOML file. Raises UserError when it is missing, not UTF-8 or not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such recipe") from None
    except UnicodeDecodeError as problem:
        raise UserError(f"{path}: not UTF-8 text (byte {problem.start})") from None
    except tomllib.TOMLDecodeError as problem:
        raise UserError(f"{path}: not valid TOML: {problem}") from None
    except OSError as problem:
        raise UserError(f"{path}: {problem.strerror}") from None


def parse_options(
    options_class: type[OptionsT], arguments: list[str], recipe: dict[str, Any] | None = None, recipe_name: str = ""
) -> OptionsT:
    """`recipe` overridden by command-line `arguments` (`--section.option value`), validated as a `tree`.

    Raises UserError with one line that names the option, where it was given and what was expected.
    """
    given = _parse_command_line(options_class, arguments)
    merged = copy.deepcopy(recipe or {})
    for one, other in options_class.ALTERNATIVES:
        for typed, written in ((one, other), (other, one)):
            if given.get(typed) is not None and written not in given and isinstance(merged.get(written[0]), dict):
                merged[written[0]].pop(written[1], None)
    for path, value in given.items():
        table = merged
        for part in path[:-1]:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise UserError(f"{recipe_name}: {part}: expected a section, got {_as_json(table)}")
        table[path[-1]] = value
    return validate_options(options_class, merged, recipe_name, frozenset(given))


def validate_options(
    options_class: type[OptionsT],
    table: dict[str, Any],
    source: str = "",
    from_command_line: frozenset[OptionPath] = frozenset(),
) -> OptionsT:
    """`table` as a `tree`, strictly: a number in quotes is not a number. Raises UserError as `parse` does."""
    try:
        # JSON mode is strict about types and still takes text for a path and a list for a tuple.
        return options_class.model_validate_json(_as_json(_with_none_values(options_class, table)), strict=True)
    except ValidationError as problem:
        # Where a required key is misspelt, that it is missing is the lesser half of the news.
        error = min(problem.errors(), key=lambda error: error["type"] == "missing")
    path = tuple(part for part in error["loc"] if isinstance(part, str))
    context = error.get("ctx", {})
    if error["type"] == "value_error":  # raised by our own validators, in their own words
        raise UserError(f"{source}: {context['error']}" if source else str(context["error"]))
    name = ".".join(path)
    typed = any(path[:length] in from_command_line for length in range(1, len(path) + 1))
    place = f"--{name}" if typed or not source else f"{source}: {name}"
    if error["type"] == "extra_forbidden":
        raise UserError(f"{place}: no such option{_did_you_mean(options_class, path)}")
    if error["type"] == "missing":
        raise UserError(f"{place}: missing; give {dict(iter_options(options_class, in_tables=True))[path].description}")
    in_list = isinstance(error["loc"][-1], int)
    expected = (
        "a table" if in_list and error["type"] == "model_type" else EXPECTED_BY_ERROR_TYPE[error["type"]].format(**context)
    )
    raise UserError(f"{place}: expected {expected}, got {_as_json(error['input'])}")


def _with_none_values(options_class: type[BaseModel], table: dict[str, Any]) -> dict[str, Any]:
    """`table` with None for "none", in which TOML has to write that an option is to have no value; not for options of text."""
    found = dict(table)
    for name, field in options_class.model_fields.items():
        kind, value = field.annotation, table.get(name)
        if isinstance(kind, type) and issubclass(kind, BaseModel) and isinstance(value, dict):
            found[name] = _with_none_values(kind, value)
        elif value == "none" and _accepts_none(field) and not {str, Path} & set(_union_members(field)):
            found[name] = None
    return found


def _as_json(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)  # TOML has dates, JSON has not


def _did_you_mean(options_class: type[Options], path: OptionPath, in_tables: bool = True) -> str:
    """A hint at the option that was probably meant: in the section that was named, else anywhere."""
    typed = ".".join(path).replace("-", "_")
    section, _, last = typed.rpartition(".")
    whole = [".".join(known) for known, _ in iter_options(options_class, in_tables=in_tables)]
    anywhere = {name.rpartition(".")[2]: name for name in whole}
    beside = {name.rpartition(".")[2]: name for name in whole if name.rpartition(".")[0] == section}
    # Where the section is misspelt, or stands for an option: sections are names as well.
    every = {name: name for name in (*whole, *(name.partition(".")[0] for name in whole))}
    for names, word, likeness in ((beside, last, 0.6) if beside else (every, typed, 0.6), (anywhere, last, 0.75)):
        close = difflib.get_close_matches(word, names, n=1, cutoff=likeness)
        if close:
            return f"; did you mean {names[close[0]]}?"
    return "; --help lists those there are"


def iter_options(
    options_class: type[BaseModel], prefix: OptionPath = (), in_tables: bool = False
) -> Iterator[tuple[OptionPath, FieldInfo]]:
    """Every option of a tree as (path, field), depth first in the order of declaration.

    A list of tables is one option; with `in_tables` the keys of such a table follow it.
    """
    for name, field in options_class.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from iter_options(kind, (*prefix, name), in_tables)
            continue
        yield (*prefix, name), field
        if in_tables and (table := _table_class(field)):
            yield from iter_options(table, (*prefix, name), in_tables)


def _union_members(field: FieldInfo) -> tuple[Any, ...]:
    """The kinds of value an option takes: its annotation, or the members of the union that this is."""
    kind = field.annotation
    return typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)


def _accepts_none(field: FieldInfo) -> bool:
    """Whether "none" stands for no value; where it is one of the words that may be given it stands for itself."""
    kinds = _union_members(field)
    words = [word for kind in kinds if typing.get_origin(kind) is typing.Literal for word in typing.get_args(kind)]
    return type(None) in kinds and "none" not in words


def _is_list(field: FieldInfo) -> bool:
    return typing.get_origin(field.annotation) is tuple


def _table_class(field: FieldInfo) -> type[BaseModel] | None:
    """What each item of a list of tables holds; None for any other option."""
    item = typing.get_args(field.annotation)[0] if _is_list(field) else None
    return item if isinstance(item, type) and issubclass(item, BaseModel) else None


def _is_flag(field: FieldInfo) -> bool:
    return bool in _union_members(field)


def _is_positional(field: FieldInfo) -> bool:
    return isinstance(field.json_schema_extra, dict) and "positional" in field.json_schema_extra


def _is_option_name(word: str) -> bool:
    return re.match(r"--[A-Za-z]", word) is not None


def _parse_command_line(options_class: type[Options], arguments: list[str]) -> dict[OptionPath, Any]:
    """What `arguments` give, by option. Of an option given twice the last counts."""
    known = dict(iter_options(options_class))
    given: dict[OptionPath, Any] = {}
    for word in arguments:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise UserError(f"{word!r}: not UTF-8 text") from None
    words = deque(arguments)
    while words:
        word = words.popleft()
        if not _is_option_name(word):
            _assign_positional(known, given, word)
            continue
        name, equals, attached = word[2:].partition("=")
        path = tuple(name.replace("-", "_").split("."))
        if path not in known:
            raise UserError(f"--{name}: no such option{_did_you_mean(options_class, path, in_tables=False)}")
        values = [attached] if equals else _take_values(words, known[path])
        if _table_class(known[path]):
            given[path] = [_parse_inline_table(name, word) for word in values]
        elif _is_list(known[path]):
            given[path] = [_parse_list_item(known[path], value) for value in values]
        elif values:
            given[path] = _parse_value(known[path], values[0])
        elif _is_flag(known[path]):
            given[path] = True
        else:
            raise UserError(f"--{name}: needs a value")
    return given


def _assign_positional(known: dict[OptionPath, FieldInfo], given: dict[OptionPath, Any], word: str) -> None:
    """Give `word` to the first option that may be given by position and still has room."""
    for path, field in known.items():
        if _is_positional(field) and _is_list(field):
            given.setdefault(path, []).append(word)
            return
        if _is_positional(field) and path not in given:
            given[path] = _parse_value(field, word)
            return
    raise UserError(f"unexpected argument {word!r}; options begin with --")


def _take_values(words: deque[str], field: FieldInfo) -> list[str]:
    """Take from `words` what belongs to an option: for a list all up to the next option, else at most one."""
    taken: list[str] = []
    while words and not _is_option_name(words[0]) and (_is_list(field) or not taken):
        if _is_flag(field) and words[0].lower() not in ("true", "false"):
            break
        taken.append(words.popleft())
    return taken


def _parse_value(field: FieldInfo, text: str) -> Any:
    """`text` as a value of the option's kind where it reads as one; else as it is, for `validate` to refuse."""
    kinds = _union_members(field)
    if _accepts_none(field) and text.lower() == "none":
        return None
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        if int in kinds:
            return _parse_int(text)
        if float in kinds:
            return float(text)
    except ValueError:
        pass
    return text


def _parse_list_item(field: FieldInfo, text: str) -> Any:
    """`text` as one item of a list: a number where they are numbers and it reads as one."""
    kind = typing.get_args(field.annotation)[0]
    try:
        return kind(text) if kind in (int, float) else text
    except ValueError:
        return text


def _parse_inline_table(name: str, text: str) -> Any:
    """`text`, an inline table of TOML, as in a recipe."""
    try:
        (table,) = tomllib.loads(f"table = {text}").values()
        return table
    except ValueError:
        raise UserError(f'--{name}: expected a table such as {{key = "value"}}, got {_as_json(text)}') from None


def _parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = float(text)  # 5e5 is a whole number too
        if not number.is_integer():
            raise
        return int(number)


def format_help(options_class: type[Options]) -> str:
    """Help for every option: its name, kind, meaning and default, one line each."""
    rows = []
    for path, field in iter_options(options_class):
        rows.append((path, _option_usage(path, field), f"{field.description}{_default_text(field)}"))
        if table := _table_class(field):
            rows += [
                (path, f"    {'.'.join(key)} {_type_name(inner)}", f"{inner.description}{_default_text(inner)}")
                for key, inner in iter_options(table)
            ]
    width = min(max(len(spelling) for _, spelling, _ in rows), MAX_NAME_WIDTH)
    lines: list[str] = []
    heading: OptionPath = ()
    for path, spelling, meaning in rows:
        if path[:-1] != heading:
            heading = path[:-1]
            lines.append(f"\n[{path[0]}]  {options_class.model_fields[path[0]].description}")
        lines.append(f"  {spelling:<{width}}  {meaning}")
    return "\n".join(lines)


def _option_usage(path: OptionPath, field: FieldInfo) -> str:
    return f"{'[--]' if _is_positional(field) else '--'}{'.'.join(path)} {_type_name(field)}"


def _type_name(field: FieldInfo) -> str:
    kind = next(kind for kind in _union_members(field) if kind is not type(None))
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(typing.get_args(kind))
    if _is_list(field):
        return "TABLE …" if _table_class(field) else "TEXT …"
    return {int: "INT", float: "NUMBER", bool: "[true|false]", str: "TEXT_SUFFIXES", Path: "PATH"}[kind]


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return " (required)"
    if "(default: " in (field.description or ""):
        return ""
    value = "none" if field.default in (None, ()) else field.default
    return f" (default: {value if isinstance(value, str | Path) else _toml_value(value)})"


def to_toml(options: Options) -> str:
    """A tree as TOML that `read_recipe` opens again: sections in order, options that have no value by default left out."""
    top, sections = [], []
    defaults = {path: field.default for path, field in iter_options(type(options))}
    for name, value in options.model_dump(mode="json").items():
        if isinstance(value, dict):
            said = {key: "none" if item is None and defaults[name, key] is not None else item for key, item in value.items()}
            inner = [f"{key} = {_toml_value(item)}" for key, item in said.items() if item is not None]
            sections.append("\n".join([f"[{name}]", *inner]))
        elif value is not None:
            top.append(f"{name} = {_toml_value(value)}")
    return "\n\n".join((["\n".join(top)] if top else []) + sections) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml_value(item)}" for key, item in value.items() if item is not None) + "}"
    # A JSON number, truth value or text is TOML too, but for one character that only TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
