"""All that a conversation says is in what is trained on, in the scored part where it should be, or
its record is refused.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from lmforge.core.data.packing import TokenizedExample
from lmforge.core.data.tokenizer import Tokenizer, train_tokenizer
from lmforge.core.errors import UserError
from lmforge.text.chat.conversations import read_conversations
from lmforge.text.chat.preferences import encode_completions, read_preference_pairs, read_prompts
from lmforge.text.chat.templates import ChatTemplate
from lmforge.text.sources.records import UnusableRecords
from tests.seeds import fresh_random

SAMPLE = [
    "Once upon a time, there was a user.\nThe assistant said: hello, hello world!\n\n  No, it is"
    " I.\n" * 4
] * 20
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|eot|>"]

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] +"
    " '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n'"
    " }}{% endif %}"
)
# Qwen 3's: tools, calls and reasoning, which is removed from turns before the last question.
QWEN3 = """
{%- if tools %}{{ '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
{{- "# Tools\n<tools>" }}{% for tool in tools %}{{ "\n" }}{{ tool | tojson }}{% endfor %}{{ "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}{% set index = messages|length - 1 - loop.index0 %}
{%- if ns.searching and message.role == "user" and not(message.content.startswith('<tool_response>')
        and message.content.endswith('</tool_response>')) %}{% set ns.searching = false %}{% set ns.last = index %}{% endif %}
{%- endfor %}
{%- for message in messages %}{% set content = message.content if message.content is string else '' %}
{%- if message.role == "user" or (message.role == "system" and not loop.first) %}
    {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- elif message.role == "assistant" %}{% set reasoning = '' %}
    {%- if message.reasoning_content is string %}{% set reasoning = message.reasoning_content %}
    {%- elif '</think>' in content %}
        {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if loop.index0 > ns.last and reasoning %}
        {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
    {%- else %}{{ content }}{% endif %}
    {%- for tool_call in message.tool_calls or [] %}
        {%- if (loop.first and content) or not loop.first %}{{ '\n' }}{% endif %}
        {%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}
        {{- '<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
        {{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}{{ '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- elif message.role == "tool" %}
    {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{ '<|im_start|>user' }}{% endif %}
    {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{ '<|im_end|>\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# DeepSeek's: keeps what follows the reasoning, and takes arguments for text.
DEEPSEEK = """
{%- for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}{{ '<|im_start|>' + m.content }}
{%- elif m.role == 'assistant' %}{{ '<|eot|>' }}
    {%- if m.tool_calls %}{{ m.content }}{% for call in m.tool_calls %}
        {{- 'call ' + call.function.name + '\n```json\n' + call.function.arguments + '\n```' }}{% endfor %}
    {%- else %}{{ m.content.split('</think>')[-1] }}{% endif %}{{ '<|im_end|>' }}
{%- elif m.role == 'tool' %}{{ '<|im_start|>' + m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|eot|>' }}{% endif %}"""
# SmolVLM's kind: loops over parts, and shows nothing of a string.
PARTS = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + ':' }}{% for part in m.content %}{% if part.type == 'text' %}
    {{- part.text }}{% endif %}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant:' }}{% endif %}"""
# Takes both, as Llama 4's.
EITHER = PARTS.replace(
    "{% for part in m.content %}",
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}",
).replace(
    "{% endif %}{% endfor %}{{ '<|im_end|>", "{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>"
)
# Llama 2's kind knows three roles, and raises for others.
STRICT = CHATML.replace(
    "{{'<|im_start|>'",
    "{% if message.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('no"
    " role ' + message.role) }}{% endif %}{{'<|im_start|>'",
)
# Shows what it knows, and nothing of other roles.
KNOWN = CHATML.replace(
    "{{'<|im_start|>'",
    "{% if message.role in ['system', 'user', 'assistant', 'tool'] %}{{'<|im_start|>'",
).replace("{% endfor %}", "{% endif %}{% endfor %}", 1)
NO_SYSTEM = KNOWN.replace("'system', ", "").replace(", 'tool'", "")
# Earlier answers end with one token, the last with another.
TWO_ENDS = CHATML.replace(
    "+ '<|im_end|>'",
    "+ ('<|eot|>' if message.role == 'assistant' and not loop.last else '<|im_end|>')",
)
# Shows documents, and takes a variable.
RAG = (
    "{% for each in documents or [] %}{{ '[' + each.title + ': ' + each.text + ']' }}{% endfor %}"
    "{% if brief %}{{ 'Briefly.' }}{% endif %}" + CHATML
)
NAMED = CHATML.replace(
    "message['role'] +", "message['role'] + (' ' + message.name if message.name else '') +"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Where."}},
            },
        },
    }
]
CALL = {
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Rome", "days": 2}},
}
Q, A = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}


def folder_with(folder: Path, template: str | None) -> Path:
    tokenizer = train_tokenizer(SAMPLE, 400)._backend
    tokenizer.add_special_tokens(SPECIALS)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | ({"chat_template": template} if template else {}))
    )
    return folder


class Chat:
    """A tokenizer with a template, here and in transformers."""

    def __init__(self, folder: Path, template: str | None):
        self.folder = folder_with(folder, template)
        self.tokenizer, self.theirs = (
            Tokenizer.open(self.folder),
            AutoTokenizer.from_pretrained(self.folder),
        )

    def examples(self, record: dict[str, Any], **options: Any) -> list[TokenizedExample]:
        (self.folder / "a.jsonl").write_text(json.dumps(record) + "\n")
        return list(read_conversations(self.folder / "a.jsonl", self.tokenizer, **options))

    def ids(self, record: dict[str, Any], **options: Any) -> list[int]:
        [example] = self.examples(record, **options)
        return example.tokens.tolist()

    def scored(self, record: dict[str, Any], **options: Any) -> list[str]:
        """The scored part of each example, special tokens spelled out."""
        ids = (each.tokens[each.loss_mask].tolist() for each in self.examples(record, **options))
        return [self.tokenizer.decode(each, include_special_tokens=True) for each in ids]

    def refusal(self, record: dict[str, Any], **options: Any) -> str:
        with pytest.raises(UserError) as caught:
            self.examples(record, **options)
        assert "\n" not in str(caught.value)
        return str(caught.value).removeprefix(f"{self.folder / 'a.jsonl'}, record 1: ")

    def expected(self, messages: list[Any], tools: Any = None, **options: Any) -> list[int]:
        return list(self.theirs.apply_chat_template(messages, tools=tools, **options)["input_ids"])


@pytest.fixture
def chat(tmp_path: Path) -> Any:
    return lambda template: Chat(tmp_path / str(abs(hash(template))), template)


# --- what is left out -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "record", "left_out"),
    [
        (
            CHATML,
            {"messages": [Q, A | {"reasoning_content": "two and two is four"}]},
            "reasoning of message 2 (assistant)",
        ),
        (CHATML, {"messages": [Q, A | {"thinking": "4"}]}, "reasoning of message 2 (assistant)"),
        (
            CHATML,
            {
                "messages": [Q, A | {"reasoning": "4"}, Q, A],
            },
            "reasoning of message 2 (assistant)",
        ),
        (
            None,
            {"messages": [Q, A | {"reasoning_content": "4"}]},
            "reasoning of message 2 (assistant)",
        ),
        (
            DEEPSEEK,
            {"messages": [Q, A | {"content": "<think>4</think>4"}]},
            "content of message 2 (assistant)",
        ),
        (CHATML, {"messages": [Q, A], "tools": TOOLS}, "tools"),
        (
            CHATML,
            {"messages": [Q, A | {"tool_calls": [CALL]}]},
            "tool calls of message 2 (assistant)",
        ),
        (
            NO_SYSTEM,
            {"messages": [{"role": "developer", "content": "2"}, Q, A]},
            "content of message 1 (developer)",
        ),
        (
            NO_SYSTEM,
            {"messages": [Q, A, A | {"role": "function"}, A]},
            "content of message 3 (function)",
        ),
        (
            CHATML.replace("message['content']", "message['content'][:5]"),
            {"messages": [Q, A]},
            "content of message 1 (user)",
        ),
    ],
)
def test_what_a_template_leaves_out_is_named(
    chat: Any, template: str | None, record: Any, left_out: str
) -> None:
    """Though the same words are in the text elsewhere."""
    chat = chat(template)
    assert f"leaves out the {left_out}" in chat.refusal(record)
    if "reasoning" in left_out:
        assert chat.refusal(record, mask="last").endswith("correct the template, or the record")


def test_of_several_fields_of_reasoning_the_one_that_says_something_is_read(chat: Any) -> None:
    chat = chat(QWEN3)
    one = {"messages": [Q, A | {"reasoning_content": "so"}]}
    assert chat.ids(
        {"messages": [Q, A | {"reasoning_content": "", "reasoning": "so"}]}
    ) == chat.expected(one["messages"])
    assert chat.ids({"messages": [Q, A | {"thinking": "so", "reasoning": "so"}]}) == chat.expected(
        one["messages"]
    )
    differing = {"messages": [Q, A | {"reasoning_content": "so", "thinking": "thus"}]}
    assert "message 2: has different texts under reasoning_content and thinking" in chat.refusal(
        differing
    )


def test_a_conversation_of_too_many_pieces_is_one_record_that_cannot_be_used(chat: Any) -> None:
    chat = chat(QWEN3)
    call = {"function": {"name": "sum", "arguments": {"of": [1] * 70_000}}}
    records = [
        {"messages": [Q, A]},
        {"messages": [Q, {"role": "assistant", "content": "", "tool_calls": [call]}]},
    ]
    (chat.folder / "b.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in [*records, records[0]])
    )
    unusable = UnusableRecords(skip=True)
    assert (
        len(list(read_conversations(chat.folder / "b.jsonl", chat.tokenizer, unusable=unusable)))
        == 2
    )
    assert "b.jsonl, record 2: the conversation has more than" in unusable.problems[0]


def test_refused_records_are_counted(chat: Any) -> None:
    chat = chat(CHATML)
    records = [{"messages": [Q, A]}, *[{"messages": [Q, A | {"reasoning": "so"}]}] * 3]
    (chat.folder / "b.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(
        UserError, match=r"b\.jsonl, record 2: .* leaves out .* \(3 of 4 records are refused\)$"
    ):
        list(read_conversations(chat.folder / "b.jsonl", chat.tokenizer))


def test_what_a_template_does_to_earlier_answers_when_it_is_asked_may_be_done_to_those_that_are_not_scored(
    chat: Any,
) -> None:
    chat = chat(QWEN3)
    thought = {
        "messages": [Q, A | {"reasoning_content": "so"}, Q, A | {"reasoning_content": "thus"}]
    }
    assert chat.ids(thought, mask="last") == chat.expected(thought["messages"])
    assert chat.scored(thought, mask="last") == ["<think>\nthus\n</think>\n\n4<|im_end|>"]
    assert chat.ids(
        {"messages": [thought["messages"][0] | {"content": "2"}, *thought["messages"][1:]]},
        mask="last",
    )


def test_each_turn_is_an_example_where_the_template_rewrites_earlier_ones(chat: Any) -> None:
    chat = chat(QWEN3)
    messages = [Q, A | {"reasoning_content": "so"}, Q, A | {"reasoning_content": "thus"}, Q, A]
    message = chat.refusal({"messages": messages})
    assert "data.split_turns" in message
    examples = chat.examples({"messages": messages}, split_turns=True)
    assert [each.tokens.tolist() for each in examples] == [
        chat.expected(messages[:at]) for at in (2, 4, 6)
    ]
    assert chat.scored({"messages": messages}, split_turns=True) == [
        "<think>\nso\n</think>\n\n4<|im_end|>",
        "<think>\nthus\n</think>\n\n4<|im_end|>",
        "4<|im_end|>",
    ]
    other = chat.examples({"messages": [Q | {"content": "Why?"}, *messages[1:]]}, split_turns=True)
    assert [
        len({each.part_of for each in turns}) for turns in (examples, other, [*examples, *other])
    ] == [1, 1, 2]
    # One that need not be split stays whole, and one that lacks something is refused whatever.
    assert chat.scored({"messages": [Q, A, Q, A]}, split_turns=True) == ["4<|im_end|>4<|im_end|>"]
    toolless = Chat(chat.folder / "t", QWEN3.replace('role == "tool" %}', 'role == "none" %}'))
    answered = [*messages[:2], {"role": "tool", "content": "4"}, *messages[3:]]
    assert "leaves out the content of message 3 (tool)" in toolless.refusal(
        {"messages": answered}, split_turns=True
    )


# --- several templates ----------------------------------------------------------------------------

WITH_TOOLS = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}" + QWEN3.split("{%- set ns =")[
    1
].join(["{%- set ns =", ""])


@pytest.mark.parametrize("form", ["list", "folder"])
def test_of_several_templates_the_one_for_tools_is_used_and_all_are_kept(
    chat: Any, tmp_path: Path, form: str
) -> None:
    named = [{"name": "rag", "template": "R"}, {"name": "tool_use", "template": WITH_TOOLS}]
    if form == "list":
        folder = folder_with(tmp_path / "t", [{"name": "default", "template": CHATML}, *named])  # type: ignore[arg-type]
    else:
        folder = folder_with(tmp_path / "t", "unused")
        (folder / "chat_template.jinja").write_text(CHATML)
        (folder / "additional_chat_templates").mkdir()
        for each in named:
            (folder / "additional_chat_templates" / f"{each['name']}.jinja").write_text(
                each["template"]
            )
    chat = chat(CHATML)
    chat.folder, chat.tokenizer, chat.theirs = (
        folder,
        Tokenizer.open(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    called = [
        Q,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "5"},
        A,
    ]
    assert chat.ids({"messages": called, "tools": TOOLS}) == chat.expected(called, TOOLS)
    assert chat.ids({"messages": [Q, A], "tools": []}) == chat.expected([Q, A])
    assert chat.ids({"messages": [Q, A], "tools": TOOLS}) != chat.ids({"messages": [Q, A]})
    # As a checkpoint keeps it, and as an export does.
    chat.tokenizer.save(tmp_path / "saved")
    template = ChatTemplate.from_tokenizer(Tokenizer.open(tmp_path / "saved"))
    assert template.files["additional_chat_templates/tool_use.jinja"] == WITH_TOOLS
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == chat.theirs.chat_template
    )
    for name, text in template.files.items():
        (tmp_path / "saved" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "saved" / name).write_text(text)
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == chat.theirs.chat_template
    )


