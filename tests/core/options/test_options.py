"""Reading options, with classes that have every type of option."""

import re
import tomllib
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmforge.core.errors import UserError
from lmforge.core.options.help_text import format_help
from lmforge.core.options.options import (
    Options,
    argument,
    iter_options,
    option,
    parse_options,
    read_recipe,
    section,
    to_toml,
    validate_options,
)


class Item(Options):
    name: str = option(..., "its name")
    size: float | None = option(None, "its size (default: any)", ge=0)


class Inner(Options):
    whole: int = option(3, "a whole number", gt=0, le=2**60)
    number: float = option(0.5, "a number", ge=0)
    switch: bool = option(False, "a switch")
    text: str = option("plain", "some text")
    place: Path = option(Path("here"), "a path")
    choice: Literal["left", "right"] = option("left", "one of two")
    texts: tuple[str, ...] = option(("one",), "some texts")
    tables: tuple[Item, ...] = option((), "some tables")
    maybe_whole: int | None = option(None, "a whole number or nothing", gt=0)
    maybe_number: float | None = option(None, "a number or nothing")
    maybe_switch: bool | None = option(None, "a switch or nothing")
    maybe_text: str | None = option(None, "some text or nothing")


class Tree(Options):
    inner: Inner = section(Inner, "the inner ones")
    other_part: Inner = section(Inner, "the others")


class Flat(Options):
    first: Path = argument(..., "what to read")
    rest: tuple[str, ...] = argument((), "what else")
    count: int = option(1, "how many")


# TOML and the command line carry any text but half a surrogate pair; text "none" is nothing where
# that is a choice.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
numbers = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
items = st.fixed_dictionaries({"name": texts}, optional={"size": numbers})
inners = st.fixed_dictionaries(
    {},
    optional={
        "whole": st.integers(1, 2**60),
        "number": numbers,
        "switch": st.booleans(),
        "text": texts,
        "place": texts.filter(lambda text: str(Path(text)) == text and "\0" not in text),
        "choice": st.sampled_from(["left", "right"]),
        "texts": st.lists(texts, max_size=3),
        "tables": st.lists(items, max_size=3),
        "maybe_whole": st.integers(1, 2**60),
        "maybe_number": numbers.map(lambda number: -number),
        "maybe_switch": st.booleans(),
        "maybe_text": texts.filter(lambda text: text.lower() != "none"),
    },
)
# A busy machine draws slowly, which says nothing of what is tested.
draws_may_be_slow = settings(suppress_health_check=[HealthCheck.too_slow])
trees = st.fixed_dictionaries({}, optional={"inner": inners, "other_part": inners})


def command_line_of(table: dict[str, dict[str, Any]]) -> list[str]:
    """The command line that gives the same options as a table."""
    words = []
    for part, values in table.items():
        for name, value in values.items():
            if name == "tables":
                lines = [to_toml(Item(**table)).strip().split("\n") for table in value]
                words += [f"--{part}.{name}", *("{" + ", ".join(each) + "}" for each in lines)]
            elif isinstance(value, list):
                words += (
                    [f"--{part}.{name}={value[0]}"]
                    if len(value) == 1
                    else [f"--{part}.{name}", *value]
                )
            else:
                words.append(
                    f"--{part}.{name}={str(value).lower() if isinstance(value, bool) else value}"
                )
    return words


@draws_may_be_slow
@given(trees)
def test_options_written_as_toml_read_back_equal(table: dict[str, Any]) -> None:
    tree = validate_options(Tree, table)
    assert validate_options(Tree, tomllib.loads(to_toml(tree))) == tree


@draws_may_be_slow
@given(trees)
def test_a_command_line_and_a_recipe_give_the_same_options(table: dict[str, Any]) -> None:
    for values in table.values():
        if any(word.startswith("--") for word in values.get("texts", ())):
            del values["texts"]  # several texts that look like options can only stand in a recipe
    assert parse_options(Tree, command_line_of(table)) == parse_options(Tree, [], table)


