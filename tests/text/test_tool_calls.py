"""Calls of tools in the text of an answer: each format that templates write, whole and as it comes,
and what is none.
"""

import ast
import json
import random
from typing import Any

import pytest

from lmforge.core.data.tokenizer import Tokenizer, train_tokenizer
from lmforge.core.errors import UserError
from lmforge.text.chat.templates import ChatTemplate
from lmforge.text.chat.tool_calls import (
    FORMATS,
    AnswerReader,
    ToolCall,
    ToolCallFormat,
    tool_call_format,
)
from tests.seeds import fresh_seed
from tests.support.counted_text import CountedText

HERMES, MISTRAL, LLAMA, PYTHONIC = FORMATS
# Of the shapes that models ship: how tools are listed, and how a call is written.
TURNS = """{%% if tools %%}{{ tools | tojson }}{%% endif %%}{%% for m in messages %%}
{%%- if m.role == 'assistant' %%}<|assistant|>{{ m.content }}{%% for call in m.tool_calls or [] %%}%s{%% endfor %%}<|end|>
{%%- else %%}<|user|>{{ m.content }}{%% endif %%}{%% endfor %%}{%% if add_generation_prompt %%}<|assistant|>{%% endif %%}"""
WRITTEN = {
    "hermes": (
        "\n<tool_call>\n{{ {'name': call.function.name, 'arguments': call.function.arguments} |"
        " tojson }}\n</tool_call>"
    ),
    "mistral": (
        "[TOOL_CALLS][{{ {'name': call.function.name, 'arguments': call.function.arguments, 'id':"
        " call.id} | tojson }}]"
    ),
    "mistral of 2025": (
        "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}"
    ),
    "llama": "{{ {'name': call.function.name, 'parameters': call.function.arguments} | tojson }}",
    "pythonic": (
        "[{{ call.function.name }}({% for key, value in call.function.arguments.items() %}{{ key"
        " }}={{ value | tojson }}{% endfor %})]"
    ),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([""], 261)


@pytest.mark.parametrize("name", WRITTEN)
def test_the_format_of_a_template_is_found_by_what_it_renders(
    tokenizer: Tokenizer, name: str
) -> None:
    template = ChatTemplate(tokenizer, TURNS % WRITTEN[name])
    assert tool_call_format(template) is {
        "hermes": HERMES,
        "llama": LLAMA,
        "pythonic": PYTHONIC,
    }.get(name, MISTRAL)


@pytest.mark.parametrize(
    "written", ["call {{ call.function.name }} with {{ call.function.arguments | tojson }}", ""]
)
def test_a_template_that_writes_calls_otherwise_or_not_at_all_is_refused(
    tokenizer: Tokenizer, written: str
) -> None:
    with pytest.raises(UserError, match="tool calls"):
        tool_call_format(ChatTemplate(tokenizer, TURNS % written))


ADD, ASK = ToolCall("add", '{"a": 1, "b": [2, null]}'), ToolCall("ask", '{"q": "é } ; {"}')
SAID_ADD, SAID_ASK = ('{"name": "%s", "%%s": %s}' % call for call in (ADD, ASK))  # noqa: UP031
TWO_BLOCKS = [f"<tool_call>{said % 'arguments'}" for said in (SAID_ADD, SAID_ASK)]
ANSWERS = [
    (HERMES, f"Sure.\n<tool_call>\n{SAID_ADD % 'arguments'}\n</tool_call>", "Sure.", [ADD]),
    # The end of the last may be a stop token.
    (HERMES, "</tool_call>\n".join(TWO_BLOCKS), "", [ADD, ASK]),
    (MISTRAL, f"[TOOL_CALLS][{SAID_ASK % 'arguments'}]", "", [ASK]),
    (MISTRAL, f"[TOOL_CALLS] add[CALL_ID]a1 [ARGS] {ADD.arguments} ", "", [ADD]),
    (
        MISTRAL,
        f"So[TOOL_CALLS]add[ARGS]{ADD.arguments}[TOOL_CALLS]ask{ASK.arguments}",
        "So",
        [ADD, ASK],
    ),
    (LLAMA, f"{SAID_ASK % 'parameters'}; {SAID_ADD % 'parameters'}", "", [ASK, ADD]),
    (LLAMA, f"<|python_tag|>{SAID_ASK % 'parameters'}", "", [ASK]),
    (PYTHONIC, "[add(a=1, b=[2, None]), ask(q='é } ; {')]", "", [ADD, ASK]),
    (PYTHONIC, """[add(a=1, b=[2, None]), ask(q='é } ; {')]  # f'""", "", [ADD, ASK]),
    (PYTHONIC, """[ask(q='é } '"; {")]""", "", [ASK]),
    (PYTHONIC, "[now()]", "", [ToolCall("now", "{}")]),
]
NO_CALLS = [
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>'),
    (HERMES, '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
    (HERMES, '<tool_call>{"name": "add", "arguments": {}}</tool_call> so there'),
    (MISTRAL, "[TOOL_CALLS]"),
    (MISTRAL, "[TOOL_CALLS]add [CALL_ID]a1{}"),
    (MISTRAL, "[TOOL_CALLS]add[ARGS]{} and more"),
    (LLAMA, '{"a": 1}'),
    (LLAMA, '{"name": "f", "parameters": {}} and more'),
    (LLAMA, '{"name": "f", "parameters": {}};; {"name": "f", "parameters": {}}'),
    (PYTHONIC, "[1, 2]"),
    (PYTHONIC, "[]"),
    (PYTHONIC, "[f(1)]"),
    (PYTHONIC, "[f(a=open('x'))]"),
    (PYTHONIC, "[f(a=rF'{x}')]"),
    (PYTHONIC, "[" * 5000),
    (HERMES, "a < b"),
]


@pytest.mark.parametrize(("call_format", "answer", "content", "calls"), ANSWERS)
def test_content_and_calls_are_told_apart(call_format, answer, content, calls) -> None:  # type: ignore[no-untyped-def]
    assert call_format.split(answer) == (content, calls)


@pytest.mark.parametrize(("call_format", "answer"), NO_CALLS)
def test_a_call_that_cannot_be_read_is_text(call_format, answer) -> None:  # type: ignore[no-untyped-def]
    assert call_format.split(answer) == (answer, [])


def test_what_is_read_piece_by_piece_is_what_is_read_whole_and_no_part_of_a_call_is_content() -> (
    None
):
    draw = random.Random(fresh_seed())
    everything = [(form, answer) for form, answer, *_ in ANSWERS] + NO_CALLS
    for call_format, answer in everything:
        for text in (answer, "".join(draw.choice([each, each, ""]) for each in answer[:500])):
            reader, pieces, calls, at = AnswerReader(call_format), [], [], 0
            while at < len(text):
                size = draw.randint(1, 6)
                piece, none = reader.add(text[at : at + size], ended=False)
                assert none == []
                pieces.append(piece)
                at += size
            piece, calls = reader.add("", ended=True)
            content, wanted = call_format.split(text)
            assert calls == wanted
            assert "".join([*pieces, piece]).rstrip() == content.rstrip()
            for call in calls:
                assert isinstance(json.loads(call.arguments), dict)


LONG = [
    "add" + " " * 40,
    " " * 40,
    '{"name": "f"}' * 3,
    '{"name": "f"}; ' * 3,
    "[f(a=1), " * 4,
    "[" * 40,
    "x[ARGS]" * 6,
    "'" * 40,
]


@pytest.mark.parametrize("call_format", FORMATS)
def test_a_parser_goes_through_a_text_a_few_times_however_long_it_is(
    call_format: ToolCallFormat,
) -> None:
    for pump in [*LONG, call_format.marker, f"{call_format.marker}{{}}"]:
        for text in (call_format.marker + pump, call_format.bare + pump, "a" + pump):
            steps = []
            for times in (10, 40):
                CountedText.steps = 0
                call_format.split(CountedText(text[: -len(pump)] + pump * times))
                steps.append(CountedText.steps / times)
            assert steps[1] < 2 * steps[0], (text, steps)


def test_a_string_that_python_reads_in_quadratic_time_is_refused_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed, parse = [], ast.parse
    monkeypatch.setattr(
        ast, "parse", lambda *args, **options: parsed.append(args) or parse(*args, **options)
    )
    for prefix in ("f", "F", "rf", "fR"):
        assert PYTHONIC.split(text := f"[say(a='no', b={prefix}'{'{x}' * 10}')]") == (text, [])
    assert not parsed


class CountingFormat(ToolCallFormat):
    """Counts the characters of the texts in which calls are looked for."""

    def find(self, text: str, *args: Any, **options: Any) -> int:
        CountedText.steps += len(text)
        return super().find(text, *args, **options)


@pytest.mark.parametrize("call_format", FORMATS)
def test_an_answer_that_comes_piece_by_piece_is_gone_through_once(
    call_format: ToolCallFormat,
) -> None:
    counting = CountingFormat(call_format.marker, call_format.bare, call_format.read)
    for begin in (
        "",
        " \n",
        "So.",
        call_format.marker,
        call_format.bare,
        f"So.{call_format.marker}",
    ):
        for pump in ("ab", " ", call_format.marker[:2]):
            CountedText.steps = 0
            reader = AnswerReader(counting)
            for piece in [begin, *[pump] * 300]:
                reader.add(piece, ended=False)
            reader.add("", ended=True)
            assert CountedText.steps < 20 * len(begin + pump * 300), (begin, pump)
