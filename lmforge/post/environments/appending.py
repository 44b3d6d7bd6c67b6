"""A conversation whose token ids only grow: a prompt, what was sampled, and after it the messages
that an environment answers.

The chat template renders the new messages alone, after a small conversation that stands for what
came before. `check` proves for the template at hand that the ids are then those of the whole
conversation.
"""

import itertools
import json
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from lmforge.core.data.tokenizer import StreamDecoder, Tokenizer
from lmforge.core.errors import UserError, prefix_errors
from lmforge.core.files.untrusted import cut
from lmforge.post.environments.environment import Message, tool_message
from lmforge.text.chat.layout import encode_layouts
from lmforge.text.chat.template_probe import ANSWER, QUESTION
from lmforge.text.chat.templates import ChatTemplate
from lmforge.text.chat.tool_calls import ToolCall, marker_ids, tool_call_format

# How many replies the longest conversations of the check have; of several kinds of replies, all
# sequences are tried.
MAX_REPLIES = 4
MAX_MIXED_REPLIES = 3
MAX_CALLS = 100  # in one answer: their ids have two digits
THOUGHT = "<think>\nHm.\n</think>\n\n"


class TurnEncoder:
    """Prompts, answers and replies of conversations with `tools`, schemas, by a tokenizer's chat
    template.

    tools: their schemas. can_call_twice: whether the template takes several calls in one answer.
    turn_end_ids: the tokens that end an answer which may have a reply, as `check` found them.
    """

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[dict[str, Any]]) -> None:
        """Raises UserError where there is no chat template, or one that knows no tools or calls
        them in an unknown form.
        """
        self._tokenizer = tokenizer
        self.tools = list(tools)
        self._tools = self.tools or None
        self.template = ChatTemplate.from_tokenizer(tokenizer)
        template = self.template.chat_example([_user(), _answer()], tools=self._tools).template
        self._call_format = tool_call_format(template) if tools else None
        self._shown = marker_ids(tokenizer) if tools else frozenset[int]()
        self._thinks = "think" in template.jinja_source
        self._stop_ids = template.stop_ids
        self._tool_name = str(tools[0]["function"]["name"]) if tools else ""
        self._reply_roles: list[str] = []
        self.turn_end_ids = frozenset[int]()
        self.can_call_twice = False
        if tools:
            with suppress(UserError):
                self._split_last([_user(), *_calling(self._tool_name, 2)])
                self.can_call_twice = True

    @cached_property
    def max_token_bytes(self) -> int:
        """The longest text that one token stands for, in bytes of UTF-8."""
        return int(self._tokenizer.token_byte_lengths().max())

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""
        return self._stop_ids | self.turn_end_ids

    def encode_prompt(self, messages: Sequence[Any]) -> list[int]:
        """The ids after which the first answer begins. Raises UserError."""
        return self.template.encode_prompt(messages, self._tools)

    def read_answer(self, ids: Sequence[int], number: int, ended: bool) -> Message:
        """The message that was sampled, with its calls; a call that cannot be read is content.

        `number`: that of the answer, from 0. Of one that has `ended` the last id is the token that
        ended it.
        """
        decoder = StreamDecoder(self._tokenizer, False, self._shown)
        text = "".join(map(decoder.feed, ids[:-1] if ended else ids)) + decoder.finish()
        content, calls = (
            self._call_format.split(text) if self._call_format else (text, list[ToolCall]())
        )
        if not calls or not ended or len(calls) > (MAX_CALLS if self.can_call_twice else 1):
            return {"role": "assistant", "content": text}
        return {
            "role": "assistant",
            "content": content,
            "tool_calls": [_call(*call, number, at) for at, call in enumerate(calls)],
        }

    def encode_reply(self, answer: Message, messages: Sequence[Message]) -> list[int]:
        """The ids of `messages`, which follow an answer that has ended, to where the next answer
        begins.

        Raises UserError where the template does not take them, or `check` has not proved it of
        messages such as these.
        """
        for message in messages:
            if message["role"] not in self._reply_roles:
                raise UserError(
                    f"replied as {cut(repr(message['role']))}; its reply_roles are"
                    f" {', '.join(self._reply_roles)}"
                )
            if not isinstance(message.get("content"), str) or message.keys() & {
                "tool_calls",
                "function_call",
            }:
                raise UserError(f"replied with what is not text alone: {cut(repr(message))}")
        calls = [dict(call) for call in answer.get("tool_calls", ())]
        known = {tool["function"]["name"] for tool in self._tools or ()}
        # What was sampled stays as it is: here only how many calls there are, and of what, counts.
        for call in calls:
            name = call["function"]["name"]
            call["function"] = {
                "name": name if name in known else self._tool_name,
                "arguments": {"a": 1},
            }
        stands_for = (
            {"role": "assistant", "content": "", "tool_calls": calls} if calls else _answer()
        )
        _, _, reply = self._split_last([_user(), stands_for, *messages])
        return reply

    def check(self, kinds: Sequence[str], max_turns: int = 2) -> None:
        """Raises UserError, with the shortest conversation that shows it, unless ids that were
        appended are those of the whole.

        `kinds`: what an environment replies with, "tool", "user" or both; without tools there is no
        "tool". If `max_turns` is 1 nothing is appended, and only calls need to be read.
        """
        if any(kind not in ("tool", "user") for kind in kinds):
            raise UserError(f"reply_roles: expected tool, user or both, got {cut(repr(kinds))}")
        self._reply_roles = [kind for kind in kinds if kind == "user" or self._tools]
        replies = {"tool": [_calling(self._tool_name, 1)], "user": [[_answer(), _user()]]}
        if max_turns == 1:
            self._check_call()
            return
        if self.can_call_twice:
            replies["tool"].append(_calling(self._tool_name, 2))
        turns = [turn for kind in self._reply_roles for turn in replies[kind]]
        waiting: deque[tuple[list[Message], list[int], str, int]] = deque()
        for begin in ([_user()], [{"role": "system", "content": "Help."}, _user()]):
            with suppress(UserError):  # a template that takes no system message says so of the data
                ids = self.encode_prompt(begin)
                waiting += [
                    (begin, ids, thought, 1)
                    for thought in ("", THOUGHT)
                    if self._thinks or not thought
                ]
        longest = MAX_REPLIES if len(turns) < 3 else MAX_MIXED_REPLIES
        while waiting:
            said, ids, thought, count = waiting.popleft()
            for answer, *reply in turns:
                messages = [
                    *said,
                    {**answer, "content": thought + ANSWER if thought else answer["content"]},
                    *reply,
                ]
                whole = self._check_last(messages, ids, len(reply) + 1)
                if count < longest:
                    waiting.append((messages, whole, thought, count + 1))

    def _check_call(self) -> None:
        if self._tools:
            with prefix_errors("the end of a tool call cannot be found with this chat template"):
                _, answer, _ = self._split_last([_user(), _calling(self._tool_name, 1)[0]])
            self.turn_end_ids = frozenset(answer[-1:])

    def _check_last(self, messages: list[Message], before: list[int], size: int) -> list[int]:
        """The ids of a conversation.

        Raises UserError unless they are those `before`, the answer and its reply.
        """
        try:
            prompt, answer, reply = self._split_last(messages)
            if prompt != before:
                raise UserError("the template writes what came before otherwise")
            if reply != self.encode_reply(messages[-size], messages[len(messages) - size + 1 :]):
                raise UserError("the template writes the last messages otherwise after others")
        except UserError as problem:
            roles = ", ".join(_described(message) for message in messages)
            raise UserError(
                f"token ids of a turn cannot be appended with this chat template: {problem};"
                f" shortest conversation: {roles}; use a chat_template.jinja that writes turns"
                " alike wherever they are, or rollout.max_turns = 1"
            ) from None
        self.turn_end_ids |= {answer[-1]}
        return [*prompt, *answer, *reply]

    def _split_last(self, messages: Sequence[Message]) -> tuple[list[int], list[int], list[int]]:
        """The ids before the last answer, of it, and after it to where the next begins."""
        [encoded] = encode_layouts(
            self._tokenizer, [self.template.layout_sampled(messages, self._tools)]
        )
        ids = encoded.tokens.tolist()
        places = encoded.loss_mask.nonzero()[0]
        # Between two answers there is at least the header of the last.
        first = max((b for a, b in itertools.pairwise(places) if b > a + 1), default=places[0])
        return ids[:first], ids[first : places[-1] + 1], ids[places[-1] + 1 :]


def _user() -> Message:
    return {"role": "user", "content": QUESTION}


def _answer() -> Message:
    return {"role": "assistant", "content": ANSWER}


def _calling(name: str, count: int) -> list[Message]:
    """An answer that calls a tool so many times, and what it returned."""
    calls = [_call(name, '{"a": 1}', 0, at) for at in range(count)]
    return [
        {"role": "assistant", "content": "", "tool_calls": calls},
        *(tool_message(call, f"{at}.") for at, call in enumerate(calls)),
    ]


def _call(name: str, arguments: str, number: int, at: int) -> Message:
    """A call; its id has nine letters and digits, as Mistral's templates ask."""
    return {
        "id": f"call{number:03d}{at:02d}",
        "type": "function",
        "function": {"name": name, "arguments": json.loads(arguments)},
    }


def _described(message: Message) -> str:
    notes = []
    if calls := len(message.get("tool_calls", ())):
        notes.append(f"{calls} tool call{'s' * (calls > 1)}")
    if message["content"].startswith(THOUGHT):
        notes.append("that thinks")
    if not notes:
        return message["role"]
    return f"{message['role']} ({', '.join(notes)})"