# --- forms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["developer", "observation", "function"])
@pytest.mark.parametrize("template", [CHATML, STRICT, KNOWN, None])
def test_a_role_that_a_template_does_not_know_becomes_the_one_it_does(
    chat: Any, template: str | None, role: str
) -> None:
    chat = chat(template)
    common = "system" if role == "developer" else "tool"
    messages = [{"role": role, "content": "Be brief."}, Q, A]
    if template is None:
        assert chat.ids({"messages": messages}) == chat.ids(
            {"messages": [messages[0] | {"role": common}, Q, A]}
        )
        return
    shown = messages if template == CHATML else [messages[0] | {"role": common}, Q, A]
    assert chat.ids({"messages": messages}) == chat.expected(shown)
    prompt = ChatTemplate.from_tokenizer(chat.tokenizer).encode_prompt(messages[:2])
    assert prompt == chat.expected(shown[:2], add_generation_prompt=True)


def test_a_prompt_whose_message_vanishes_is_refused(chat: Any) -> None:
    template = ChatTemplate.from_tokenizer(chat(NO_SYSTEM).tokenizer)
    with pytest.raises(UserError, match=r"leaves out the content of message 1 \(developer\)"):
        template.encode_prompt([{"role": "developer", "content": "2"}, Q])
    # What clients send back of earlier answers is as the template likes it.
    assert template.encode_prompt(
        [Q, A | {"reasoning_content": "so"}, Q]
    ) == template.encode_prompt([Q, A, Q])


