"""An environment's tools in `lmforge chat`."""

from typing import Any

from lmforge.core.errors import UserError
from lmforge.post.environments.appending import TurnEncoder
from lmforge.post.environments.environment import tool_message
from lmforge.post.environments.process import EnvironmentPool
from lmforge.serve.decoding.model_loading import LoadedModel


class ChatTools:
    """Tools of a conversation, in a process of their own."""

    def __init__(self, spec: str, loaded: LoadedModel) -> None:
        """Raises UserError where they cannot be used, or the chat template knows no tools."""
        self.pool = EnvironmentPool(spec)
        declared = self.pool.declarations.get("")
        if declared is None or declared.reply_roles != ["tool"]:
            raise UserError(
                f"--tools {spec}: an environment with turns of its own; name a function, or a class"
                " of tools"
            )
        self.encoder = TurnEncoder(loaded.tokenizer, declared.tools)
        self._begin()

    def _begin(self) -> None:
        [begun] = self.pool.reset([{"prompt": [{"role": "user", "content": ""}]}])
        if begun.error:
            raise UserError(f"--tools {self.pool.spec}: {begun.error}")

    def call(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """What the tools return to the calls of an answer. Tools that have failed begin anew."""
        reply = self.pool.step({0: answer})[0]
        if not reply.error:
            return list(reply.messages)
        self._begin()
        return [tool_message(call, str({"error": reply.error})) for call in answer["tool_calls"]]
