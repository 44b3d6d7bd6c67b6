"""The messages of a conversation, checked once: all that comes after may rely on their types.

Reading them from files is in `conversations.py`, making tokens of them in `templates.py`.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product, starmap
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict, get_args

from lmforge.core.errors import UserError, prefix_errors
from lmforge.core.files.untrusted import cut, parse_json, quoted

Role = Literal["system", "developer", "user", "assistant", "tool", "observation", "function"]
# Other names of these roles, for a template that does not know them.
COMMON_ROLES = {"developer": "system", "observation": "tool", "function": "tool"}
# As transformers reads them: the first that is there, under the names of the first and of gpt-oss.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# Fields that say whether a turn is scored, as OpenAI, cookbooks, axolotl and ms-swift write it.
TRAINING_FLAGS = ("weight", "train", "training", "loss")
# The same of parts of a turn, in axolotl.
PARTIAL_FLAGS = ("train_detail", "training_detail")
# Arguments that transformers takes beside the variables of a template.
NO_TEMPLATE_VARIABLES = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "messages",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tools",
}


def unread_variable(given: Mapping[str, Any], sources: str) -> str | None:
    """The first variable that would change what a template writes, and is not in its source."""
    for name, value in given.items():
        # Templates that read enable_thinking think without it as well.
        changes = value and not (name == "enable_thinking" and value is True)
        if changes and name not in sources:
            return name
    return None


class Message(TypedDict):
    """One turn, as in transformers. The `arguments` of a tool call are an object, not its JSON."""

    role: Role
    content: str
    name: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]


class MessageForm(NamedTuple):
    """A form of messages for a template: templates differ in what they read, and do not say it."""

    content: Literal["given", "text", "parts"] = "text"
    rename_roles: bool = False
    arguments: Literal["object", "text"] = "object"


def message_forms(messages: Sequence[Any]) -> Iterator[MessageForm]:
    """The forms that valid messages may take, in the order in which they are tried."""
    has_parts = any(isinstance(message.get("content"), list) for message in messages)
    has_calls = any(
        message.get("tool_calls") or message.get("function_call") for message in messages
    )
    has_others = any(message["role"] in COMMON_ROLES for message in messages)
    contents = ("given", "text", "parts") if has_parts else ("text", "parts")
    renames = (False, True) if has_others else (False,)
    arguments = ("object", "text") if has_calls else ("object",)
    return starmap(MessageForm, product(contents, renames, arguments))


def validate_messages(messages: Sequence[Any], form: MessageForm = MessageForm()) -> list[Message]:  # noqa: B008
    """The messages in a form, with a known role and content that is text.

    Raises UserError for others.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise UserError("expected a list of messages, each with role and content")
    typed = []
    for number, message in enumerate(messages, start=1):
        with prefix_errors(f"message {number}"):
            typed.append(_validate_message(message, form))
    return typed


def training_flag(message: dict[str, Any]) -> bool | None:
    """The flag by which a message says whether it is scored; None where it does not say.

    Raises UserError unless it says yes or no.
    """
    for name in PARTIAL_FLAGS:
        if message.get(name):
            raise UserError(
                f'"{name}": parts of a turn are not scored apart; write them as turns, or leave'
                " it out"
            )
    flags = {name: message[name] for name in TRAINING_FLAGS if message.get(name) is not None}
    for name, value in flags.items():
        if value not in (0, 1):
            raise UserError(
                f'"{name}" is {quoted(value)}: expected 0 or 1, false or true; a turn is scored'
                " or not"
            )
    return all(flags.values()) if flags else None