@pytest.mark.parametrize("template", [PARTS, EITHER, CHATML, DEEPSEEK, None])
def test_parts_reach_a_template_that_loops_over_them_and_others_get_their_text(
    chat: Any, template: str | None
) -> None:
    chat = chat(template)
    parts = [{"type": "text", "text": "2 "}, {"type": "text", "text": "+ 2?"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "text", "text": "4"}]},
    ]
    for record in ({"messages": messages}, {"messages": [Q, A]}, {"messages": [messages[0], A]}):
        if template is None:
            assert chat.ids(record) == chat.ids({"messages": [Q, A]})
        else:
            as_parts = [
                {"role": each["role"], "content": [{"type": "text", "text": each["content"]}]}
                for each in (Q, A)
            ]
            assert chat.ids(record) == chat.expected(as_parts if template == PARTS else [Q, A])
    assert chat.scored({"messages": messages})[0].startswith("4")


@pytest.mark.parametrize("template", [QWEN3, DEEPSEEK])
@pytest.mark.parametrize(
    "arguments",
    [{"city": "Rome"}, '{"city":"Rome"}', {}, {"city": "L'Aquila\n", "a": [1, None, {"b": True}]}],
)
def test_arguments_are_objects_or_else_their_text(chat: Any, template: str, arguments: Any) -> None:
    chat = chat(template)

    def asked(arguments: Any) -> list[Any]:
        call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        return [Q, {"role": "assistant", "content": "", "tool_calls": [call]}]

    if template == QWEN3:
        expected = json.loads(arguments) if isinstance(arguments, str) else arguments
    else:
        expected = (
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        )
    assert chat.ids({"messages": asked(arguments)}) == chat.expected(asked(expected))
    # Text within a template that writes whatever it is given is text too, not Python's.
    chat = Chat(
        chat.folder / "loose",
        DEEPSEEK.replace("+ call.function.arguments +", "~ call.function.arguments ~"),
    )
    expected = (
        arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    )
    assert chat.ids({"messages": asked(arguments)}) == chat.expected(
        asked(expected if arguments else {})
    )


