"""What a conversation says, piece by piece, and where each piece is in the text that a template
writes of it.

While a template runs, texts hold characters of private use. Each spelling of a special token in a
message is replaced by one, and so is each such character: this distinguishes them from the special
tokens that the template writes. And each piece gets a mark, a character of its own, in a second
rendering: where it is in the text, its piece went, however often the same words are there. What
follows from a piece that is not there is in `templates.py`.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lmforge.core.errors import UserError

PRIVATE_USE_CHARACTERS = "[\U000f0000-\U0010ffff]"
FIRST_PLACEHOLDER = 0xF0000
MAX_PLACEHOLDERS = 0xFFFF
FIRST_MARK = 0x100000
MAX_MARKS = 0xFFF0  # up to the marks of generation tags
MARK = re.compile("[\U00100000-\U0010ffef]")
# Where marks are put: at the end of a text, else at its beginning or in it, as some templates ask
# how texts begin or end.
PLACEMENTS = (1.0, 0.0, 0.5)


class TextEscaper:
    """Replaces what `pattern` matches in messages by placeholders, and restores it."""

    def __init__(self, pattern: re.Pattern[str]):
        self._pattern = pattern
        self._placeholders: dict[str, str] = {}

    def escape(self, value: Any) -> Any:
        """A JSON value with all its strings escaped, the names of fields too."""
        return map_leaves(
            value,
            lambda leaf: (
                self._pattern.sub(self._placeholder, leaf) if isinstance(leaf, str) else leaf
            ),
        )

    def unescape(self, text: str) -> str:
        """The text with what was replaced."""
        if not self._placeholders:
            return text
        spellings = {placeholder: spelling for spelling, placeholder in self._placeholders.items()}
        return re.sub(PRIVATE_USE_CHARACTERS, lambda match: spellings.get(match[0], match[0]), text)

    def _placeholder(self, match: re.Match[str]) -> str:
        if len(self._placeholders) >= MAX_PLACEHOLDERS:
            raise UserError(
                f"the messages have more than {MAX_PLACEHOLDERS:,} different private-use characters"
            )
        return self._placeholders.setdefault(
            match[0], chr(FIRST_PLACEHOLDER + len(self._placeholders))
        )


class Piece(NamedTuple):
    """Something that a conversation says: its message's number, -1 for tools and documents; its
    field; and its text with its mark, which is empty for numbers and the like.
    """

    message: int
    field: str
    text: str
    mark: str


class MarkedConversation:
    """The messages, tools and documents (a variable) with a mark in each piece."""

    def __init__(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[Any] | None,
        variables: Mapping[str, Any],
        placement: float,
    ):
        """They are of valid messages. Raises UserError for too many pieces."""
        self._placement = placement
        self.pieces: list[Piece] = []
        self.messages = [self._mark_message(*each) for each in enumerate(messages)]
        # The same words are the same piece, so that what a template looks up by the name of a
        # parameter is there.
        self._known: dict[str, str] = {}
        self.tools = self._mark_schema(tools)
        mark = self._marker(-1, "documents")
        self.variables = dict(variables)
        if isinstance(documents := variables.get("documents"), list):
            self.variables["documents"] = [_mark_document(each, mark) for each in documents]

    def _mark_message(self, number: int, message: dict[str, Any]) -> dict[str, Any]:
        marked = dict(message)
        content = message["content"]
        mark = self._marker(number, "content")
        if isinstance(content, str):
            marked["content"] = mark(content)
        else:
            marked["content"] = [{**part, "text": mark(part["text"])} for part in content]
        if "reasoning_content" in message:
            marked["reasoning_content"] = reasoning = map_leaves(
                message["reasoning_content"], self._marker(number, "reasoning")
            )
            marked["thinking"] = reasoning
        # A tool is known by its call.
        if isinstance(message.get("name"), str) and message["role"] not in (
            "tool",
            "function",
            "observation",
        ):
            marked["name"] = self._marker(number, "name")(message["name"])
        if "tool_calls" in message:
            mark = self._marker(number, "tool calls")
            marked["tool_calls"] = [
                {
                    **call,
                    "function": call["function"]
                    | {
                        key: map_leaves(call["function"][key], mark)
                        for key in ("name", "arguments")
                    },
                }
                for call in message["tool_calls"]
            ]
        return marked

    def _mark_schema(self, value: Any, key: str = "") -> Any:
        """A tool, or a part of one under `key`, with marks in names, descriptions and the values of
        enums.
        """
        if isinstance(value, dict):
            return {
                self._mark_known(name) if key == "properties" else name: self._mark_schema(
                    item, name
                )
                for name, item in value.items()
            }
        if isinstance(value, list):
            return [self._mark_schema(item, key) for item in value]
        if isinstance(value, str) and key in ("name", "description", "enum", "required"):
            return self._mark_known(value)
        return value

    def _mark_known(self, text: str) -> str:
        return self._known.get(text) or self._known.setdefault(
            text, self._marker(-1, "tools")(text)
        )

    def _marker(self, message: int, field: str) -> Callable[[Any], Any]:
        def mark(value: Any) -> Any:
            words = value.strip() if isinstance(value, str) else json.dumps(value)
            if not words:
                return value
            mark = chr(FIRST_MARK + len(self.pieces)) if isinstance(value, str) else ""
            if len(self.pieces) == MAX_MARKS:
                raise UserError(
                    f"the conversation has more than {MAX_MARKS:,} texts, names and values"
                )
            at = round(self._placement * len(words))
            self.pieces.append(Piece(message, field, words[:at] + mark + words[at:], mark))
            return value.replace(words, words[:at] + mark + words[at:]) if mark else value

        return mark


def _mark_document(document: Any, mark: Callable[[Any], Any]) -> Any:
    """Marks in the texts that retrieved documents have in transformers; templates need not show the
    rest.
    """
    if isinstance(document, str):
        return mark(document)
    named = document.items() if isinstance(document, dict) else ()
    texts = {
        key: mark(value)
        for key, value in named
        if key in ("title", "text") and isinstance(value, str)
    }
    return {**document, **texts} if texts else document


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """A JSON value with `change` applied to the names of its fields and to all that is neither an
    object nor a list.
    """
    if isinstance(value, dict):
        return {change(key): map_leaves(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_leaves(item, change) for item in value]
    return change(value)


def find_pieces(pieces: Sequence[Piece], marked: str) -> list[list[int]]:
    """For each piece where its mark is in the text that was rendered, counted without marks; empty
    if the piece is not there.

    White space does not count, nor whether a piece is written as it is or within JSON. A piece
    without a mark may be anywhere.
    """
    compact = "".join(marked.split())
    places = defaultdict(list)
    in_text = (match.start() - before for before, match in enumerate(MARK.finditer(marked)))
    for at, match in zip(in_text, MARK.finditer(compact), strict=True):
        places[match[0]].append((at, match.start()))

    def found(piece: Piece) -> list[int]:
        if not piece.mark:
            return [0] if any(each in compact for each in _spellings(piece.text)) else []
        return [
            at
            for at, index in places[piece.mark]
            if any(
                compact.startswith(each, index - each.index(piece.mark))
                for each in _spellings(piece.text)
            )
        ]

    return [found(piece) for piece in pieces]


def _spellings(text: str) -> Iterator[str]:
    """A text as it is, in JSON, and in JSON within JSON; of a number or the like as Python writes
    it too.
    """
    yield "".join(text.split())
    yield {"true": "True", "false": "False", "null": "None"}.get(text, text)
    for _ in range(2):
        text = json.dumps(text, ensure_ascii=False)[1:-1]
        yield "".join(text.split())


def is_written_as_python(messages: Sequence[dict[str, Any]], text: str) -> bool:
    """Whether a text shows the parts of a content, or arguments, of marked messages as Python does:
    it expected text.
    """
    values = [message["content"] for message in messages if not isinstance(message["content"], str)]
    values += [
        call["function"]["arguments"]
        for message in messages
        for call in message.get("tool_calls", ())
    ]
    return any(value and not isinstance(value, str) and str(value) in text for value in values)
