"""Messages as OpenAI's chat API has them, from and to those of environments."""

import json
from typing import Any

from lmforge.post.environments.environment import Message, WrongReturn, tool_message


def read_message(message: dict[str, Any], names: dict[str, str]) -> Message:
    """A message of OpenAI's API as ours, of what chat templates know.

    `names`: of tools by the ids of their calls, to which its own are added. Raises WrongReturn
    where it is not text.
    """
    role = message["role"]
    content = message.get("content") or ""
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise WrongReturn("its harness sent a message that is not text alone")
        content = "".join(part["text"] for part in content)
    if role == "tool":
        call = {
            "id": message["tool_call_id"],
            "function": {"name": names.get(message["tool_call_id"], "")},
        }
        return tool_message(call, content)
    plain = {"role": "system" if role == "developer" else role, "content": content}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_read_call(call) for call in calls]
        names.update((call["id"], call["function"]["name"]) for call in calls)
    return plain


def _read_call(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": call["function"]["name"], "arguments": arguments},
    }


def completion_of(message: Message, model: str, *, streamed: bool) -> dict[str, Any]:
    """A message of the assistant as OpenAI's API sends it, or as the one event of a stream."""
    said = {"role": "assistant", "content": message["content"]}
    if calls := message.get("tool_calls"):
        said["tool_calls"] = [
            {
                **call,
                "index": at,
                "function": {
                    **call["function"],
                    "arguments": json.dumps(call["function"]["arguments"]),
                },
            }
            for at, call in enumerate(calls)
        ]
    finish = "tool_calls" if calls else "stop"
    return {
        "id": "lmforge",
        "object": "chat.completion.chunk" if streamed else "chat.completion",
        "created": 0,
        "model": model,
        "choices": [
            {"index": 0, "delta" if streamed else "message": said, "finish_reason": finish}
        ],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }
