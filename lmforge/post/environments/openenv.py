"""Environments of OpenEnv, by the address of their server: `openenv:http://HOST:PORT`.

The package `openenv` has the client.

A server whose tools are those of the Model Context Protocol offers these; any other has one tool,
`step`, whose parameters are the fields of its action. Observations are JSON.
"""

import json
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import parse_json
from lmforge.post.environments.environment import Environment, Message, Reply, tool_message
from lmforge.serve import http_call

# Fields of every observation that are no words for the model, and of every action that no model
# fills in.
OWN_FIELDS = ("done", "reward", "metadata")
REQUEST_SECONDS = 30.0
MAX_SCHEMA_BYTES = 1 << 20


class OpenEnvironment(Environment):
    """A session with a server. The reward of an episode is the sum of those of its steps."""

    reply_roles = ("tool",)

    def __init__(self, url: str) -> None:
        """Raises UserError where the package is missing or nothing answers at the address."""
        try:
            from openenv.core import GenericEnvClient
        except ImportError:
            raise UserError("needs the package openenv, which is not installed here") from None
        try:
            answer = http_call.call(
                f"{url}/schema", None, {}, seconds=REQUEST_SECONDS, max_bytes=MAX_SCHEMA_BYTES
            )
            if answer.status != 200:
                raise ValueError(f"/schema: status {answer.status}")
            action = parse_json(answer.content, dict[str, Any], url, max_bytes=MAX_SCHEMA_BYTES)[
                "action"
            ]
            self._client = GenericEnvClient(base_url=url).sync()
            self._client.connect()
        except (OSError, HTTPException, ValueError, KeyError) as problem:
            raise UserError(
                f"no server of OpenEnv answers: {str(problem) or type(problem).__name__}"
            ) from None
        self._mcp = "tool_name" in action.get("properties", {})
        if self._mcp:
            self._client.reset()
            found = self._client.step({"type": "list_tools"}).observation["tools"]
            tools = [
                (tool["name"], tool["description"], tool.get("input_schema") or tool["inputSchema"])
                for tool in found
            ]
        else:
            fields = {
                name: each for name, each in action["properties"].items() if name not in OWN_FIELDS
            }
            needed = [name for name in action.get("required", ()) if name in fields]
            parameters = {"type": "object", "properties": fields, "required": needed}
            tools = [("step", action.get("description", "Act."), parameters)]
        self._schemas = [
            {
                "type": "function",
                "function": {"name": name, "description": about, "parameters": parameters},
            }
            for name, about, parameters in tools
        ]

    def tool_schemas(self) -> list[dict[str, Any]]:
        return self._schemas

    def reset(self, **row: Any) -> Sequence[Message]:
        """The messages of the row's prompt; the first observation ends the last of them."""
        messages = list(row.pop("prompt"))
        said = _describe(self._client.reset(**row).observation)
        if said:
            messages[-1] = {
                **messages[-1],
                "content": "\n".join(filter(None, [messages[-1]["content"], said])),
            }
        return messages

    def step(self, message: Message) -> Reply:
        replies = list[Message]()
        rewards = list[float]()
        done = False
        self.failed_calls = 0
        calls = message.get("tool_calls", ())
        for call in calls:
            name = call["function"]["name"]
            arguments = call["function"]["arguments"]
            action = (
                {"type": "call_tool", "tool_name": name, "arguments": arguments}
                if self._mcp
                else arguments
            )
            try:
                result = self._client.step(action)
                if error := result.observation.get("error"):
                    raise RuntimeError(error["message"] if self._mcp else error)
            except RuntimeError as problem:  # such as an action that is none
                self.failed_calls += 1
                replies.append(tool_message(call, str({"error": str(problem)})))
                continue
            said = (
                result.observation["result"]["data"] if self._mcp else _describe(result.observation)
            )
            replies.append(tool_message(call, str(said)))
            if result.reward is not None:
                rewards.append(float(result.reward))
            done = done or result.done
        return Reply(replies, sum(rewards) if rewards else None, done or not calls)

    def close(self) -> None:
        self._client.close()


def _describe(observation: dict[str, Any]) -> str:
    """An observation without what every one has; of one field its text alone."""
    fields = {
        name: value
        for name, value in observation.items()
        if name not in OWN_FIELDS and value is not None
    }
    if not fields:
        return ""
    if len(fields) == 1:
        return str(next(iter(fields.values())))
    return json.dumps(fields, ensure_ascii=False)