@pytest.mark.parametrize("content", ["", None, "Let me see."])
def test_a_legacy_call_is_a_call(chat: Any, content: str | None) -> None:
    chat = chat(QWEN3)
    legacy = {
        "role": "assistant",
        "content": content,
        "function_call": {"name": "weather", "arguments": '{"city": "Rome"}'},
    }
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages = [
        Q,
        {"role": "assistant", "content": content or "", "tool_calls": [call]},
        {"role": "tool", "content": "5"},
        A,
    ]
    record = {"messages": [Q, legacy, {"role": "function", "name": "weather", "content": "5"}, A]}
    assert chat.ids(record) == chat.expected(messages)
    [scored] = chat.scored(record)
    assert (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>'
        in scored
    )


def test_legacy_functions_are_tools_and_an_empty_list_of_calls_is_none(chat: Any) -> None:
    chat = chat(QWEN3)
    assert chat.ids({"messages": [Q, A], "functions": [TOOLS[0]["function"]]}) == chat.expected(
        [Q, A], TOOLS
    )
    assert chat.ids({"messages": [Q, A], "functions": ["sum"]}) == chat.expected([Q, A])
    chat = Chat(
        chat.folder / "c",
        CHATML.replace(
            "message['content']", "('' if 'tool_calls' in message else message['content'])"
        ),
    )
    assert chat.ids({"messages": [Q, A | {"tool_calls": []}]}) == chat.expected([Q, A])


# --- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flag",
    [
        {"weight": 0},
        {"train": False},
        {"training": False},
        {"loss": False},
        {"weight": 0, "train": None},
    ],
)
@pytest.mark.parametrize("template", [CHATML, None])
def test_a_turn_that_says_so_is_not_scored(
    chat: Any, flag: dict[str, Any], template: str | None
) -> None:
    chat = chat(template)
    one, two = A, {"role": "assistant", "content": "five"}
    plain, flagged = (
        {"messages": [Q, one, Q, two]},
        {"messages": [Q, one | flag, Q, two | {"weight": 1}]},
    )
    end = "<|end|>" if template is None else "<|im_end|>"
    assert chat.ids(flagged) == chat.ids(plain)
    assert chat.scored(plain) == [f"4{end}five{end}"]
    assert chat.scored(flagged) == [f"five{end}"]
    assert chat.scored({"messages": [Q, two, Q, one | flag]}) == [f"five{end}"]
    assert (
        chat.scored({"messages": [Q, two, Q, one | flag]}, mask="last")
        == chat.scored({"messages": [Q, one | flag]})
        == [""]
    )
    said = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"} | flag]
    assert chat.scored({"conversations": said + said[:1] + [{"from": "gpt", "value": "five"}]}) == [
        f"five{end}"
    ]
    assert "message 2: is not to be scored" in chat.refusal(flagged, mask="all")


