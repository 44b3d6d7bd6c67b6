"""Records of parquet are those of the JSON lines that the table was made of, but for what Arrow
cannot hold.
"""

import datetime
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.errors import UserError
from lmforge.text.chat.conversations import read_conversations
from lmforge.text.chat.preferences import read_preference_pairs, read_prompts
from lmforge.text.sources.records import read_records

datasets = pytest.importorskip("datasets")

NAMES = ("city", "unit", "limit", "b")
NO_JSON = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5).map(
    "w{}".format
)


def values(depth: int) -> st.SearchStrategy[st.SearchStrategy[Any]]:
    """Strategies for the values of one field of all records: of one type, which may be null or have
    fields left out.
    """
    numbers = st.integers(-(2**40), 2**40), st.integers(-80, 80).map(lambda eighths: eighths / 8)
    scalars = st.sampled_from([st.booleans(), *numbers, st.one_of(numbers), NO_JSON, st.none()])
    if not depth:
        return scalars
    inner = values(depth - 1)
    lists = inner.map(lambda items: st.lists(st.one_of(items, st.none()), max_size=3))
    structs = st.dictionaries(st.sampled_from(NAMES), inner, min_size=1).map(
        lambda fields: st.fixed_dictionaries(
            {}, optional={name: st.one_of(each, st.none()) for name, each in fields.items()}
        )
    )
    return st.one_of(scalars, lists, structs)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Records with a call of a tool, whose arguments and schema are of any shape that Arrow has a
    type for.
    """
    arguments, properties, field = draw(values(3)), draw(values(3)), draw(values(2))
    shape = st.fixed_dictionaries({"b": arguments}, optional={"c": arguments, "a": NO_JSON})
    records = []
    for _ in range(draw(st.integers(1, 4))):
        call = {"function": {"name": "look", "arguments": draw(shape)}}
        turns = [
            {"role": "user", "content": "Q"},
            {"role": "assistant", "content": draw(NO_JSON), "tool_calls": [call]},
            {"role": "tool", "content": "R"},
            {"role": "assistant", "content": "A"},
        ]
        tool = {
            "type": "function",
            "function": {"name": "look", "parameters": {"type": "object", "p": draw(properties)}},
        }
        records.append(
            {
                "messages": turns,
                "tools": draw(st.sampled_from([[tool], None])),
                "answer": draw(field),
            }
        )
    return records


def after_arrow(value: Any, feature: Any) -> Any:
    """What is left of a value in a column: fields in the schema's order, without nulls, and
    fractions where there is one.
    """
    if value is None or isinstance(feature, datasets.Json):
        return value
    if isinstance(feature, dict):
        return {
            name: after_arrow(value[name], each)
            for name, each in feature.items()
            if value.get(name) is not None
        }
    if isinstance(feature, datasets.List):
        return [after_arrow(item, feature.feature) for item in value]
    return float(value) if feature.dtype.startswith("float") else value


@pytest.mark.slow
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(records=conversations(), on_mixed_types=st.sampled_from([None, "use_json"]))
def test_ids_of_parquet_are_those_of_the_json_lines_after_arrows_losses(
    records: list[dict[str, Any]], on_mixed_types: Any, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    table = datasets.Dataset.from_list(records, on_mixed_types=on_mixed_types)
    parquet, lines = tmp_path / "a.parquet", tmp_path / "a.jsonl"
    try:
        table.to_parquet(parquet)
    except pyarrow.ArrowNotImplementedError:  # it can write no column of empty objects
        return
    kept = [
        {name: after_arrow(each[name], feature) for name, feature in table.features.items()}
        for each in records
    ]
    lines.write_text("".join(json.dumps(record) + "\n" for record in kept))
    found = [record for _, record in read_records(parquet)]
    assert json.dumps(found) == json.dumps(kept)  # with the order of keys, and 1 apart from 1.0
    ids = [
        [example.tokens.tolist() for example in read_conversations(file, byte_tokenizer)]
        for file in (parquet, lines)
    ]
    assert ids[0] == ids[1]


CALLS = [{"city": "Rome"}, {"a": 1, "b": None}, {"b": [None, {"c": None}]}]


def test_arguments_have_no_fields_of_other_records(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    def record(arguments: dict[str, Any]) -> dict[str, Any]:
        call = {"function": {"name": "look", "arguments": arguments}}
        return {
            "messages": [
                {"role": "user", "content": "Q"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
            ]
        }

    datasets.Dataset.from_list([record(each) for each in CALLS]).to_parquet(tmp_path / "a.parquet")
    texts = [
        byte_tokenizer.decode(example.tokens)
        for example in read_conversations(tmp_path / "a.parquet", byte_tokenizer)
    ]
    for text, arguments in zip(
        texts, ['{"city": "Rome"}', '{"a": 1}', '{"b": [null, {}]}'], strict=True
    ):
        assert f'"arguments": {arguments}}}' in text


@pytest.mark.parametrize("nested", [False, True])
def test_columns_of_the_json_type_are_exact(nested: bool, tmp_path: Path) -> None:
    values = [[each] for each in CALLS] if nested else CALLS
    feature = datasets.List(datasets.Json()) if nested else datasets.Json()
    table = datasets.Dataset.from_list(
        [{"x": each} for each in values], features=datasets.Features({"x": feature})
    )
    table.to_parquet(tmp_path / "a.parquet")
    assert (
        [record["x"] for _, record in read_records(tmp_path / "a.parquet")]
        == values
        == list(table["x"])
    )


def test_types_that_json_lacks_become_its_own(tmp_path: Path) -> None:
    columns = {
        "map": pyarrow.array(
            [[("k", {"a": 1, "b": None})]],
            pyarrow.map_("string", pyarrow.struct({"a": "int8", "b": "int8"})),
        ),
        "time": pyarrow.array([datetime.datetime(2024, 1, 2, 3)], pyarrow.timestamp("us")),
        "date": pyarrow.array([datetime.date(2024, 1, 2)]),
        "price": pyarrow.array(["1.5"]).cast(pyarrow.decimal128(5, 2)),
        "bytes": pyarrow.array([["é".encode(), None]], pyarrow.list_(pyarrow.binary())),
        "fixed": pyarrow.array([b"abcd"], pyarrow.binary(4)),
        "view": pyarrow.array([b"a"], pyarrow.binary_view()),
        "id": pyarrow.array([b"a" * 16], pyarrow.uuid()),
        "word": pyarrow.array(["a"]).dictionary_encode(),
        "text": pyarrow.array(['{"a": null}'], pyarrow.json_()),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    [(_, record)] = read_records(tmp_path / "a.parquet")
    assert record == {
        "map": {"k": {"a": 1}},
        "time": "2024-01-02T03:00:00",
        "date": "2024-01-02",
        "price": 1.5,
        "bytes": ["é", None],
        "fixed": "abcd",
        "view": "a",
        "id": "61616161-6161-6161-6161-616161616161",
        "word": "a",
        "text": {"a": None},
    }
    assert json.dumps(record)


def test_messages_tools_and_calls_may_be_json_text_at_every_depth(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    function = {"name": "look", "arguments": {"city": "Rome", "b": None}}
    schema = {
        "name": "look",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
    question = {"role": "user", "content": "[1, 2]"}

    def record(depth: int) -> dict[str, Any]:
        """Whatever is in so many lists and objects is JSON text."""

        def text(value: Any, at: int) -> Any:
            return json.dumps(value) if at == depth else value

        call = text({"type": "function", "function": text(function, 4)}, 3)
        answer = {"role": "assistant", "content": "", "tool_calls": text([call], 2)}
        tool = text(
            {
                "type": "function",
                "function": text(schema | {"parameters": text(schema["parameters"], 4)}, 3),
            },
            1,
        )
        return {
            "messages": text([text(each, 1) for each in (question, answer)], 0),
            "tools": text([tool], 0),
        }

    ids = []
    for depth in range(6):
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist([record(depth)]), tmp_path / "a.parquet"
        )
        (tmp_path / "a.jsonl").write_text(json.dumps(record(depth)) + "\n")
        for file in ("a.parquet", "a.jsonl") if depth < 5 else ("a.jsonl",):
            [example] = read_conversations(tmp_path / file, byte_tokenizer)
            ids.append(byte_tokenizer.decode(example.tokens.tolist()))
    # Without JSON text Arrow has no null in an object.
    assert '"arguments": {"city": "Rome", "b": null}}' in ids[-1]
    assert {*ids} == {ids[-1]}


def test_prompts_and_sides_of_pairs_may_be_json_text(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    question, answer = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
    sides = {"chosen": [question, answer], "rejected": [question, answer | {"content": "B"}]}

    def write(record: dict[str, Any]) -> Path:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "a.parquet")
        return tmp_path / "a.parquet"

    texts = {name: json.dumps(side) for name, side in sides.items()}
    pairs = [
        next(read_preference_pairs(write(record), byte_tokenizer)) for record in (sides, texts)
    ]
    assert [pair.chosen.tokens.tolist() for pair in pairs] == [pairs[0].chosen.tokens.tolist()] * 2
    prompts = [
        next(read_prompts(write({"prompt": each}), byte_tokenizer))
        for each in ([question], json.dumps([question]))
    ]
    assert [prompt.prompt for prompt in prompts] == [[question]] * 2
    # Text that is no list of messages is text.
    assert (
        next(read_prompts(write({"prompt": '[{"a": 1}]'}), byte_tokenizer)).prompt == '[{"a": 1}]'
    )


def test_json_of_a_column_that_is_none_is_named(tmp_path: Path) -> None:
    broken = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array(["1", "{"]))
    pyarrow.parquet.write_table(pyarrow.table({"x": broken}), tmp_path / "a.parquet")
    with pytest.raises(
        UserError, match=r"a\.parquet, row 2: a value of a JSON column: not valid JSON"
    ):
        list(read_records(tmp_path / "a.parquet"))


def test_a_column_that_is_null_is_no_field(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    datasets.Dataset.from_list([{"messages": turns, "text": None}]).to_parquet(
        tmp_path / "a.parquet"
    )
    datasets.Dataset.from_list([{"messages": None, "text": "abc"}]).to_parquet(
        tmp_path / "b.parquet"
    )
    sides = {"chosen": [*turns], "rejected": [turns[0], {"role": "assistant", "content": "B"}]}
    datasets.Dataset.from_list([{"prompt": None, **sides}]).to_parquet(tmp_path / "c.parquet")
    datasets.Dataset.from_list([{"prompt": None, "messages": turns}]).to_parquet(
        tmp_path / "d.parquet"
    )
    assert len(list(read_conversations(tmp_path / "a.parquet", byte_tokenizer))) == 1
    assert len(list(read_conversations(tmp_path / "b.parquet", byte_tokenizer))) == 1
    assert len(list(read_preference_pairs(tmp_path / "c.parquet", byte_tokenizer))) == 1
    assert len(list(read_prompts(tmp_path / "d.parquet", byte_tokenizer))) == 1
