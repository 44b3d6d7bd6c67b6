"""The content of a conversation, piece by piece, and its places in the text of a template.

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
# The places of marks: at the end of a text, else at its beginning or in it, as some templates ask
# how texts begin or end.
PLACEMENTS = (1.0, 0.0, 0.5)


class TextEscaper:
    """Replaces what `pattern` matches in messages by placeholders, and restores it."""

    def __init__(self, pattern: re.Pattern[str]):
        self._pattern = pattern
        self._placeholders: dict[str, str] = {}

    def escape(self, value: Any) -> Any:
        """A JSON value with all its strings escaped, the names of fields too."""

        def escape_leaf(leaf: Any) -> Any:
            return self._pattern.sub(self._placeholder, leaf) if isinstance(leaf, str) else leaf

        return map_leaves(value, escape_leaf)

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
        placeholder = chr(FIRST_PLACEHOLDER + len(self._placeholders))
        return self._placeholders.setdefault(match[0], placeholder)


class Piece(NamedTuple):
    """A part of a conversation's content.

    message: its message's number, -1 for tools and documents. text: with its `mark`, which is empty
    for numbers and the like.
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
        """Mark valid messages. Raises UserError for too many pieces."""
        self._placement = placement
        self.pieces: list[Piece] = []
        self.messages = [self._mark_message(*each) for each in enumerate(messages)]
        # The same words are the same piece, so that what a template looks up by the name of a
        # parameter is there.
        self._known: dict[str, str] = {}
        self.tools = self._mark_schema(tools)
        mark = self._marker(-1, "documents")
        self.variables = dict(variables)
        documents = variables.get("documents")
        if isinstance(documents, list):
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
            mark = self._marker(number, "reasoning")
            marked["reasoning_content"] = map_leaves(message["reasoning_content"], mark)
            marked["thinking"] = marked["reasoning_content"]
        # A tool is known by its call.
        is_tool = message["role"] in ("tool", "function", "observation")
        if isinstance(message.get("name"), str) and not is_tool:
            marked["name"] = self._marker(number, "name")(message["name"])
        if "tool_calls" in message:
            mark = self._marker(number, "tool calls")
            marked["tool_calls"] = []
            for call in message["tool_calls"]:
                function = dict(call["function"])
                for key in ("name", "arguments"):
                    function[key] = map_leaves(function[key], mark)
                marked["tool_calls"].append({**call, "function": function})
        return marked

    def _mark_schema(self, value: Any, key: str = "") -> Any:
        """A tool, or a part of one under `key`, with marks.

        They are in names, descriptions and the values of enums.
        """
        if isinstance(value, dict):
            mark_name = self._mark_known if key == "properties" else str
            return {mark_name(name): self._mark_schema(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [self._mark_schema(item, key) for item in value]
        if isinstance(value, str) and key in ("name", "description", "enum", "required"):
            return self._mark_known(value)
        return value

    def _mark_known(self, text: str) -> str:
        if text not in self._known:
            self._known[text] = self._marker(-1, "tools")(text)
        return self._known[text]

    def _marker(self, message: int, field: str) -> Callable[[Any], Any]:
        def mark(value: Any) -> Any:
            words = value.strip() if isinstance(value, str) else json.dumps(value)
            if not words:
                return value
            if len(self.pieces) == MAX_MARKS:
                raise UserError(
                    f"the conversation has more than {MAX_MARKS:,} texts, names and values"
                )
            if not isinstance(value, str):
                self.pieces.append(Piece(message, field, words, ""))
                return value
            mark = chr(FIRST_MARK + len(self.pieces))
            at = round(self._placement * len(words))
            marked = words[:at] + mark + words[at:]
            self.pieces.append(Piece(message, field, marked, mark))
            return value.replace(words, marked)

        return mark


def _mark_document(document: Any, mark: Callable[[Any], Any]) -> Any:
    """A document with marks in the texts that retrieved documents have in transformers.

    Templates need not show the rest.
    """
    if isinstance(document, str):
        return mark(document)
    if not isinstance(document, dict):
        return document
    marked = dict(document)
    for key, value in document.items():
        if key in ("title", "text") and isinstance(value, str):
            marked[key] = mark(value)
    return marked


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """A JSON value with `change` applied to its leaves.

    These are the names of its fields, and all that is neither an object nor a list.
    """
    if isinstance(value, dict):
        return {change(key): map_leaves(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_leaves(item, change) for item in value]
    return change(value)


def find_pieces(pieces: Sequence[Piece], marked: str) -> list[list[int]]:
    """The places of each piece's mark in the rendered text, counted without marks.

    There are none if the piece is not there. White space does not count, nor whether a piece is
    written as it is or within JSON. A piece without a mark may be anywhere.
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
    """A text as it is, in JSON, and in JSON within JSON; numbers and the like as Python's too."""
    yield "".join(text.split())
    yield {"true": "True", "false": "False", "null": "None"}.get(text, text)
    for _ in range(2):
        text = json.dumps(text, ensure_ascii=False)[1:-1]
        yield "".join(text.split())


def is_written_as_python(messages: Sequence[dict[str, Any]], text: str) -> bool:
    """Return True where a text shows parts of a content, or arguments, as Python writes them.

    They are of marked messages, and the template expected text.
    """
    values = [message["content"] for message in messages if not isinstance(message["content"], str)]
    values += [
        call["function"]["arguments"]
        for message in messages
        for call in message.get("tool_calls", ())
    ]
    return any(value and not isinstance(value, str) and str(value) in text for value in values)