@pytest.mark.parametrize(
    "flag", [{"weight": 0.5}, {"weight": "0"}, {"train": "no"}, {"training": []}, {"weight": 2}]
)
def test_a_weight_that_is_neither_is_refused(chat: Any, flag: dict[str, Any]) -> None:
    [(name, value)] = flag.items()
    expected = f'message 2: "{name}" is {json.dumps(value)}: expected 0 or 1, false or true'
    assert chat(CHATML).refusal({"messages": [Q, A | flag]}).startswith(expected)


def test_parts_of_a_turn_are_not_scored_apart(chat: Any) -> None:
    detail = [{"begin_offset": 0, "end_offset": 1, "train": False}]
    assert 'message 2: "train_detail": parts of a turn' in chat(CHATML).refusal(
        {"messages": [Q, A | {"train_detail": detail}]}
    )


def test_a_question_that_says_it_is_scored_is_refused(chat: Any) -> None:
    chat = chat(CHATML)
    assert "message 1: is to be scored" in chat.refusal({"messages": [Q | {"train": True}, A]})
    assert chat.ids({"messages": [Q | {"train": False}, A]}) == chat.ids({"messages": [Q, A]})


def test_each_answer_is_scored_with_the_token_that_follows_it(chat: Any) -> None:
    chat = chat(TWO_ENDS)
    messages = [Q, A, Q, A, Q, A]
    assert chat.ids({"messages": messages}) == chat.expected(messages)
    assert chat.scored({"messages": messages}) == ["4<|eot|>4<|eot|>4<|im_end|>"]
    stops = ChatTemplate.from_tokenizer(chat.tokenizer).stop_ids
    assert stops == {
        chat.tokenizer.token_to_id("<|eot|>"),
        chat.tokenizer.token_to_id("<|im_end|>"),
    }
    # A token that begins the next turn ends none.
    only_last = Chat(
        chat.folder / "b",
        CHATML.replace(
            "+ '<|im_end|>'", "+ ('<|im_end|>' if loop.last or message.role == 'user' else '')"
        ).replace("+ '\n'}}", "}}"),
    )
    assert "never scores the end of turn" in only_last.refusal({"messages": messages})


@pytest.mark.parametrize("template", [CHATML, QWEN3, PARTS, None])
def test_a_conversation_may_begin_with_an_answer(chat: Any, template: str | None) -> None:
    chat = chat(template)
    messages = [A, Q, {"role": "assistant", "content": "five"}]
    if template == PARTS:
        messages = [
            each | {"content": [{"type": "text", "text": each["content"]}]} for each in messages
        ]
    ids = chat.ids({"messages": messages})
    if template is not None:
        assert ids == chat.expected(messages)
    end = "<|end|>" if template is None else "<|im_end|>"
    assert chat.scored({"messages": messages}) == [f"4{end}five{end}"]
    first = CHATML.replace(
        "{% for",
        "{% if messages[0].role == 'assistant' %}{{ raise_exception('Begin with a user') }}{% endif"
        " %}{% for",
        1,
    )
    assert "refuses the conversation: Begin with a user" in Chat(chat.folder / "s", first).refusal(
        {"messages": messages}
    )


# --- what is no text, and what has no place -------------------------------------------------------


def test_what_a_column_says_of_media_or_files_is_no_media(chat: Any) -> None:
    chat = chat(CHATML)
    counts = {
        "images": 2,
        "video_id": "dQw4w9WgXcQ",
        "image_name": "swebench/eval.x86_64:latest",
        "photo": True,
    }
    files = {
        "files": ["src/a.py", {"path": "b.md", "content": "c"}],
        "attachments": [],
        "image": None,
        "audio": [None],
    }
    assert chat.ids({"messages": [Q, A], **counts, **files}) == chat.expected([Q, A])


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [Q, A], "images": ["a.png"]},
        {"messages": [Q, A], "image": {"bytes": "x", "path": None}},
        {"messages": [Q, A], "videos": ["a.mp4"]},
        {"messages": [Q, A], "audio": "a.wav"},
        {"messages": [Q, A], "Image_Path": "a.png"},
        {"messages": [Q | {"content": [{"type": "image"}, {"type": "text", "text": "2 + 2?"}]}, A]},
        {
            "messages": [
                Q
                | {
                    "content": [
                        {"type": "image_url", "image_url": {"url": "a"}},
                        {"type": "text", "text": "2 + 2?"},
                    ]
                },
                A,
            ]
        },
        {
            "messages": [
                Q | {"content": [{"type": "input_audio"}, {"type": "text", "text": "2 + 2?"}]},
                A,
            ]
        },
        {"messages": [Q | {"images": ["a.png"]}, A]},
    ],
)
def test_a_record_with_more_than_text_is_refused_unless_its_text_is_enough(
    chat: Any, record: dict[str, Any]
) -> None:
    chat = chat(CHATML)
    assert re.fullmatch(
        r"holds '.*', and only text is trained on: .* data\.ignore_media", chat.refusal(record)
    )
    assert chat.ids(record, ignore_media=True) == chat.expected([Q, A])
    assert chat.ids(
        {"messages": [Q, A], "images": [], "audio": None, "videos": ""}
    ) == chat.expected([Q, A])


def test_a_placeholder_is_text(chat: Any) -> None:
    chat = chat(CHATML)
    messages = [Q | {"content": "<image>2 + 2?"}, A]
    assert chat.ids({"messages": messages}) == chat.expected(messages)
    assert chat.ids({"messages": [Q, A], "images": [None], "image_paths": [""]}) == chat.expected(
        [Q, A]
    )


