import contextlib
import gzip
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from lmforge.core.data.packing import TokenizedExample
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.errors import UserError
from lmforge.text.chat.conversations import Format, read_conversations
from lmforge.text.chat.example_display import format_example
from lmforge.text.chat.layout import encode_layouts
from lmforge.text.chat.templates import ChatTemplate, build_layouts, one_layout
from lmforge.text.sources.records import UnusableRecords

PAGE = Path(__file__).parents[2] / "docs" / "sft-data.md"
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
TURNS = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "Q"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "QQ"},
    {"role": "assistant", "content": "AA"},
]
FIRST = "<|system|>|S|<|end|>|<|user|>|Q|<|end|>|<|assistant|>[A|<|end|>]<|user|>|Q|Q|<|end|>|<|assistant|>[A|A|<|end|>]"


def write(file: Path, *records: Any) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def shown(path: Path, tokenizer: Tokenizer, **choices: Any) -> list[str]:
    return [
        format_example(example, tokenizer, ansi=False)
        for example in read_conversations(path, tokenizer, **choices)
    ]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": TURNS},
        {
            "conversations": [
                {"from": who, "value": turn["content"]}
                for who, turn in zip(["system", *["human", "gpt"] * 2], TURNS, strict=True)
            ]
        },
        {
            "system": "S",
            "conversations": [
                {"from": who, "value": words}
                for who, words in zip(["user", "model"] * 2, ["Q", "A", "QQ", "AA"], strict=True)
            ],
        },
        {"conversations": TURNS},
        {"instruction": "QQ", "output": "AA", "system": "S", "history": [["Q", "A"]]},
        {
            "instruction": "QQ",
            "input": None,
            "output": "AA",
            "system": "S",
            "history": [["Q", "A"]],
        },
    ],
)
def test_every_format_of_one_conversation_gives_the_same_tokens(
    record: Any, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    assert shown(write(tmp_path / "a.jsonl", record), byte_tokenizer) == [FIRST]


def test_masks_score_every_answer_or_the_last_or_all(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    file = write(tmp_path / "a.jsonl", {"messages": TURNS[1:]})
    bare = "<|user|>|Q|<|end|>|<|assistant|>|A|<|end|>|<|user|>|Q|Q|<|end|>|<|assistant|>"
    assert shown(file, byte_tokenizer, mask="last") == [bare + "[A|A|<|end|>]"]
    assert shown(file, byte_tokenizer, mask="all") == [
        bare.replace("<|user|>|Q|<", "<|user|>[Q|<", 1) + "|A|A|<|end|>]"
    ]


def test_strings_go_as_they_are_and_end_with_the_separator(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    file = write(
        tmp_path / "a.jsonl",
        {"prompt": "a ", "completion": " b"},
        {"prompt": "<|end|>", "completion": ""},
    )
    assert shown(file, byte_tokenizer) == ["a| [ |b|<|endoftext|>]", "<|||e|n|d|||>[<|endoftext|>]"]
    assert shown(file, byte_tokenizer, mask="all")[0] == "a[ | |b|<|endoftext|>]"
    assert shown(write(tmp_path / "b.jsonl", {"text": "abc"}), byte_tokenizer) == [
        "a[b|c|<|endoftext|>]"
    ]


def test_only_the_completion_of_messages_is_scored(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    file = write(
        tmp_path / "a.jsonl",
        {"prompt": TURNS[:4], "completion": TURNS[4:]},
        {"prompt": TURNS[:4], "completion": "AA"},
    )
    assert shown(file, byte_tokenizer) == [FIRST.replace("[A|<|end|>]", "|A|<|end|>|", 1)] * 2


def test_calls_in_sharegpt_are_calls(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    call = {"name": "f", "arguments": {"a": 1}}
    talk = [("human", "Q"), ("function_call", json.dumps(call)), ("observation", "1"), ("gpt", "A")]
    theirs = {
        "conversations": [{"from": who, "value": value} for who, value in talk],
        "tools": '[{"name": "f"}]',
    }
    ours = {
        "messages": [
            {"role": "user", "content": "Q"},
            {"role": "assistant", "tool_calls": [{"function": call}]},
            {"role": "tool", "content": "1"},
            {"role": "assistant", "content": "A"},
        ],
        "tools": [{"name": "f"}],
    }
    [one], [other] = (
        shown(write(tmp_path / name, record), byte_tokenizer)
        for name, record in (("a.json", theirs), ("b.json", ours))
    )
    assert one == other
    assert one.replace("|", "").startswith('<system><tools>↵\n{"name": "f"}↵\n</tools>')


def test_any_kind_of_file_holds_the_same_records(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    records = [
        {"messages": [{"role": "user", "content": "Q" * n}, {"role": "assistant", "content": "é"}]}
        for n in range(1, 6)
    ]
    lines = (
        "\ufeff" + "\n".join(json.dumps(record, ensure_ascii=False) for record in records) + "\n\n"
    )
    (tmp_path / "0.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "1.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "2.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    (tmp_path / "3.json").write_text(json.dumps(records, indent=1))
    (tmp_path / "3.json.gz").write_bytes(gzip.compress(json.dumps(records).encode()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "4.parquet")
    expected = shown(tmp_path / "0.jsonl", byte_tokenizer)
    assert len(expected) == 5
    for file in tmp_path.iterdir():
        assert shown(file, byte_tokenizer) == expected, file
    assert shown(tmp_path, byte_tokenizer) == expected * 6


def test_fields_of_other_names_are_named(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    file = write(tmp_path / "a.jsonl", {"chat": TURNS, "text": "no"})
    assert shown(file, byte_tokenizer, fields={"messages": "chat"}) == [FIRST]
    with pytest.raises(
        UserError, match=r"a\.jsonl, record 1: no field 'talk': there are chat, text"
    ):
        shown(file, byte_tokenizer, fields={"messages": "talk"})


def test_examples_are_arrays_of_ids_and_of_what_is_scored(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    file = write(tmp_path / "a.jsonl", {"prompt": "pp", "completion": "ccc"})
    [example] = read_conversations(file, byte_tokenizer)
    assert (example.tokens.dtype, example.loss_mask.dtype) == (np.int32, bool)
    assert example.loss_mask.tolist() == [False, False, True, True, True, True]


def test_examples_come_in_order_however_many_there_are(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    file = write(tmp_path / "a.jsonl", *({"text": str(number)} for number in range(2500)))
    assert [byte_tokenizer.decode(e.tokens) for e in read_conversations(file, byte_tokenizer)] == [
        str(n) for n in range(2500)
    ]


@pytest.mark.parametrize(
    ("second", "form", "complaint"),
    [
        ({"messages": TURNS[:2]}, "auto", "no assistant turn"),
        ({"messages": []}, "auto", "expected text or a list of messages"),
        ({"messages": [{"role": "bot", "content": "A"}]}, "auto", "message 1: role 'bot'"),
        (
            {"messages": [{"role": "assistant", "tool_calls": 5}]},
            "auto",
            "message 1: tool_calls are not a list but int",
        ),
        (
            {"text": "a"},
            "auto",
            "expected a record of format messages, with 'messages': there are text",
        ),
        ({"messages": TURNS, "tools": "{"}, "auto", "the field 'tools': not valid JSON"),
        ([1], "auto", "a.jsonl:2: expected an object, got [1]"),
        (
            {"messages": [{"from": "me", "value": "A"}]},
            "auto",
            "\"from\" is 'me': expected one of system, human",
        ),
        (
            {"messages": [{"from": ["human"], "value": "A"}]},
            "auto",
            "\"from\" is ['human']: expected one of system, human",
        ),
        (
            {"messages": [{"from": {}, "value": "A"}]},
            "auto",
            '"from" is {}: expected one of system, human',
        ),
        (
            {"messages": TURNS},
            "alpaca",
            "record 1: expected a record of format alpaca, with 'instruction'",
        ),
    ],
)
def test_a_record_that_makes_no_sense_is_named(
    second: Any, form: Format, complaint: str, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    file = write(tmp_path / "a.jsonl", {"messages": TURNS}, second)
    place = "" if "record 1" in complaint or "a.jsonl" in complaint else r"a\.jsonl, record 2: "
    with pytest.raises(UserError, match=place + re.escape(complaint)):
        shown(file, byte_tokenizer, format=form)


@pytest.mark.parametrize("form", ["auto", "alpaca"])
@pytest.mark.parametrize(
    "record",
    [
        {"messages": [{"role": "x" * 5000, "content": "A"}]},
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "x" * 5000, "arguments": "{"}}],
                }
            ]
        },
        {"x" * 5000: 1},
        {f"field {number}": 1 for number in range(999)},
    ],
)
def test_a_message_about_a_record_is_short_whatever_the_record_holds(
    record: dict[str, Any], form: Format, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    with pytest.raises(UserError) as caught:
        shown(write(tmp_path / "a.jsonl", record), byte_tokenizer, format=form)
    assert len(str(caught.value)) < len(str(tmp_path)) + 800


@pytest.mark.parametrize("history", [5, "a", {"a": 1}, True, [5], [["a"]]])
def test_a_history_that_is_no_list_of_turns_is_named(
    history: Any, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    file = write(tmp_path / "a.jsonl", {"instruction": "Q", "output": "A", "history": history})
    with pytest.raises(
        UserError,
        match=r"a\.jsonl, record 1: the field 'history' is not a list of \[question, answer\]$",
    ):
        shown(file, byte_tokenizer)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n{"text": ')
    (tmp_path / "b.json").write_text('[{"text": "a"}')
    (tmp_path / "c.parquet").write_text("PAR1")
    (tmp_path / "d.jsonl").write_bytes(b'{"text": "\xff"}\n')
    (tmp_path / "g.csv").write_text("prompt,completion\na,b\n")
    (tmp_path / "h.csv.gz").write_bytes(gzip.compress(b"prompt,completion\na,b\n"))
    (tmp_path / "e.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    for name, complaint in {
        "a.jsonl": ":3: not valid JSON: EOF",
        "b.json": "a file that begins with [ must be one JSON list of objects",
        "c.parquet": "cannot be read as parquet",
        "d.jsonl": "not UTF-8 at byte 10",
        "e.jsonl": "record 1: the fields answer, question are of no format known",
        "f.jsonl": "no such file or folder",
        "g.csv": ".csv files are not read; convert the records to .jsonl or .parquet",
        "h.csv.gz": ".csv files are not read; convert the records to .jsonl or .parquet",
    }.items():
        with pytest.raises(UserError, match=f"{re.escape(name)}.*{re.escape(complaint)}"):
            shown(tmp_path / name, byte_tokenizer)


# --- as a person reads it -------------------------------------------------------------------------


def test_colours_show_every_token_its_bounds_and_what_is_scored(byte_tokenizer: Tokenizer) -> None:
    ids = [2, *byte_tokenizer.encode("é\n"), 3, *byte_tokenizer.encode("a\x1b[2J"), 4]
    example = TokenizedExample(np.array(ids, np.int32), np.array([False] * 5 + [True] * 6))
    assert (
        format_example(example, byte_tokenizer, ansi=False)
        == "<|user|>||é|↵\n|<|assistant|>[a|\\x1b|[|2|J|<|end|>]"
    )
    terminal = format_example(example, byte_tokenizer)
    assert re.sub(r"\x1b\[[0-9;]*m", "", terminal) == "<|user|>é↵\n<|assistant|>a\\x1b[2J<|end|>"
    shades = re.findall(r"\x1b\[(30;42|30;102|37|90)m", terminal)
    assert [shade for at, shade in enumerate(shades) if at != 4] == [
        "37",
        "90",
        "37",
        "90",
        "37",
        *["30;102", "30;42"] * 3,
    ]
    assert "\x1b[2J" not in terminal


# --- the page -------------------------------------------------------------------------------------


def test_the_examples_of_the_page_are_read_as_it_says(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    from lmforge.text.chat.preferences import (
        read_preference_pairs,
        read_prompts,
        read_unpaired_preferences,
    )

    page = PAGE.read_text(encoding="utf-8")
    blocks = [text for kind, text in FENCED.findall(page) if kind == "json"]
    for number, text in enumerate(blocks[:5]):
        (tmp_path / f"{number}.jsonl").write_text(text, encoding="utf-8")
        assert len(shown(tmp_path / f"{number}.jsonl", byte_tokenizer)) == 1
    (tmp_path / "pairs.jsonl").write_text(blocks[5])
    assert len(list(read_preference_pairs(tmp_path / "pairs.jsonl", byte_tokenizer))) == 2
    labelled, prompt = blocks[6].splitlines()
    (tmp_path / "labelled.jsonl").write_text(labelled)
    assert next(read_unpaired_preferences(tmp_path / "labelled.jsonl", byte_tokenizer)).desirable
    (tmp_path / "prompts.jsonl").write_text(prompt)
    assert next(read_prompts(tmp_path / "prompts.jsonl", byte_tokenizer)).columns == {"answer": "2"}


def test_the_program_of_the_page_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = FENCED.findall(PAGE.read_text(encoding="utf-8"))
    [program] = [text for kind, text in blocks if kind == "python"]
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program, {})
    assert printed.getvalue() == blocks[-1][1]
    template = next(text for kind, text in blocks if kind == "text").strip()
    messages = [("system", "Be brief."), ("user", "Who are you?"), ("assistant", "A model.")]
    from lmforge.core.data.tokenizer import train_tokenizer

    tokenizer = train_tokenizer([""], 261)
    chat = ChatTemplate.from_tokenizer(tokenizer)
    [built] = build_layouts(
        [chat.chat_example([{"role": role, "content": text} for role, text in messages])]
    )
    [example] = encode_layouts(tokenizer, [one_layout(built)])
    assert tokenizer.decode(example.tokens.tolist(), include_special_tokens=True) == template


def test_records_that_cannot_be_used_are_left_out_with_their_places(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    """In a line, in a record's format, in what the template refuses: the others are as they are
    without these.
    """
    lines = [json.dumps({"messages": TURNS[: 2 * number + 1]}) for number in (1, 0, 2)]
    lines = [
        lines[0],
        "{",
        lines[1],
        '["a"]',
        '{"messages": "a"}',
        lines[2],
        '{"a": "\xff"}',
        "[1]",
    ]
    (tmp_path / "a.jsonl").write_bytes("\n".join(lines).encode("latin-1"))
    unusable = UnusableRecords(skip=True)
    kept = shown(tmp_path / "a.jsonl", byte_tokenizer, unusable=unusable)
    assert kept == shown(
        write(tmp_path / "b.jsonl", {"messages": TURNS[:3]}, {"messages": TURNS}), byte_tokenizer
    )
    places = [
        re.sub(r"^.*/a\.jsonl(:\d+|, record \d+)?.*", r"\1", problem)
        for problem in unusable.problems
    ]
    # With the byte, where it is not UTF-8.
    assert places == [":2", ", record 3", ":4", ", record 5", "", ":8"]
    (tmp_path / "c.json").write_text(json.dumps([{"messages": TURNS}, 1, {"messages": TURNS}]))
    unusable = UnusableRecords(skip=True)
    assert len(shown(tmp_path / "c.json", byte_tokenizer, unusable=unusable)) == 2
    assert unusable.problems[0].startswith(f"{tmp_path}/c.json, record 2: not an object")


@pytest.mark.parametrize("lstrip", [False, True])
def test_special_tokens_in_plain_text_are_counted_or_parsed_as_transformers_does(
    lstrip: bool, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = with_blanks_taken_in(tmp_path, lstrip)
    text = "<|user|>Who \n<|end|> <|assistant|>\nMe<|end|> and<|endoftext|>"
    file, counts = (
        write(tmp_path / "a.jsonl", {"text": text}, {"text": "no markers"}),
        UnusableRecords(),
    )
    read = list(read_conversations(file, tokenizer, unusable=counts))
    assert counts.with_special_text == 1
    parsed = list(read_conversations(file, tokenizer, unusable=counts, parse_special_tokens=True))
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "tokenizer"))
    assert parsed[0].tokens.tolist() == theirs(text)["input_ids"]
    assert len(read[0].tokens) > len(parsed[0].tokens)
    assert parsed[1].tokens.tolist() == read[1].tokens.tolist()
    sides = {"prompt": "<|user|>Q<|end|>", "completion": "<|assistant|>A<|end|>"}
    [example] = read_conversations(
        write(tmp_path / "b.jsonl", sides), tokenizer, parse_special_tokens=True
    )
    assert (
        example.tokens[example.loss_mask].tolist()
        == theirs(sides["completion"] + "<|endoftext|>")["input_ids"]
    )


def with_blanks_taken_in(folder: Path, lstrip: bool) -> Tokenizer:
    """A tokenizer whose special tokens take in the blanks around them, or not."""
    from lmforge.core.data.tokenizer import byte_tokenizer

    byte_tokenizer().save(folder / "tokenizer")
    path = folder / "tokenizer" / "tokenizer.json"
    table = json.loads(path.read_text())
    for token in table["added_tokens"]:
        token |= {"lstrip": lstrip, "rstrip": lstrip and token["content"] == "<|end|>"}
    path.write_text(json.dumps(table))
    return Tokenizer.open(path)
