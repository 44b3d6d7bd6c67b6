"""Calls of tools in the text of an answer: each format that templates write, whole and as it comes, and what is none."""

import json
import random

import pytest

from lmforge.data.chat.templates import ChatTemplate
from lmforge.data.chat.tool_calls import FORMATS, AnswerReader, ToolCall, tool_call_format
from lmforge.data.tokenizer import Tokenizer, train_tokenizer
from lmforge.errors import UserError
from tests.seeds import fresh_seed

HERMES, MISTRAL, LLAMA, PYTHONIC = FORMATS
# Of the shapes that models ship: how tools are listed, and how a call is written.
TURNS = """{%% if tools %%}{{ tools | tojson }}{%% endif %%}{%% for m in messages %%}
{%%- if m.role == 'assistant' %%}<|assistant|>{{ m.content }}{%% for call in m.tool_calls or [] %%}%s{%% endfor %%}<|end|>
{%%- else %%}<|user|>{{ m.content }}{%% endif %%}{%% endfor %%}{%% if add_generation_prompt %%}<|assistant|>{%% endif %%}"""
WRITTEN = {
    "hermes": "\n<tool_call>\n{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>",
    "mistral": "[TOOL_CALLS][{{ {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}]",
    "mistral of 2025": "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}",
    "llama": "{{ {'name': call.function.name, 'parameters': call.function.arguments} | tojson }}",
    "pythonic": (
        "[{{ call.function.name }}({% for key, value in call.function.arguments.items() %}{{ key }}={{ value | tojson }}"
        "{% endfor %})]"
    ),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([""], 261)


@pytest.mark.parametrize("name", WRITTEN)
def test_the_format_of_a_template_is_found_by_what_it_renders(tokenizer: Tokenizer, name: str) -> None:
    template = ChatTemplate(tokenizer, TURNS % WRITTEN[name])
    assert tool_call_format(template) is {"hermes": HERMES, "llama": LLAMA, "pythonic": PYTHONIC}.get(name, MISTRAL)


@pytest.mark.parametrize("written", ["call {{ call.function.name }} with {{ call.function.arguments | tojson }}", ""])
def test_a_template_that_writes_calls_otherwise_or_not_at_all_is_refused(tokenizer: Tokenizer, written: str) -> None:
    with pytest.raises(UserError, match="tool calls"):
        tool_call_format(ChatTemplate(tokenizer, TURNS % written))


ADD, ASK = ToolCall("add", '{"a": 1, "b": [2, null]}'), ToolCall("ask", '{"q": "é } ; {"}')
SAID_ADD, SAID_ASK = ('{"name": "%s", "%%s": %s}' % call for call in (ADD, ASK))  # noqa: UP031
TWO_BLOCKS = [f"<tool_call>{said % 'arguments'}" for said in (SAID_ADD, SAID_ASK)]
ANSWERS = [
    (HERMES, f"Sure.\n<tool_call>\n{SAID_ADD % 'arguments'}\n</tool_call>", "Sure.", [ADD]),
    (HERMES, "</tool_call>\n".join(TWO_BLOCKS), "", [ADD, ASK]),  # the end of the last may be a stop token
    (MISTRAL, f"[TOOL_CALLS][{SAID_ASK % 'arguments'}]", "", [ASK]),
    (MISTRAL, f"So[TOOL_CALLS]add[ARGS]{ADD.arguments}[TOOL_CALLS]ask{ASK.arguments}", "So", [ADD, ASK]),
    (LLAMA, f"{SAID_ASK % 'parameters'}; {SAID_ADD % 'parameters'}", "", [ASK, ADD]),
    (LLAMA, f"<|python_tag|>{SAID_ASK % 'parameters'}", "", [ASK]),
    (PYTHONIC, "[add(a=1, b=[2, None]), ask(q='é } ; {')]", "", [ADD, ASK]),
    (PYTHONIC, "[now()]", "", [ToolCall("now", "{}")]),
]
NO_CALLS = [
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>'),
    (HERMES, '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
    (HERMES, '<tool_call>{"name": "add", "arguments": {}}</tool_call> so there'),
    (MISTRAL, "[TOOL_CALLS]"),
    (LLAMA, '{"a": 1}'),
    (LLAMA, '{"name": "f", "parameters": {}} and more'),
    (PYTHONIC, "[1, 2]"),
    (PYTHONIC, "[]"),
    (PYTHONIC, "[f(1)]"),
    (PYTHONIC, "[f(a=open('x'))]"),
    (PYTHONIC, "[" * 5000),
    (HERMES, "a < b"),
]


@pytest.mark.parametrize(("call_format", "answer", "content", "calls"), ANSWERS)
def test_content_and_calls_are_told_apart(call_format, answer, content, calls) -> None:  # type: ignore[no-untyped-def]
    assert call_format.split(answer) == (content, calls)


@pytest.mark.parametrize(("call_format", "answer"), NO_CALLS)
def test_a_call_that_cannot_be_read_is_text(call_format, answer) -> None:  # type: ignore[no-untyped-def]
    assert call_format.split(answer) == (answer, [])


def test_what_is_read_piece_by_piece_is_what_is_read_whole_and_no_part_of_a_call_is_content() -> None:
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
