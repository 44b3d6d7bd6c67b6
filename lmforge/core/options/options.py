"""Declaring options, and reading them: a TOML recipe and a command line become one validated tree
of pydantic models.

This module merges, validates and explains options, independent of their meaning. Recipe and command
line go through the same validation, so both give the same error message. `to_toml` writes a tree as
a recipe.
"""

import copy
import difflib
import json
import os
import re
import types
import typing
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import tomli_w
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from lmforge.core import registry
from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import (
    check_text,
    cut,
    expectation,
    first_error,
    parse_toml,
    quoted,
    read_toml,
)

OptionPath = tuple[str, ...]
Alternatives = tuple[tuple[tuple[str, str], tuple[str, str]], ...]
MAX_NAME_WIDTH = 46
MAX_NAME_BYTES = 255  # what file systems take
POSSIBLE_PATH = f"expected a path of names of at most {MAX_NAME_BYTES} bytes, without NUL"


class Options(BaseModel):
    """A group of options; keys that are not declared are refused."""

    # Validators are built when first used, since help does not need them.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)
    # Two ways to say one thing, as pairs of (section, option): the one on the command line replaces
    # the other in a recipe.
    ALTERNATIVES: ClassVar[Alternatives] = ()
    # For a verb with many options: the names of those that most people need, in the order in which
    # help lists them.
    ESSENTIAL: ClassVar[str] = ""

    @property
    def uses_ranks(self) -> bool:
        """Whether a distributed verb with these options works on the ranks that `lmforge` starts;
        else it starts what it needs itself.
        """
        return True

    def problems(self) -> Iterator[str]:
        """Problems of options that are valid individually, as lines for the user.

        The first one is reported.
        """
        return iter(())

    @field_validator("*")
    @classmethod
    def _check_paths(cls, value: Any) -> Any:
        """Refuse paths that no file system takes here, where the option is known."""
        for path in value if isinstance(value, tuple) else (value,):
            if isinstance(path, Path) and is_impossible_path(path):
                raise PydanticCustomError("path", POSSIBLE_PATH)
        return value

    @field_validator("*")
    @classmethod
    def _check_names(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse a name that nothing is registered under."""
        kind = _registered_kind(cls.model_fields[info.field_name or ""])
        for name in value if isinstance(value, tuple) else (value,):
            if kind is not None and name is not None and not registry.is_known(kind, name):
                raise PydanticCustomError(
                    "registered", "{words}", {"words": registry.unknown_name(kind, name)}
                )
        return value

    @model_validator(mode="after")
    def _check_problems(self) -> Self:
        for problem in self.problems():
            raise ValueError(problem)
        return self

    def changed(self) -> list[str]:
        """The options that do not have their default value."""
        fields = type(self).model_fields.items()
        return [
            name
            for name, field in fields
            if getattr(self, name) != field.get_default(call_default_factory=True)
        ]


def is_impossible_path(path: Path) -> bool:
    """Whether no file system accepts a path."""
    return "\0" in str(path) or any(len(os.fsencode(name)) > MAX_NAME_BYTES for name in path.parts)


OptionsT = TypeVar("OptionsT", bound=Options)


def option(default: Any, description: str, **bounds: Any) -> Any:
    """Declare one option: its default, its meaning in one line, and pydantic bounds such as
    `gt=0`.
    """
    return Field(default, description=description, **bounds)


def with_default(options_class: type[BaseModel], name: str, default: Any) -> Any:
    """An option of `options_class` with another default, and the same meaning and bounds."""
    field = options_class.model_fields[name]
    bounds = {
        each: getattr(limit, each)
        for limit in field.metadata
        for each in ("gt", "ge", "lt", "le")
        if hasattr(limit, each)
    }
    return Field(
        default, description=field.description, json_schema_extra=field.json_schema_extra, **bounds
    )


def choice(default: Any, description: str, kind: str) -> Any:
    """Declare an option whose values are the names that are registered of a kind
    (`registry.KINDS`), or a list of them.
    """
    return Field(default, description=description, json_schema_extra={"registered": kind})


def argument(default: Any, description: str) -> Any:
    """Declare an option that may also be given by position on the command line."""
    return Field(default, description=description, json_schema_extra={"positional": True})


def section(options_class: type[Options], description: str) -> Any:
    """Declare a group of options inside another.

    A list of them is an option: `tuple[Group, ...] = option((), …)`.
    """
    return Field(default_factory=options_class, description=description)


# What several commands have in common.
PLUGINS = option(
    (), "Python files that register more names; at the top of a recipe, paths are relative to it"
)
OUTPUT_FORMAT = option("text", "output format")


def read_recipe(path: Path) -> dict[str, Any]:
    """The nested table of a TOML file.

    Raises UserError when it is missing, too large, not UTF-8 or not TOML.
    """
    try:
        return read_toml(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such recipe") from None
    except OSError as problem:
        raise UserError(f"{cut(str(path), MAX_NAME_BYTES)}: {problem.strerror}") from None


def parse_options(
    options_class: type[OptionsT],
    arguments: list[str],
    recipe: dict[str, Any] | None = None,
    recipe_name: str = "",
) -> OptionsT:
    """`recipe` overridden by command-line `arguments` (`--section.option value`), validated as
    `options_class`.

    Raises UserError with one line that names the option, where it was given and what was expected.
    """
    given = _parse_command_line(options_class, arguments)
    return merge_options(options_class, given, recipe, recipe_name)


def merge_options(
    options_class: type[OptionsT],
    given: Mapping[OptionPath, Any],
    recipe: dict[str, Any] | None = None,
    recipe_name: str = "",
) -> OptionsT:
    """`recipe` overridden by what is `given`, validated as `options_class`.

    Raises UserError as `parse_options` does.
    """
    merged = copy.deepcopy(recipe or {})
    for one, other in options_class.ALTERNATIVES:
        for typed, written in ((one, other), (other, one)):
            if (
                given.get(typed) is not None
                and written not in given
                and isinstance(merged.get(written[0]), dict)
            ):
                merged[written[0]].pop(written[1], None)
    for path, value in given.items():
        table = merged
        for part in path[:-1]:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise UserError(f"{recipe_name}: {part}: expected a section, got {quoted(table)}")
        table[path[-1]] = value
    return validate_options(options_class, merged, recipe_name, frozenset(given))


def validate_options(
    options_class: type[OptionsT],
    table: dict[str, Any],
    source: str = "",
    from_command_line: frozenset[OptionPath] = frozenset(),
) -> OptionsT:
    """`table` as an `options_class`, strictly: a number in quotes is not a number.

    Raises UserError as `parse_options` does.
    """
    try:
        # JSON mode is strict about types and still takes text for a path and a list for a tuple.
        # TOML has dates, which JSON lacks.
        content = json.dumps(
            _with_none_values(options_class, table), default=str, ensure_ascii=False
        )
        return options_class.model_validate_json(content, strict=True)
    except ValidationError as problem:
        error = first_error(problem)
    if error["type"] == "value_error":  # raised by our own validators, with their own message
        message = str(error["ctx"]["error"])
        raise UserError(f"{source}: {message}" if source else message)
    path = tuple(part for part in error["loc"] if isinstance(part, str))
    name = cut(".".join(path))
    typed = any(path[:length] in from_command_line for length in range(1, len(path) + 1))
    place = f"--{name}" if typed or not source else f"{source}: {name}"
    if error["type"] == "extra_forbidden":
        raise UserError(f"{place}: no such option{_did_you_mean(options_class, path)}")
    if error["type"] == "missing":
        raise UserError(
            f"{place}: missing; give"
            f" {dict(iter_options(options_class, in_tables=True))[path].description}"
        )
    raise UserError(f"{place}: {expectation(error)}")


def _with_none_values(options_class: type[BaseModel], table: dict[str, Any]) -> dict[str, Any]:
    """`table` with None for "none", which is how TOML says that an option has no value; not for
    options of text.
    """
    result = dict(table)
    for name, field in options_class.model_fields.items():
        value = table.get(name)
        if (inner := _section_class(field)) and isinstance(value, dict):
            result[name] = _with_none_values(inner, value)
        elif (
            value == "none"
            and _accepts_none(field)
            and (_registered_kind(field) or not {str, Path} & set(_value_types(field)))
        ):
            result[name] = None
    return result


def _did_you_mean(options_class: type[Options], path: OptionPath, in_tables: bool = True) -> str:
    """A hint at the option that was probably meant: in the named section, otherwise in any."""
    typed = cut(".".join(path)).replace("-", "_")
    section, _, last = typed.rpartition(".")
    full = [".".join(known) for known, _ in iter_options(options_class, in_tables=in_tables)]
    anywhere = {name.rpartition(".")[2]: name for name in full}
    beside = {name.rpartition(".")[2]: name for name in full if name.rpartition(".")[0] == section}
    # Where the section is misspelt, or stands for an option: sections are names as well.
    every = {name: name for name in (*full, *(name.partition(".")[0] for name in full))}
    for names, word, likeness in (
        (beside, last, 0.6) if section and beside else (every, typed, 0.6),
        (anywhere, last, 0.75),
    ):
        close = difflib.get_close_matches(word, names, n=1, cutoff=likeness)
        if close:
            return f"; did you mean {names[close[0]]}?"
    return "; --help all lists all options"


def iter_options(
    options_class: type[BaseModel], prefix: OptionPath = (), in_tables: bool = False
) -> Iterator[tuple[OptionPath, FieldInfo]]:
    """Every option as (path, field), depth first in the order of declaration.

    A list of tables is one option; with `in_tables` the keys of such a table follow it.
    """
    for name, field in options_class.model_fields.items():
        if inner := _section_class(field):
            yield from iter_options(inner, (*prefix, name), in_tables)
            continue
        yield (*prefix, name), field
        if in_tables and (table := _table_class(field)):
            yield from iter_options(table, (*prefix, name), in_tables)


def _section_class(field: FieldInfo) -> type[BaseModel] | None:
    """The options of a section; None for an option."""
    return (
        field.annotation
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        else None
    )


def _value_types(field: FieldInfo) -> tuple[Any, ...]:
    """The types of value that an option takes: its annotation, or the members of a union, or the
    items of a list.
    """
    several = typing.get_origin(field.annotation) in (types.UnionType, typing.Union, tuple)
    members = typing.get_args(field.annotation) if several else (field.annotation,)
    return tuple(
        typing.get_args(each)[0] if typing.get_origin(each) is typing.Annotated else each
        for each in members
    )


def _is_parsed(field: FieldInfo) -> bool:
    """Whether a validator of the option's own reads its value from text."""
    members = (
        part
        for each in typing.get_args(field.annotation)
        for part in getattr(each, "__metadata__", ())
    )
    return any(isinstance(part, BeforeValidator) for part in members)


def _accepts_none(field: FieldInfo) -> bool:
    """Whether "none" means no value; where it is one of the words that may be given it stands for
    itself.
    """
    members = _value_types(field)
    words = [
        word
        for member in members
        if typing.get_origin(member) is typing.Literal
        for word in typing.get_args(member)
    ]
    return type(None) in members and "none" not in words


def _registered_kind(field: FieldInfo) -> str | None:
    """The kind whose names are the values of an option; None for any other option."""
    extra = field.json_schema_extra
    return str(extra["registered"]) if isinstance(extra, dict) and "registered" in extra else None


def _is_list(field: FieldInfo) -> bool:
    return typing.get_origin(field.annotation) is tuple


def _table_class(field: FieldInfo) -> type[BaseModel] | None:
    """The options of each item of a list of tables; None for any other option."""
    item = _value_types(field)[0]
    return (
        item if _is_list(field) and isinstance(item, type) and issubclass(item, BaseModel) else None
    )


def _is_flag(field: FieldInfo) -> bool:
    return bool in _value_types(field)


def _is_positional(field: FieldInfo) -> bool:
    return isinstance(field.json_schema_extra, dict) and "positional" in field.json_schema_extra


def _is_option_name(word: str) -> bool:
    return re.match(r"--[A-Za-z]", word) is not None


def _parse_command_line(
    options_class: type[Options], arguments: list[str]
) -> dict[OptionPath, Any]:
    """What `arguments` give, by option. If an option is given twice, the last value counts."""
    known = dict(iter_options(options_class))
    given: dict[OptionPath, Any] = {}
    check_text(arguments)
    words = deque(arguments)
    while words:
        word = words.popleft()
        if not _is_option_name(word):
            _assign_positional(known, given, word)
            continue
        name, equals, attached = word[2:].partition("=")
        path = tuple(name.replace("-", "_").split("."))
        if path not in known:
            raise UserError(
                f"--{cut(name)}: no such"
                f" option{_did_you_mean(options_class, path, in_tables=False)}"
            )
        field = known[path]
        values = [attached] if equals else _take_values(words, field)
        if _table_class(field):
            given[path] = [table for value in values for table in _parse_inline_tables(name, value)]
        elif _is_list(field):
            given[path] = [_parse_value(field, value) for value in values]
        elif values:
            given[path] = _parse_value(field, values[0])
        elif _is_flag(field):
            given[path] = True
        else:
            raise UserError(f"--{name}: needs a value")
    return given


def _assign_positional(
    known: dict[OptionPath, FieldInfo], given: dict[OptionPath, Any], word: str
) -> None:
    """Give `word` to the first option that may be given by position and has none yet, or is a
    list.
    """
    for path, field in known.items():
        if _is_positional(field) and _is_list(field):
            given.setdefault(path, []).append(word)
            return
        if _is_positional(field) and path not in given:
            given[path] = _parse_value(field, word)
            return
    raise UserError(f"unexpected argument {cut(word)!r}; options begin with --")


def _take_values(words: deque[str], field: FieldInfo) -> list[str]:
    """Take from `words` what belongs to an option: for a list all up to the next option, else at
    most one.
    """
    taken: list[str] = []
    while words and not _is_option_name(words[0]) and (_is_list(field) or not taken):
        if _is_flag(field) and words[0].lower() not in ("true", "false"):
            break
        taken.append(words.popleft())
    return taken


def _parse_value(field: FieldInfo, text: str) -> Any:
    """`text` as a value of the option, or as an item of its list, where it reads as one; else as it
    is, for validation to refuse.
    """
    members = _value_types(field)
    if _accepts_none(field) and text.lower() == "none":
        return None
    if bool in members and text.lower() in ("true", "false"):
        return text.lower() == "true"
    with suppress(ValueError):
        if int in members:
            return _parse_int(text)
        if float in members:
            return float(text)
    return text


def _parse_inline_tables(name: str, text: str) -> list[Any]:
    """The tables of `text`: an inline table of TOML, as in a recipe, or an array of them."""
    try:
        (value,) = parse_toml(f"tables = {text}".encode(), name).values()
        return value if isinstance(value, list) else [value]
    except (UserError, ValueError):
        raise UserError(
            f'--{name}: expected a table of TOML such as {{key = "value"}}, got {quoted(text)}'
        ) from None


def _parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = float(text)  # 5e5 is a whole number too
        if not number.is_integer():
            raise
        return int(number)


def to_toml(options: Options, changed_only: bool = False) -> str:
    """Options as TOML that `read_recipe` opens again; options that have no value by default are
    left out, and where `changed_only`, all that have their default.
    """
    return tomli_w.dumps(_as_toml(options, changed_only))


def _as_toml(value: Any, changed_only: bool = False) -> Any:
    """A value in the types of TOML."""
    if isinstance(value, Options):
        table = {}
        for name, field in type(value).model_fields.items():
            each = getattr(value, name)
            if isinstance(each, Options):
                table[name] = _as_toml(each, changed_only)
            elif (each is not None or field.default is not None) and not (
                changed_only and each == field.default
            ):
                table[name] = _as_toml(each)
        return {name: each for name, each in table.items() if each != {} or not changed_only}
    if isinstance(value, tuple):
        return [_as_toml(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return "none" if value is None else value