@draws_may_be_slow
@given(trees, trees)
def test_the_command_line_overrides_the_recipe_option_by_option(
    recipe: dict[str, Any], typed: dict[str, Any]
) -> None:
    for values in typed.values():
        values.pop("texts", None)
    merged = {part: {**recipe.get(part, {}), **typed.get(part, {})} for part in {**recipe, **typed}}
    assert parse_options(Tree, command_line_of(typed), recipe) == validate_options(Tree, merged)


def test_a_recipe_is_not_changed_by_what_overrides_it() -> None:
    recipe = {"inner": {"whole": 5}}
    parse_options(Tree, ["--inner.whole", "7"], recipe)
    assert recipe == {"inner": {"whole": 5}}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--inner.whole", "7"], {"whole": 7}),
        (["--inner.whole=7"], {"whole": 7}),
        (["--inner.whole", "5e5"], {"whole": 500_000}),
        (["--inner.whole", "1", "--inner.whole", "2"], {"whole": 2}),
        (["--inner.maybe-whole", "7"], {"maybe_whole": 7}),
        (["--inner.maybe_whole", "none"], {"maybe_whole": None}),
        (["--inner.maybe_text", "none"], {"maybe_text": None}),
        (["--inner.number", "3"], {"number": 3.0}),
        (["--inner.number", "1e300"], {"number": 1e300}),
        (["--inner.maybe_number", "-3e-4"], {"maybe_number": -3e-4}),
        (["--inner.switch"], {"switch": True}),
        (["--inner.switch", "--inner.whole", "2"], {"switch": True, "whole": 2}),
        (["--inner.switch", "False"], {"switch": False}),
        (["--inner.maybe_switch=true"], {"maybe_switch": True}),
        (["--inner.text", "5"], {"text": "5"}),
        (["--inner.text=--strange"], {"text": "--strange"}),
        (["--inner.text", "-- a comment"], {"text": "-- a comment"}),
        (["--inner.text="], {"text": ""}),
        (["--inner.texts", "a", "b", "--inner.whole", "2"], {"texts": ("a", "b"), "whole": 2}),
        (["--inner.texts", "[a, b]"], {"texts": ("[a, b]",)}),
        (["--inner.texts=--strange"], {"texts": ("--strange",)}),
        (["--inner.texts"], {"texts": ()}),
        (
            ["--inner.tables", '{name = "a"}', "{size = 2, name = 'b'}"],
            {"tables": ({"name": "a", "size": None}, {"name": "b", "size": 2.0})},
        ),
        (["--inner.tables={name = '--'}"], {"tables": ({"name": "--", "size": None},)}),
        (["--inner.tables"], {"tables": ()}),
    ],
)
def test_words_are_parsed_as_the_option_declares(
    words: list[str], expected: dict[str, Any]
) -> None:
    read = parse_options(Tree, words).inner.model_dump()
    assert {name: read[name] for name in expected} == expected
    assert {name: value for name, value in read.items() if name not in expected} == {
        name: value for name, value in Inner().model_dump().items() if name not in expected
    }


def test_positional_options_take_words_in_turn() -> None:
    assert parse_options(Flat, ["a", "b", "-c", "--count", "3", "d"]) == Flat(
        first=Path("a"), rest=("b", "-c", "d"), count=3
    )
    assert parse_options(Flat, ["--first", "a", "b"]) == Flat(first=Path("a"), rest=("b",))
    assert parse_options(Flat, ["a", "--rest", "b", "c"]) == Flat(first=Path("a"), rest=("b", "c"))


