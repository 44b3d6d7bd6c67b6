"""The parser for untrusted content refuses everything that is not JSON, for any schema."""

import json
import tracemalloc
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import compile_pattern, parse_json, read_bounded
from tests.conftest import Refusal


class Section(BaseModel):
    name: str = ""


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("schema", [dict[str, Any], dict[str, list[float]], object])
def test_nan_and_infinity_are_refused(number: str, schema: Any) -> None:
    with pytest.raises(
        UserError, match=r"^the file: not valid JSON: .* at line 1 column \d+; copy it again$"
    ):
        parse_json(
            f'{{"values": [0.5, {number}]}}'.encode(), schema, "the file", hint="copy it again"
        )


def test_a_text_may_name_them() -> None:
    assert parse_json(b'{"NaN": "-Infinity"}', dict[str, Any], "the file") == {"NaN": "-Infinity"}


@pytest.mark.parametrize("content", ["[]", "5", "null", '"text"', "[{}]"])
def test_another_kind_of_value_than_an_object_is_refused_in_one_line(content: str) -> None:
    with pytest.raises(UserError, match=r"^the file: expected an object, got "):
        parse_json(content.encode(), Section, "the file")


def test_a_field_of_several_types_is_named_without_them() -> None:
    schema = dict[str, Annotated[int, Field(ge=0)] | list[int]]
    for content in ('{"ids": "x"}', '{"ids": [1, "x"]}'):
        with pytest.raises(UserError, match=r"^a\.json: ids: expected a whole number, got "):
            parse_json(content.encode(), schema, "a.json")
    with pytest.raises(UserError, match=r"^a\.json: int: "):
        parse_json(b'{"int": "x"}', schema, "a.json")


def test_only_where_it_is_allowed_are_they_numbers() -> None:
    assert parse_json(b'{"x": Infinity}', dict[str, Any], "the file", allow_nan=True) == {
        "x": float("inf")
    }


@pytest.mark.parametrize("schema", [list[Any], object, dict[str, Any]])
def test_brackets_count_outside_of_texts_only(schema: Any) -> None:
    quoted = '{"text": "' + '[\\"' * 200_000 + '"}'
    assert len(parse_json(quoted.encode(), dict[str, str], "the file")["text"]) == 400_000
    with pytest.raises(
        UserError, match=r"^the file: not valid JSON: recursion limit exceeded at line 1 column 2"
    ):
        parse_json(b"[" * 10_000 + b"]" * 10_000, schema, "the file")


def test_a_file_beyond_its_bound_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(11))
    assert read_bounded(tmp_path / "a", 11) == bytes(11)
    with pytest.raises(UserError, match="larger than 10 bytes"):
        read_bounded(tmp_path / "a", 10)


def test_a_file_without_end_costs_no_more_memory_than_its_bound(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "a").open("r+b").truncate(2**40)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="larger than 67,108,864 bytes"):
            read_bounded(tmp_path / "a", 2**26)
        assert tracemalloc.get_traced_memory()[1] < 1.6 * 2**26
    finally:
        tracemalloc.stop()


def test_a_device_is_not_read(refused: Refusal) -> None:
    for words in (["pretrain", "/dev/zero"], ["run", "/dev/zero"]):
        assert refused(*words).endswith(": expected a file, got a device")
    assert read_bounded(Path("/dev/null")) == b""


@pytest.mark.parametrize(
    "number",
    ["1e999", "-1e999", "1E+0309", "1" + "0" * 400, "-1" + "0" * 400 + ".0", "9" * 250 + "e99"],
)
@pytest.mark.parametrize("schema", [dict[str, Any], dict[str, list[float]], object])
def test_a_number_beyond_those_of_floats_is_refused_with_its_field(
    number: str, schema: Any
) -> None:
    expected = (
        r"^the file: values\[1\]: expected a finite number, got one beyond ±1.8e\+308; copy it"
        r" again$"
    )
    with pytest.raises(UserError, match=expected):
        parse_json(
            f'{{"values": [0.5, {number}]}}'.encode(), schema, "the file", hint="copy it again"
        )
    text = {"values": number}
    assert parse_json(json.dumps(text).encode(), dict[str, str], "the file") == text


def test_the_largest_and_the_smallest_numbers_of_floats_are_read() -> None:
    numbers = [1.7976931348623157e308, 5e-324, 10**300, 1e-999]
    assert (
        parse_json(
            b"[1.7976931348623157e308, 5e-324, 1%b, 1e-999]" % (b"0" * 300), list[Any], "the file"
        )
        == numbers
    )


def test_a_whole_number_of_hundreds_of_digits_is_refused_where_infinity_is_allowed() -> None:
    with pytest.raises(UserError, match=r"^the file: x: expected a finite number"):
        parse_json(b'{"x": 1%b}' % (b"0" * 400), dict[str, Any], "the file", allow_nan=True)


@pytest.mark.parametrize("pattern", ["(", "x{99999999999}", "(" * 5000 + ")" * 5000, ["a"], None])
def test_a_regular_expression_that_cannot_be_compiled_is_refused_by_field(
    pattern: Any, refused: Refusal
) -> None:
    with pytest.raises(UserError, match=r"^field: not a regular expression: ") as caught:
        compile_pattern(pattern, "field")
    assert len(str(caught.value)) < 300
    if isinstance(pattern, str):
        printed = refused("pretrain", "--optimizer.groups", f'{{pattern = "{pattern}"}}')
        assert printed.startswith("optimizer.groups.pattern: not a regular expression: ")
    assert compile_pattern("a|b", "field").fullmatch("b")
