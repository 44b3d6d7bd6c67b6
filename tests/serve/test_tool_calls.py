"""A server that is given tools answers with calls, as OpenAI's client reads them."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest

from lmforge.core.data.tokenizer import Tokenizer
from lmforge.hf.export import export_folder
from tests.serve.conftest import Server
from tests.serve.decoding.conftest import Scripted
from tests.text.test_tool_calls import TURNS, WRITTEN

TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
]
ASKED: Any = {
    "messages": [{"role": "user", "content": "1 + 1?"}],
    "temperature": 0,
    "max_tokens": 50,
}
# Tokens of which the model writes one after another; the first and the last are special, so that no
# text has them.
CALL = ["<tool_call>", '\n{"name": "add", ', '"arguments": {"a": 1, "b": 1}}\n', "</tool_call>"]


@pytest.fixture(scope="module")
def server(
    serving: Callable[..., Server],
    scripted: Scripted,
    byte_tokenizer: Tokenizer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Server:
    """Its model writes `Yes` and a call."""
    folder = tmp_path_factory.mktemp("tools")
    byte_tokenizer.save(folder / "tokenizer")
    file = folder / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text("utf-8"))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for number, piece in enumerate(CALL):
        content["added_tokens"].append(
            {"id": 261 + number, "content": piece, "special": number in (0, 3), **flags}
        )
    file.write_text(json.dumps(content), "utf-8")
    assistant, ends = (byte_tokenizer.token_to_id(token) for token in ("<|assistant|>", "<|end|>"))
    assert assistant
    assert ends
    said = [assistant, *byte_tokenizer.encode("Yes"), *range(261, 265), ends]
    model = scripted(dict(pairwise(said)), 265)
    export_folder(model, model.config, folder / "model", tokenizer_folder=folder / "tokenizer")
    (folder / "model" / "chat_template.jinja").write_text(TURNS % WRITTEN["hermes"])
    return serving(folder / "model")


def test_an_answer_with_a_call_has_its_name_and_arguments(server: Server) -> None:
    [choice] = server.client().chat.completions.create(model="model", tools=TOOLS, **ASKED).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Yes"
    assert choice.message.tool_calls
    [call] = choice.message.tool_calls
    assert isinstance(call, openai.types.chat.ChatCompletionMessageFunctionToolCall)
    assert call.function.name == "add"
    assert json.loads(call.function.arguments) == {"a": 1, "b": 1}
    # The call and its result can be said back.
    said = [
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "2"},
    ]
    again = server.client().chat.completions.create(
        model="model", tools=TOOLS, **ASKED | {"messages": ASKED["messages"] + said}
    )
    assert again.choices[0].finish_reason == "tool_calls"


def test_a_stream_has_the_content_as_it_comes_and_then_the_call(server: Server) -> None:
    stream = server.client().chat.completions.create(
        model="model", tools=TOOLS, stream=True, **ASKED
    )
    choices = [chunk.choices[0] for chunk in stream]
    assert [choice.delta.content for choice in choices if choice.delta.content] == [*"Yes"]
    calls = [call for choice in choices for call in choice.delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in calls if call.function] == [(0, "add")]
    assert calls[0].id
    assert choices[-1].finish_reason == "tool_calls"
    assert all(choice.finish_reason is None for choice in choices[:-1])


def test_without_tools_or_where_none_may_be_called_an_answer_is_text(server: Server) -> None:
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        [choice] = server.client().chat.completions.create(model="model", **ASKED, **more).choices
        assert choice.finish_reason == "stop"
        assert choice.message.tool_calls is None
        assert choice.message.content == "Yes" + "".join(CALL[1:3])  # special tokens are no text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"tools": TOOLS, "tool_choice": "required"},
            'tool_choice: not supported, got "required"; none and auto are',
        ),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name: missing"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type: input should be 'function'"),
    ],
)
def test_what_a_server_cannot_do_with_tools_is_refused_by_name(
    server: Server, more: dict[str, Any], message: str
) -> None:
    status, answer = server.ask("/v1/chat/completions", {"model": "model", **ASKED, **more})
    assert (status, answer["error"]["message"]) == (400, message)


def test_tools_that_a_template_does_not_show_are_refused(
    serving: Callable[..., Server], models: Path
) -> None:
    server = serving(models / "noise")
    status, answer = server.ask("/v1/chat/completions", {"model": "noise", **ASKED, "tools": TOOLS})
    assert status == 400
    assert "tools" in answer["error"]["message"]