WRONG: list[tuple[str, Any, str]] = [
    ("whole", "many", 'expected a whole number, got "many"'),
    ("whole", 1.5, "expected a whole number, got 1.5"),
    ("whole", True, "expected a whole number, got true"),
    ("whole", 0, "expected a number above 0, got 0"),
    ("whole", 2**60 + 1, f"expected a number of at most {2**60}, got {2**60 + 1}"),
    ("whole", [1], "expected a whole number, got [1]"),
    ("number", "half", 'expected a number, got "half"'),
    ("number", -1, "expected a number of at least 0.0, got -1"),
    ("number", float("inf"), "expected a finite number, got Infinity"),
    ("number", float("nan"), "expected a finite number, got NaN"),
    ("switch", "yes", 'expected true or false, got "yes"'),
    ("switch", 1, "expected true or false, got 1"),
    ("text", 5, "expected text, got 5"),
    ("place", 5, "expected text, got 5"),
    ("choice", "up", "expected 'left' or 'right', got \"up\""),
    ("texts", "one", 'expected a list, got "one"'),
    ("texts", [1], "expected text, got 1"),
    ("tables", {"name": "a"}, 'expected a list, got {"name": "a"}'),
    ("tables", ["a"], 'expected a table, got "a"'),
    ("maybe_whole", "some", 'expected a whole number, got "some"'),
    ("whole", {"a": 1}, 'expected a whole number, got {"a": 1}'),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_a_wrong_value_in_a_recipe_is_reported_with_its_option(
    name: str, value: Any, message: str
) -> None:
    with pytest.raises(UserError) as caught:
        parse_options(Tree, [], {"inner": {name: value}}, "a.toml")
    assert str(caught.value) == f"a.toml: inner.{name}: {message}"


@pytest.mark.parametrize(
    ("name", "word", "message"),
    [
        ("whole", "many", 'expected a whole number, got "many"'),
        ("whole", "1.5", 'expected a whole number, got "1.5"'),
        ("whole", "-1", "expected a number above 0, got -1"),
        ("number", "half", 'expected a number, got "half"'),
        ("number", "inf", "expected a finite number, got Infinity"),
        ("number", "nan", "expected a finite number, got NaN"),
        ("choice", "up", "expected 'left' or 'right', got \"up\""),
    ],
)
def test_a_wrong_value_on_the_command_line_is_reported_with_its_option(
    name: str, word: str, message: str
) -> None:
    with pytest.raises(UserError) as caught:
        parse_options(Tree, [f"--inner.{name}", word], {"inner": {"text": "fine"}}, "a.toml")
    assert str(caught.value) == f"--inner.{name}: {message}"


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"name": 5}, "tables.name: expected text, got 5"),
        ({"name": "a", "size": -1}, "tables.size: expected a number of at least 0.0, got -1"),
        ({"size": 1}, "tables.name: missing; give its name"),
        ({"nmae": "a"}, "tables.nmae: no such option; did you mean inner.tables.name?"),
    ],
)
def test_a_wrong_value_in_a_list_of_tables_is_reported_with_its_key(
    item: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        parse_options(Tree, [], {"inner": {"tables": [{"name": "fine"}, item]}}, "a.toml")
    assert str(caught.value) == f"a.toml: inner.{message}"
    word = "{" + ", ".join(f"{key} = {value!r}" for key, value in item.items()) + "}"
    with pytest.raises(UserError) as caught:
        parse_options(Tree, ["--inner.tables", "{name = 'fine'}", word], {}, "a.toml")
    assert str(caught.value) == f"--inner.{message}"


@pytest.mark.parametrize("section_value", [5, "text", [1], True])
@pytest.mark.parametrize("words", [[], ["--inner.whole", "2"]])
def test_a_section_that_is_not_a_table_is_refused(section_value: Any, words: list[str]) -> None:
    with pytest.raises(UserError, match=r"^a\.toml: inner: expected a section, got "):
        parse_options(Tree, words, {"inner": section_value}, "a.toml")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"inner": {"whoel": 5}}, "a.toml: inner.whoel: no such option; did you mean inner.whole?"),
        ({"iner": {"whole": 5}}, "a.toml: iner: no such option; did you mean inner?"),
        ({"otherpart": {}}, "a.toml: otherpart: no such option; did you mean other_part?"),
        (
            {"inner": {"zzzzz": 5}},
            "a.toml: inner.zzzzz: no such option; --help all lists all options",
        ),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(
    table: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        parse_options(Tree, [], table, "a.toml")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--inner.whoel", "--inner.whoel: no such option; did you mean inner.whole?"),
        (
            "--inner.maybe-wole",
            "--inner.maybe-wole: no such option; did you mean inner.maybe_whole?",
        ),
        ("--maybe_whole", "--maybe_whole: no such option; did you mean inner.maybe_whole?"),
        ("--qqqq=3", "--qqqq: no such option; --help all lists all options"),
        ("--inner.tables.name", "--inner.tables.name: no such option; did you mean inner.tables?"),
        (
            "--inner.tables=a",
            '--inner.tables: expected a table of TOML such as {key = "value"}, got "a"',
        ),
        (
            "--inner.tables={} \nb = 1",
            '--inner.tables: expected a table of TOML such as {key = "value"}, got "{} \\nb = 1"',
        ),
        ("--inner.tables=5", "--inner.tables: expected a table, got 5"),
        ("--inner.whole", "--inner.whole: needs a value"),
        ("--inner.switch=yes", '--inner.switch: expected true or false, got "yes"'),
        ("stray", "unexpected argument 'stray'; options begin with --"),
        ("-x", "unexpected argument '-x'; options begin with --"),
        ("--inner.text=\udcff", "'--inner.text=\\udcff': not UTF-8 text"),
    ],
)
def test_an_unknown_argument_is_refused(word: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_options(Tree, [word])
    assert str(caught.value) == message


def test_tables_are_given_one_by_one_or_as_an_array_of_them() -> None:
    one_by_one = parse_options(Tree, ["--inner.tables", '{name = "a"}', '{name = "b"}'])
    assert [table.name for table in one_by_one.inner.tables] == ["a", "b"]
    for words in (['[{name = "a"}, {name = "b"}]'], ['[{name = "a"}]', '{name = "b"}']):
        assert parse_options(Tree, ["--inner.tables", *words]) == one_by_one
    for wrong, got in (
        ('[{"name": "a"}]', "expected a table of TOML"),
        ("[3]", "expected a table, got 3"),
    ):
        with pytest.raises(UserError, match=rf"^--inner\.tables: {got}"):
            parse_options(Tree, ["--inner.tables", wrong])


def test_a_missing_argument_is_reported_with_its_meaning() -> None:
    with pytest.raises(UserError, match=r"^--first: missing; give what to read$"):
        parse_options(Flat, ["--count", "3"])


def test_a_date_in_a_recipe_is_a_wrong_type_like_another(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[inner]\nwhole = 2024-01-01\n")
    with pytest.raises(
        UserError, match=r'inner\.whole: expected a whole number, got "2024-01-01"$'
    ):
        validate_options(Tree, read_recipe(tmp_path / "a.toml"), "a.toml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such recipe"),
        (b'[inner]\ntext = "caf\xe9"\n', r"not UTF-8 text \(byte 19\)"),
        (b"[inner\n", r"not valid TOML: .*line 1"),
        (b"[inner]\nwhole = 1\nwhole = 2\n", r"not valid TOML: .*line 3"),
    ],
)
def test_a_file_that_is_not_a_recipe_is_refused(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "a.toml").write_bytes(content)
    with pytest.raises(UserError, match=rf"/a\.toml: {message}"):
        read_recipe(tmp_path / "a.toml")


