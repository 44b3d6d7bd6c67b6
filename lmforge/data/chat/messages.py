"""The messages of a conversation, checked once: everything that comes after may rely on their types.

Reading them from files is in `conversations.py`, making tokens of them in `templates.py`.
"""

from collections.abc import Sequence
from typing import Any, Literal, NotRequired, TypedDict, get_args

from lmforge.errors import UserError, prefix_errors
from lmforge.untrusted import cut, parse_json

Role = Literal["system", "developer", "user", "assistant", "tool"]


class Message(TypedDict):
    """One turn, as in transformers. The `arguments` of a tool call are an object, not its JSON."""

    role: Role
    content: str
    name: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]


def validate_messages(messages: Sequence[Any]) -> list[Message]:
    """The messages with a known role, text as content and objects as arguments of calls. Raises UserError for others."""
    if not isinstance(messages, list | tuple) or not messages:
        raise UserError("expected a list of messages, each with role and content")
    typed = []
    for number, message in enumerate(messages, start=1):
        with prefix_errors(f"message {number}"):
            typed.append(_validate_message(message))
    return typed


def check_encodable(text: str) -> str:
    """The text itself. Raises UserError if it has half of a surrogate pair, which UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError("the text has half of a surrogate pair, which UTF-8 cannot encode") from None
    return text


def parse_embedded_json(text: Any, source: str) -> Any:
    """JSON that is kept as a string within a record or message; `source` names it. Raises UserError if it is not JSON."""
    if not isinstance(text, str):
        raise UserError(f"{source}: expected JSON in a string, got {type(text).__name__}")
    return parse_json(check_encodable(text).encode(), object, source)


def _validate_message(message: Any) -> Message:
    if not isinstance(message, dict) or "role" not in message:
        raise UserError("expected an object with role and content")
    role, content, calls = message["role"], message.get("content"), message.get("tool_calls")
    if role not in get_args(Role):
        raise UserError(f"role {cut(repr(role))}: expected one of {', '.join(get_args(Role))}")
    if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        content = "".join(part["text"] for part in content)
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise UserError(f"the content is not text but {type(content).__name__}")
    if calls and not isinstance(calls, list | tuple):
        raise UserError(f"tool_calls are not a list but {type(calls).__name__}")
    typed = {key: value for key, value in message.items() if value is not None} | {"content": content}
    if calls:
        typed["tool_calls"] = [_validate_tool_call(call) for call in calls]
    return typed  # type: ignore[return-value]


def _validate_tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError('a tool call is an object such as {"function": {"name": "...", "arguments": {}}}')
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = parse_embedded_json(arguments, f"the arguments of the call of {cut(function['name'])}")
    identity = {"id": call["id"]} if "id" in call else {}
    return {**identity, "type": "function", "function": {**function, "arguments": arguments}}