def test_an_argument_of_a_call_is_no_image(chat: Any) -> None:
    call = {
        "type": "function",
        "function": {"name": "find", "arguments": {"type": "image", "images": ["<image>"]}},
    }
    messages = [Q, {"role": "assistant", "content": "", "tool_calls": [call]}]
    chat = chat(QWEN3)
    assert chat.ids({"messages": messages}) == chat.expected(messages)


def test_a_system_prompt_beside_messages_is_one_of_them_and_has_no_place_beside_text(
    chat: Any,
) -> None:
    chat = chat(CHATML)
    system = {"role": "system", "content": "Be brief."}
    for record in (
        {"messages": [Q, A]},
        {"messages": [system, Q, A]},
        {"prompt": [Q], "completion": [A]},
    ):
        assert chat.ids(record | {"system": "Be brief."}) == chat.expected([system, Q, A])
    kwargs = {"chat_template_kwargs": {"brief": True}}
    for beside in (
        {"system": "Be brief."},
        {"tools": TOOLS},
        {"documents": [{"text": "4"}]},
        kwargs,
    ):
        refusal = chat.refusal({"prompt": "2 + 2?", "completion": "4"} | beside)
        assert f"the field {next(iter(beside))!r} has no place in a prompt that is text" in refusal


def test_documents_and_variables_of_a_record_reach_the_template_as_in_transformers(
    chat: Any,
) -> None:
    plain, chat = chat(CHATML), chat(RAG)
    documents, variables = [{"title": "Sums", "text": "2 + 2 is 4", "id": 7}], {"brief": True}
    record = {"messages": [Q, A], "documents": documents, "chat_template_kwargs": variables}
    assert chat.ids(record) == chat.expected([Q, A], documents=documents, **variables)
    assert chat.ids(
        record | {name: json.dumps(record[name]) for name in list(record)[1:]}
    ) == chat.ids(record)
    [prompt] = read_prompts(chat.folder / "a.jsonl", chat.tokenizer)
    expected = chat.expected([Q], documents=documents, add_generation_prompt=True, **variables)
    assert prompt.tokens.tolist() == expected
    assert chat.ids(record | {"documents": [], "chat_template_kwargs": None}) == chat.expected(
        [Q, A]
    )
    assert "leaves out the documents; data.fields" in plain.refusal(
        {"messages": [Q, A], "documents": documents}
    )
    assert "reads no variable 'brief'" in plain.refusal(
        {"messages": [Q, A], "chat_template_kwargs": variables}
    )
    for without_effect in ({"brief": False}, {"enable_thinking": True}):
        assert plain.ids(
            {"messages": [Q, A], "chat_template_kwargs": without_effect}
        ) == plain.expected([Q, A])
    assert "the field 'documents' is not a list but int" in chat.refusal(record | {"documents": 1})
    assert "'tools' is not a variable" in chat.refusal(
        record | {"chat_template_kwargs": {"tools": TOOLS}}
    )
    # A model of rewards is given them too.
    [ids] = encode_completions(chat.tokenizer, [[Q]], ["4"], [record])
    assert ids == chat.ids(record)


def test_the_name_of_a_turn_is_in_the_text_or_the_record_is_refused(chat: Any) -> None:
    plain, chat = chat(CHATML), chat(NAMED)
    messages = [Q | {"name": "Ann"}, A, {"role": "tool", "name": "sum", "content": "4"}, A]
    assert chat.ids({"messages": messages}) == chat.expected(messages)
    assert "leaves out the name of message 1 (user)" in plain.refusal({"messages": messages})
    assert plain.ids({"messages": [Q, A, messages[2], A]}) == plain.expected([Q, A, messages[2], A])
    template = ChatTemplate.from_tokenizer(plain.tokenizer)
    # As other servers take it.
    assert template.encode_prompt(messages[:1], is_request=True) == template.encode_prompt([Q])


def test_names_and_documents_that_the_template_leaves_out_are_refused_in_prompts_too_and_may_be_dropped(
    chat: Any,
) -> None:
    chat = chat(CHATML)
    named, of = (
        {"messages": [Q | {"name": "Ann"}, A]},
        {"messages": [Q, A], "documents": [{"title": "t", "text": "words"}]},
    )
    for record, field in ((named, "name"), (of, "documents")):
        fields = {field: ""}
        for messages in (record["messages"], json.dumps(record["messages"])):
            assert chat.ids(record | {"messages": messages}, fields=fields) == chat.expected([Q, A])
        (chat.folder / "prompts.jsonl").write_text(
            json.dumps(record | {"messages": record["messages"][:1]}) + "\n"
        )
        with pytest.raises(UserError) as caught:
            list(read_prompts(chat.folder / "prompts.jsonl", chat.tokenizer))
        for refusal in (str(caught.value), chat.refusal(record)):
            assert f"leaves out the {field}" in refusal
            assert refusal.endswith(f'; data.fields = ["{field}="] does without it')
        [prompt] = read_prompts(chat.folder / "prompts.jsonl", chat.tokenizer, fields=fields)
        assert prompt.tokens.tolist() == chat.expected([Q], add_generation_prompt=True)


