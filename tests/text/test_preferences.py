import json
import re
from pathlib import Path
from typing import Any

import pytest

from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.errors import UserError
from lmforge.text.chat.example_display import format_example
from lmforge.text.chat.preferences import (
    PromptCounts,
    read_preference_pairs,
    read_prompts,
    read_unpaired_preferences,
)
from lmforge.text.sources.records import UnusableRecords

USER, GOOD, BAD = (
    {"role": role, "content": words}
    for role, words in (("user", "Q"), ("assistant", "G"), ("assistant", "B"))
)
SYSTEM = {"role": "system", "content": "S"}
AS_TURNS = [
    "<|user|>|Q|<|end|>|<|assistant|>[G|<|end|>]",
    "<|user|>|Q|<|end|>|<|assistant|>[B|<|end|>]",
]
AS_TEXT = ["Q[G|<|endoftext|>]", "Q[B|<|endoftext|>]"]


def write(file: Path, *records: Any) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def sides(file: Path, tokenizer: Tokenizer, **choices: Any) -> list[list[str]]:
    pairs = read_preference_pairs(file, tokenizer, **choices)
    return [
        [format_example(side, tokenizer, ansi=False) for side in (pair.chosen, pair.rejected)]
        for pair in pairs
    ]


@pytest.mark.parametrize(
    ("record", "choices", "expected"),
    [
        ({"prompt": "Q", "chosen": "G", "rejected": "B"}, {}, AS_TEXT),
        ({"prompt": "Q", "chosen": "G", "rejected": "B"}, {"apply_chat_template": True}, AS_TURNS),
        ({"prompt": [USER], "chosen": "G", "rejected": "B"}, {}, AS_TURNS),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, {}, AS_TURNS),
        ({"prompt": "Q", "chosen": [GOOD], "rejected": [BAD]}, {}, AS_TURNS),
        ({"prompt": "Q", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}, AS_TURNS),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}, AS_TURNS),
        (
            {"q": "Q", "good": "G", "bad": "B"},
            {"fields": {"prompt": "q", "chosen": "good", "rejected": "bad"}},
            AS_TEXT,
        ),
        (
            {
                "chosen": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "G"}],
                "rejected": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "B"}],
            },
            {},
            AS_TURNS,
        ),
    ],
)
def test_every_form_of_a_pair_scores_the_answers_and_never_the_prompt(
    record: Any,
    choices: dict[str, Any],
    expected: list[str],
    tmp_path: Path,
    byte_tokenizer: Tokenizer,
) -> None:
    assert sides(write(tmp_path / "a.jsonl", record), byte_tokenizer, **choices) == [expected]