def test_a_folder_as_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Is a directory"):
        read_recipe(tmp_path)


def test_help_gives_type_meaning_and_default_of_each_option() -> None:
    lines = format_help(Tree).splitlines()
    assert "[other_part]  the others" in lines
    assert sum(line.startswith("  --inner.") for line in lines) == len(list(iter_options(Inner)))
    halves = dict(re.split(r" {2,}", line.strip()) for line in lines if line.startswith("  --"))
    assert halves["--inner.whole INT"] == "a whole number (default: 3)"
    assert halves["--inner.switch [true|false]"] == "a switch (default: false)"
    assert halves["--inner.place PATH"] == "a path (default: here)"
    assert halves["--inner.choice left|right"] == "one of two (default: left)"
    assert halves["--inner.texts TEXT …"] == 'some texts (default: ["one"])'
    assert halves["--inner.tables TABLE …"] == "some tables (default: none)"
    below = [
        line.strip()
        for line in lines[
            lines.index(next(line for line in lines if "--inner.tables" in line)) + 1 :
        ]
    ]
    assert [re.sub(" {2,}", ": ", line) for line in below[:2]] == [
        "name TEXT: its name (required)",
        "size NUMBER: its size (default: any)",
    ]
    assert halves["--inner.maybe_number NUMBER"] == "a number or nothing (default: none)"
    assert [line.split()[0] for line in format_help(Flat).splitlines()] == [
        "[--]first",
        "[--]rest",
        "--count",
    ]
    assert "(required)" in format_help(Flat).splitlines()[0]
