"""Ids that are appended turn by turn are those of the whole conversation, as transformers renders
it, or the check refuses.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from lmforge.core.data.tokenizer import Tokenizer, train_tokenizer
from lmforge.core.errors import UserError
from lmforge.post.environments.appending import TurnEncoder, tool_message
from lmforge.post.environments.tool_schema import tool_schema
from tests.post.environments.chat_templates import SHAPES
from tests.seeds import fresh_random

WORDS = ["two", "é", "日本", "\n", "<b>", "'s", '"', "12", "</tool_response>", "{", "x y"]


def add(a: int, b: str = "") -> int:
    """Adds.

    Args:
        a: one
        b: another
    """
    return a


def look(word: str) -> str:
    """Looks it up.

    Args:
        word: the word
    """
    return word


TOOLS = [tool_schema(add), tool_schema(look)]


def saved(folder: Path, name: str) -> Path:
    """A byte-level tokenizer without merges: an id says nothing of what is beside it."""
    shape, tokenizer = SHAPES[name], train_tokenizer([""], 261)._backend
    tokenizer.add_special_tokens(shape.specials)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": shape.specials[0],
        "eos_token": shape.specials[-1],
        "chat_template": shape.source,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config})
    )
    return folder


def words(draw: random.Random, specials: list[str]) -> str:
    """What a template that trims leaves as it is, which may spell a special token."""
    return "a" + "".join(draw.choice([*WORDS, *specials]) for _ in range(draw.randint(0, 6))) + "z"


def answer(draw: random.Random, encoder: TurnEncoder, calls: bool, number: int) -> dict[str, Any]:
    if not calls:
        return {"role": "assistant", "content": words(draw, [])}
    functions = [
        {"name": "add", "arguments": {"a": 5, "b": words(draw, [])}},
        {"name": "look", "arguments": {"word": "é"}},
    ]
    count = draw.randint(1, 2) if encoder.can_call_twice else 1
    called = [
        {"id": f"call{number:03d}{at:02d}", "type": "function", "function": functions[at]}
        for at in range(count)
    ]
    return {"role": "assistant", "content": "", "tool_calls": called}


def conversation(
    draw: random.Random, encoder: TurnEncoder, kinds: tuple[str, ...], specials: list[str]
) -> list[list[Any]]:
    """Five turns: [answer, its reply] each, after the prompt."""
    turns: list[list[Any]] = [[{"role": "user", "content": words(draw, specials)}]]
    for number in range(5):
        kind = draw.choice(kinds)
        said = answer(draw, encoder, kind == "tool", number)
        if kind == "tool":
            turns.append(
                [said, *(tool_message(call, words(draw, specials)) for call in said["tool_calls"])]
            )
        else:
            turns.append([said, {"role": "user", "content": words(draw, specials)}])
    return turns


def sampled(encoder: TurnEncoder, messages: list[Any]) -> list[int]:
    """The last answer, as the template writes it."""
    return encoder._split_last(messages)[1]


WITH_TOOLS = [
    name for name, shape in SHAPES.items() if "tool" in sum(shape.kinds + shape.refused, ())
]
CHECKED = [(name, kinds) for name, shape in SHAPES.items() for kinds in shape.kinds]
REFUSED = [(name, kinds) for name, shape in SHAPES.items() for kinds in shape.refused]


def test_there_are_ten_shapes_and_each_is_checked_or_refused() -> None:
    assert len(SHAPES) == 10
    assert {name for name, _ in CHECKED + REFUSED} == SHAPES.keys()


@pytest.mark.parametrize(("name", "kinds"), CHECKED)
def test_appended_ids_are_those_of_the_whole_over_five_turns(
    tmp_path: Path, name: str, kinds: tuple[str, ...]
) -> None:
    folder, draw = saved(tmp_path / "tokenizer", name), fresh_random()
    tools = TOOLS if "tool" in kinds else []
    encoder = TurnEncoder(Tokenizer.open(folder), tools)
    encoder.check(kinds)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    for _ in range(3):
        begin, *turns = conversation(draw, encoder, kinds, [])
        ids, messages = encoder.encode_prompt(begin), list(begin)
        for number, (said, *reply) in enumerate(turns):
            now = sampled(encoder, [*messages, said, *reply])
            assert now[-1] in encoder.turn_end_ids
            read = encoder.read_answer(now, number, ended=True)
            assert read == said
            ids += now + encoder.encode_reply(read, reply)
            messages += [said, *reply]
        whole = theirs.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=True
        )
        assert ids == list(whole["input_ids"])


@pytest.mark.parametrize("name", ["Qwen 2.5", "Llama 3.1", "Mistral of 2025"])
def test_what_an_environment_says_never_becomes_a_special_token(tmp_path: Path, name: str) -> None:
    tokenizer = Tokenizer.open(saved(tmp_path / "tokenizer", name))
    encoder, draw, specials = TurnEncoder(tokenizer, TOOLS), fresh_random(), SHAPES[name].specials
    encoder.check(("tool",))
    said = answer(draw, encoder, True, 0)
    counts = set()
    for _ in range(20):
        reply = [tool_message(call, words(draw, specials)) for call in said["tool_calls"]]
        ids = encoder.encode_reply(said, reply)
        counts.add(sum(id in tokenizer.all_special_ids for id in ids))
    assert len(counts) == 1


@pytest.mark.parametrize(("name", "kinds"), REFUSED)
def test_a_template_that_writes_turns_otherwise_later_is_refused(
    tmp_path: Path, name: str, kinds: tuple[str, ...]
) -> None:
    encoder = TurnEncoder(
        Tokenizer.open(saved(tmp_path / "tokenizer", name)), TOOLS if "tool" in kinds else []
    )
    with pytest.raises(
        UserError,
        match=r"cannot be appended .*shortest conversation: (system, )?user, assistant.*; use a",
    ) as refused:
        encoder.check(kinds)
    assert "\n" not in str(refused.value)
    # The shortest: a reply to one answer shows it.
    assert str(refused.value).partition("shortest conversation: ")[2].count("assistant") == 1


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_the_call_of_an_only_answer_is_read_with_every_template_that_knows_tools(
    tmp_path: Path, name: str
) -> None:
    encoder, draw = (
        TurnEncoder(Tokenizer.open(saved(tmp_path / "tokenizer", name)), TOOLS),
        fresh_random(),
    )
    encoder.check(("tool", "user"), max_turns=1)
    said = answer(draw, encoder, True, 0)
    ids = sampled(encoder, [{"role": "user", "content": "a"}, said])
    assert ids[-1] in encoder.turn_end_ids
    assert encoder.read_answer(ids, 0, ended=True)["tool_calls"] == said["tool_calls"]


def test_roles_that_no_reply_can_have_are_refused_and_without_tools_nobody_need_answer_one(
    tmp_path: Path,
) -> None:
    encoder = TurnEncoder(Tokenizer.open(saved(tmp_path / "tokenizer", "Gemma")), [])
    encoder.check(("tool", "user"))
    with pytest.raises(
        UserError, match=r"reply_roles: expected tool, user or both, got \('user', 'assistant'\)"
    ):
        encoder.check(("user", "assistant"))


@pytest.mark.parametrize("name", ["Gemma", "Phi"])
def test_a_template_without_tools_is_refused_for_an_environment_with_tools(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(UserError, match="tool"):
        TurnEncoder(Tokenizer.open(saved(tmp_path / "tokenizer", name)), TOOLS)


def test_lmforges_own_template_passes_and_a_malformed_call_is_content(
    byte_tokenizer: Tokenizer,
) -> None:
    encoder = TurnEncoder(byte_tokenizer, TOOLS)
    encoder.check(("tool", "user"))
    assert encoder.can_call_twice
    end = sorted(encoder.turn_end_ids)[0]
    for arguments in ('{"a": }', r'{"a": "\ud800"}', '{"a": 1e999}'):
        malformed = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
        ids = byte_tokenizer.encode(malformed)
        assert encoder.read_answer([*ids, end], 0, ended=True) == {
            "role": "assistant",
            "content": malformed,
        }
    # A call that was cut is none.
    right = byte_tokenizer.encode('<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>')
    assert "tool_calls" in encoder.read_answer([*right, end], 0, ended=True)
    assert "tool_calls" not in encoder.read_answer(right, 0, ended=False)