def check_encodable(text: str) -> str:
    """The text itself.

    Raises UserError if it has half of a surrogate pair, which UTF-8 cannot hold.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(
            "the text has half of a surrogate pair, which UTF-8 cannot encode"
        ) from None
    return text


def parse_embedded_json(text: Any, source: str) -> Any:
    """JSON that is kept as a string within a record or message; `source` names it.

    Raises UserError if it is not JSON.
    """
    if not isinstance(text, str):
        raise UserError(f"{source}: expected JSON in a string, got {type(text).__name__}")
    return parse_json(check_encodable(text).encode(), object, source)


def decode_json_text(value: Any, source: str) -> Any:
    """Decode a value that is kept as JSON text, as some columns of Parquet are.

    Returns any other value itself.
    """
    return parse_embedded_json(value, source) if isinstance(value, str) else value


def _validate_message(message: Any, form: MessageForm) -> Message:
    if not isinstance(message, dict) or "role" not in message:
        raise UserError("expected an object with role and content")
    role = message["role"]
    content = message.get("content")
    calls = message.get("tool_calls") or None
    if role not in get_args(Role):
        raise UserError(f"role {cut(repr(role))}: expected one of {', '.join(get_args(Role))}")
    calls = decode_json_text(calls, "tool_calls")
    if calls and not isinstance(calls, list | tuple):
        raise UserError(f"tool_calls are not a list but {type(calls).__name__}")
    calls = [*(calls or ())]
    if message.get("function_call"):
        calls.append(message["function_call"])
    if message.get("refusal"):
        raise UserError(
            '"refusal": what the assistant says is read from its content; write it there'
        )
    if content is None and (calls or any(map(message.get, REASONING_FIELDS))):
        content = ""
    left_out = ("tool_calls", "function_call", *TRAINING_FLAGS, *PARTIAL_FLAGS)
    typed = {
        key: value for key, value in message.items() if value is not None and key not in left_out
    }
    typed["content"] = _content(content, form)
    training_flag(message)
    if form.rename_roles:
        typed["role"] = COMMON_ROLES.get(role, role)
    reasoning = {field: typed[field] for field in REASONING_FIELDS if typed.get(field)}
    if reasoning:
        first = next(iter(reasoning.values()))
        if any(other != first for other in reasoning.values()):
            raise UserError(f"has different texts under {' and '.join(reasoning)}; keep one")
        typed |= {"thinking": first, "reasoning_content": first}
    if calls:
        typed["tool_calls"] = [_validate_tool_call(call, form) for call in calls]
    return typed  # type: ignore[return-value]


def _content(content: Any, form: MessageForm) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if form.content == "parts" else content
    if content is None:
        raise UserError("the content is null; write what the turn says, or an empty text")
    if not isinstance(content, list) or not all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        raise UserError(f"the content is not text but {type(content).__name__}")
    if any(training_flag(part) is False for part in content):
        raise UserError(
            "parts of a turn are not scored apart; write them as turns, or leave their weight out"
        )
    return "".join(part["text"] for part in content) if form.content == "text" else content


def _validate_tool_call(call: Any, form: MessageForm) -> dict[str, Any]:
    function = None
    with suppress(UserError):  # it is said below what is expected
        call = decode_json_text(call, "a tool call")
        if isinstance(call, dict):
            function = decode_json_text(call.get("function", call), "a tool call")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(
            'a tool call is an object such as {"function": {"name": "...", "arguments": {}}}'
        )
    # Streams of OpenAI's API give no arguments as "".
    given = arguments = function.get("arguments") or {}
    if isinstance(given, str):
        arguments = parse_embedded_json(
            given, f"the arguments of the call of {cut(function['name'])}"
        )
    if form.arguments == "text":
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    identity = {"id": call["id"]} if "id" in call else {}
    return {**identity, "type": "function", "function": {**function, "arguments": arguments}}


def read_messages(value: Any, left_out: Collection[str]) -> Any:
    """The messages in a field, without the fields `left_out`.

    Messages may be kept as JSON text, as some columns of Parquet are. Other values stay as they
    are.
    """
    with suppress(UserError):
        value = _decode_messages(value)
    if not (left_out and isinstance(value, list)):
        return value

    def without(message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        return {key: item for key, item in message.items() if key not in left_out}

    return [without(each) for each in value]


def _decode_messages(value: Any) -> Any:
    """The messages in JSON text, or in a list of texts; any other value itself. Raises UserError."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts:
        return value
    if not all(isinstance(each, str) and each[:1] in ("[", "{") for each in texts):
        return value
    decoded = [parse_embedded_json(each, "") for each in texts]
    if isinstance(value, str):
        [decoded] = decoded
    if not isinstance(decoded, list):
        return value
    for each in decoded:
        if not isinstance(each, dict) or not {"role", "from"} & each.keys():
            return value
    return decoded