def test_the_turns_that_both_sides_begin_with_are_their_prompt(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    shared = [USER, GOOD, USER]
    file = write(
        tmp_path / "a.jsonl", {"chosen": [*shared, GOOD, USER, BAD], "rejected": [*shared, BAD]}
    )
    before = "<|user|>|Q|<|end|>|<|assistant|>|G|<|end|>|<|user|>|Q|<|end|>|<|assistant|>"
    [[chosen, rejected]] = sides(file, byte_tokenizer)
    assert chosen == before + "[G|<|end|>]" + AS_TURNS[1]
    assert rejected == before + "[B|<|end|>]"


def test_texts_that_are_conversations_are_cut_before_the_last_answer(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    start = "\n\nHuman: Q\n\nAssistant: I\n\nHuman: Q\n\nAssistant:"
    file = write(tmp_path / "a.jsonl", {"chosen": start + " I G", "rejected": start + " I B"})
    [[chosen, _]] = sides(file, byte_tokenizer)
    assert chosen.endswith("n|t|:[ |I| |G|<|endoftext|>]")


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ({"chosen": [USER, GOOD], "rejected": [BAD]}, "must have the same turns before"),
        ({"chosen": [USER, GOOD], "rejected": [USER]}, "must have the same turns before"),
        (
            {
                "chosen": [USER, GOOD, USER],
                "rejected": [USER, GOOD, {"role": "user", "content": "R"}],
            },
            "must have the same turns before",
        ),
        ({"chosen": "G", "rejected": "B"}, "no prompt: expected a field 'prompt'"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "no field 'prompt'"),
        ({"prompt": "Q", "chosen": "G"}, "no field 'rejected': there are chosen, prompt"),
        ({"prompt": "", "chosen": "G", "rejected": "B"}, "the prompt is empty"),
        ({"prompt": "Q", "chosen": 1, "rejected": 2}, "expected text or a list of messages, not 1"),
        (
            {"prompt": "R", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            "the prompt is not in chosen and rejected",
        ),
        (
            {"prompt": [SYSTEM, USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            "the prompt is not in chosen and rejected",
        ),
        (
            {"prompt": [USER], "chosen": [USER, GOOD], "rejected": "B"},
            "does not begin with the assistant's turn",
        ),
        ({"prompt": "Q", "chosen": [], "rejected": [BAD]}, "expected text or a list of messages"),
    ],
)
def test_a_pair_without_a_preference_is_named(
    record: Any, complaint: str, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    file = write(tmp_path / "a.jsonl", {"prompt": "Q", "chosen": "G", "rejected": "B"}, record)
    with pytest.raises(UserError, match=r"a\.jsonl, record 2: .*" + re.escape(complaint)):
        sides(file, byte_tokenizer)


@pytest.mark.parametrize(
    "equal",
    [{"prompt": "Q", "chosen": "G", "rejected": "G"}, {"chosen": [USER], "rejected": [USER]}],
)
def test_a_pair_of_equal_sides_is_left_out_and_named(
    equal: Any, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    pair, unusable = {"prompt": "Q", "chosen": "G", "rejected": "B"}, UnusableRecords()
    file = write(tmp_path / "a.jsonl", pair, equal, pair)
    assert len(list(read_preference_pairs(file, byte_tokenizer, unusable=unusable))) == 2
    assert unusable.problems == [
        f"{file}, record 2: chosen and rejected are equal: there is nothing to prefer"
    ]


@pytest.mark.parametrize("margin", ["1" + "0" * 400, "-1" + "0" * 4000, '"1"', "true", "[1]"])
def test_a_margin_that_is_no_number_is_named(
    margin: str, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"prompt": "Q", "chosen": "G", "rejected": "B", "margin": {margin}}}\n')
    with pytest.raises(
        UserError,
        match=(
            r"a\.jsonl(, record 1: the margin is .*: expected a number$|:1: margin: expected a"
            r" finite number)"
        ),
    ) as caught:
        list(read_preference_pairs(file, byte_tokenizer, with_margins=True))
    assert len(str(caught.value)) < len(str(tmp_path)) + 200


def test_labels_go_with_their_answers(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    records = [
        {"prompt": "Q", "completion": "G", "label": True},
        {"prompt": [USER], "completion": [BAD], "label": 0},
    ]
    good, bad = read_unpaired_preferences(write(tmp_path / "a.jsonl", *records), byte_tokenizer)
    assert (good.desirable, format_example(good.example, byte_tokenizer, ansi=False)) == (
        True,
        AS_TEXT[0],
    )
    assert (bad.desirable, format_example(bad.example, byte_tokenizer, ansi=False)) == (
        False,
        AS_TURNS[1],
    )
    for label in ("true", 2, None, "x" * 5000):
        with pytest.raises(
            UserError, match=r"record 1: the label is .{,200}expected true or false$"
        ):
            list(
                read_unpaired_preferences(
                    write(tmp_path / "a.jsonl", {**records[0], "label": label}), byte_tokenizer
                )
            )


def test_a_system_prompt_beside_a_prompt_is_in_it_and_has_no_place_beside_text(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    file = write(
        tmp_path / "a.jsonl",
        {"prompt": [USER], "system": "S"},
        {"messages": [USER, GOOD], "system": "S"},
    )
    assert [prompt.prompt for prompt in read_prompts(file, byte_tokenizer)] == [[SYSTEM, USER]] * 2
    for beside in ({"system": "S"}, {"tools": [{"function": {"name": "look"}}]}):
        with pytest.raises(
            UserError,
            match=f"the field '{next(iter(beside))}' has no place in a prompt that is text",
        ):
            list(
                read_prompts(write(tmp_path / "a.jsonl", {"prompt": "Q", **beside}), byte_tokenizer)
            )


def test_a_prompt_ends_where_its_answer_begins_and_keeps_its_other_columns(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    records = [
        {"prompt": "Q", "answer": 1},
        {"prompt": [USER], "answer": 2},
        {"messages": [USER, GOOD], "answer": 3},
    ]
    file = write(tmp_path / "a.jsonl", *records)
    prompts = list(read_prompts(file, byte_tokenizer))
    said = [byte_tokenizer.decode(prompt.tokens, include_special_tokens=True) for prompt in prompts]
    assert said == ["Q", *["<|user|>Q<|end|><|assistant|>"] * 2]
    assert [prompt.columns for prompt in prompts] == [{"answer": 1}, {"answer": 2}, {"answer": 3}]
    assert [prompt.prompt for prompt in prompts] == ["Q", [USER], [USER]]
    [first, *_] = read_prompts(file, byte_tokenizer, apply_chat_template=True)
    assert byte_tokenizer.decode(first.tokens, include_special_tokens=True) == said[1]
    tally = PromptCounts()
    assert len(list(read_prompts(file, byte_tokenizer, max_prompt_length=3, counts=tally))) == 1
    assert tally == PromptCounts(records=3, kept=1, overlong=2)
    with pytest.raises(UserError, match="record 1: no field 'prompt': there are q"):
        list(read_prompts(write(tmp_path / "b.jsonl", {"q": "Q"}), byte_tokenizer))