def test_an_answer_of_reasoning_alone_is_one_and_a_refusal_beside_it_is_named(chat: Any) -> None:
    chat = chat(QWEN3)
    messages = [Q, {"role": "assistant", "content": None, "reasoning_content": "so"}]
    assert chat.ids({"messages": messages}) == chat.expected(messages)
    assert "message 2: the content is null" in chat.refusal(
        {"messages": [Q, A | {"content": None}]}
    )
    for content in ("", None):
        refusal = chat.refusal({"messages": [Q, A | {"content": content, "refusal": "I cannot."}]})
        assert refusal.startswith(
            'message 2: "refusal": what the assistant says is read from its content'
        )


@pytest.mark.parametrize(("template", "none"), [(QWEN3, {}), (DEEPSEEK, "{}")])
def test_arguments_of_no_text_are_none(chat: Any, template: str, none: Any) -> None:
    chat = chat(template)
    said = [
        [Q, A | {"tool_calls": [{"function": {"name": "now", "arguments": each}}]}]
        for each in ("", none)
    ]
    assert chat.ids({"messages": said[0]}) == chat.expected(said[1])


def test_the_weight_of_a_record_is_obeyed_and_that_of_a_part_is_refused(chat: Any) -> None:
    chat = chat(CHATML)
    assert chat.ids({"messages": [Q, A], "weight": 1.0}) == chat.expected([Q, A])
    assert chat.examples({"messages": [Q, A], "weight": 0}) == []
    assert '"weight" is 0.5: expected 0 or 1' in chat.refusal({"messages": [Q, A], "weight": 0.5})
    part = {"type": "text", "text": "4"}
    assert chat.ids({"messages": [Q, A | {"content": [part | {"weight": 1}]}]}) == chat.expected(
        [Q, A]
    )
    half = A | {"content": [part, part | {"weight": 0}]}
    assert "message 2: parts of a turn are not scored apart" in chat.refusal(
        {"messages": [Q, half]}
    )


# --- drawn conversations --------------------------------------------------------------------------

LOSSY = {  # real templates' ways of leaving something out
    "of contents": ("message['content']", "message['content'].split('</think>')[-1]"),
    "of long contents": ("message['content']", "message['content'][:12]"),
    "of the first": ("message['content']", "(message['content'] if not loop.first else '')"),
}
TEMPLATES = {
    "ChatML": CHATML,
    "Qwen 3": QWEN3,
    "DeepSeek": DEEPSEEK,
    "parts": PARTS,
    "either": EITHER,
    "strict": STRICT,
    "known roles": KNOWN,
    "no system": NO_SYSTEM,
    "two ends": TWO_ENDS,
    "documents": RAG,
    "names": NAMED,
    **{f"ChatML without some {name}": CHATML.replace(*change) for name, change in LOSSY.items()},
}
WORDS = [
    "4",
    "four",
    "é",
    "<think>so</think>",
    "{'a': 1}",
    '"a" & <b>',
    "x\ny",
    "Well?",
    "user",
    "<|im_end|>",
    "\U00100000",
]


def drawn_record(draw: random.Random) -> dict[str, Any]:
    def words() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, 3)))

    def content() -> Any:
        return (
            [{"type": "text", "text": words()} for _ in range(2)]
            if draw.random() < 0.15
            else words()
        )

    messages: list[dict[str, Any]] = []
    if draw.random() < 0.4:
        messages.append({"role": draw.choice(["system", "developer"]), "content": content()})
    for _ in range(draw.randint(1, 3)):
        messages.append({"role": "user", "content": content()})
        if draw.random() < 0.3:
            arguments = {
                draw.choice("ab"): draw.choice([words(), 12, None, [True], {"c": words()}])
            }
            function = {
                "name": "weather",
                "arguments": draw.choice([arguments, json.dumps(arguments)]),
            }
            messages.append(
                {
                    "role": "assistant",
                    "content": draw.choice(["", words()]),
                    "tool_calls": [{"function": function}],
                }
            )
            messages.append(
                {"role": draw.choice(["tool", "function", "observation"]), "content": words()}
            )
        messages.append({"role": "assistant", "content": content()})
        if draw.random() < 0.3:
            messages[-1][draw.choice(["reasoning_content", "thinking", "reasoning"])] = words()
        if draw.random() < 0.2:
            messages[-1]["weight"] = draw.choice([0, 1])
    if draw.random() < 0.05:
        messages[-2]["name"] = words()
    documents = [{"title": words(), "text": words()}] if draw.random() < 0.1 else []
    tools = TOOLS if draw.random() < 0.3 else []
    return (
        {"messages": messages}
        | ({"tools": tools} if tools else {})
        | ({"documents": documents} if documents else {})
    )


def said(value: Any) -> Iterator[str]:
    """Every text, name and value within a value."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from said(item)
    elif isinstance(value, list):
        for item in value:
            yield from said(item)
    else:
        yield value if isinstance(value, str) else json.dumps(value)


def pieces_of(message: dict[str, Any]) -> Iterator[str]:
    content = message["content"]
    yield from [part["text"] for part in content] if isinstance(content, list) else [content]
    yield from (
        message[field]
        for field in ("reasoning_content", "thinking", "reasoning")
        if field in message
    )
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        yield from said(
            [
                call["function"]["name"],
                json.loads(arguments) if isinstance(arguments, str) else arguments,
            ]
        )


def is_said(piece: str, text: str) -> bool:
    compact = "".join(text.split())
    # Arguments that a record has as JSON text stay as they are spelled there.
    forms = [piece, json.dumps(piece, ensure_ascii=False)[1:-1], json.dumps(piece)[1:-1]]
    forms += [
        json.dumps(forms[1], ensure_ascii=False)[1:-1],
        piece.replace("null", "None").replace("true", "True"),
    ]
    return any("".join(form.split()) in compact for form in forms)


WAYS = ["conversation", "conversation", "pair", "prompt"]


def write_drawn(draw: random.Random, folder: Path, record: dict[str, Any]) -> Path:
    """As a line of JSON, or as a row of Parquet where Arrow can hold it."""
    if draw.random() < 0.3:
        with suppress(pyarrow.ArrowException):  # such as contents of two types
            Dataset.from_list([record]).to_parquet(folder / "drawn.parquet")
            return folder / "drawn.parquet"
    (folder / "drawn.jsonl").write_text(json.dumps(record) + "\n")
    return folder / "drawn.jsonl"


def without_nulls(value: Any) -> Any:
    """What Arrow keeps of a value."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return list(map(without_nulls, value)) if isinstance(value, list) else value


def check_drawn(draw: random.Random, chats: dict[str, Chat]) -> bool:
    """Whether a drawn record is trained on by a drawn template; if so, all that it says is there,
    as often as it says it.
    """
    name, record, way = draw.choice(list(chats)), drawn_record(draw), draw.choice(WAYS)
    chat, options = (
        chats[name],
        {
            "mask": draw.choice(["assistant", "assistant", "last"]),
            "split_turns": draw.random() < 0.5,
        },
    )
    messages = record["messages"]
    if way != "conversation":  # of a pair the last answer is scored, of a prompt nothing
        options = {"mask": "last", "split_turns": False}
    if way == "pair":
        other = [*messages[:-1], {"role": "assistant", "content": "no such words"}]
        record = {"chosen": messages, "rejected": other} | {
            key: record[key] for key in record if key != "messages"
        }
    file = write_drawn(draw, chat.folder, record)
    if file.suffix == ".parquet":
        messages = without_nulls(messages)
    try:
        if way == "conversation":
            examples = list(read_conversations(file, chat.tokenizer, **options))
        elif way == "pair":
            examples = [pair.chosen for pair in read_preference_pairs(file, chat.tokenizer)]
        else:
            tokens = [each.tokens for each in read_prompts(file, chat.tokenizer)]
            examples, messages = (
                [TokenizedExample(each, np.zeros(len(each), bool)) for each in tokens],
                messages[:-1],
            )
    except UserError as problem:
        refusal = str(problem)
    else:
        refusal = ""
    if refusal:
        assert re.search("leaves out|differs from|change when|refuses the conversation", refusal)
        return False
    answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    chosen = [] if way == "prompt" else answers[-1:] if options["mask"] == "last" else answers
    scored = [at for at in chosen if messages[at].get("weight") != 0]
    decode = partial(chat.tokenizer.decode, include_special_tokens=True)
    whole, learned = (
        "".join(decode(ids) for ids in parts)
        for parts in (
            [each.tokens for each in examples],
            [each.tokens[each.loss_mask] for each in examples],
        )
    )
    # A conversation that is split has an example for each scored answer, and none for what follows
    # the last.
    said_in_examples = messages[: scored[-1] + 1] if options["split_turns"] and scored else messages
    for at, message in enumerate(said_in_examples):
        for piece in pieces_of(message):
            if message["role"] != "assistant" or at in scored:
                assert is_said(piece, whole), (name, record, piece, whole)
            if at in scored:
                assert is_said(piece, learned), (name, record, piece, learned)
    texts = [text for document in record.get("documents", []) for text in document.values()]
    for piece in [*said(record.get("tools", [])), *texts]:
        assert is_said(piece, whole), (name, record, piece)
    # What is said n times is there n times: no piece passes for another one.
    contents = Counter(
        "".join("".join(pieces_of({"content": messages[at]["content"]})).split()) for at in scored
    )
    for content, count in contents.items():
        spelled = "".join(learned.split())
        assert "</think>" in content or spelled.count(content) >= count, (
            name,
            record,
            content,
            learned,
        )
    # Every scored answer ends with a token that ends one.
    ends = [chat.tokenizer.token_to_id(token) for token in SPECIALS[1:]]
    assert sum(
        int((each.tokens[each.loss_mask] == end).sum()) for each in examples for end in ends
    ) >= len(scored)
    return True


@pytest.fixture(scope="module")
def drawn_chats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Chat]:
    root = tmp_path_factory.mktemp("drawn")
    return {
        name: Chat(root / str(number), template)
        for number, (name, template) in enumerate(TEMPLATES.items())
    }


def test_a_drawn_record_is_trained_on_with_all_it_says_or_is_refused(
    drawn_chats: dict[str, Chat],
) -> None:
    draw = fresh_random()
    outcomes = [check_drawn(draw, drawn_chats) for _ in range(20)]
    assert any(outcomes)


@pytest.mark.slow
def test_300_drawn_records_are_trained_on_with_all_they_say_or_are_refused(
    drawn_chats: dict[str, Chat],
) -> None:
    draw = fresh_random()
    outcomes = [check_drawn(draw, drawn_chats) for _ in range(300)]
    assert 30 < sum(outcomes) < 290
