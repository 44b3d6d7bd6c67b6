"""Tool calls in the text of an answer, in the formats that models are trained to write.

A template's own format is found by letting it render a call. What is written is a stranger's: a
call that cannot be read is text.
"""

import ast
import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import parse_json
from lmforge.text.chat.messages import check_encodable
from lmforge.text.chat.template_probe import PROBE_TOOLS
from lmforge.text.chat.templates import ChatTemplate, build_layouts, one_layout

MAX_CALL_CHARACTERS = 2**16
# Special tokens of some tokenizers, which are part of calls.
MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>")

# Possessive, so that no text is gone through more than once. Python's parser takes quadratic time
# for strings with an f.
NEXT_VALUE = re.compile(r"\s*+;?+\s*+(?=\S)")
STRING = re.compile(r"""(?s)(?<!\w)(\w{0,2})('{3}|"{3}|['"])(?:\\.|(?!\2).)*+(?:\2|\Z)|\#[^\n]*+""")


class ToolCall(NamedTuple):
    """The name of a function, and its arguments: an object as JSON."""

    name: str
    arguments: str


class UnreadableCall(Exception):
    """Raised where a text begins like a call and is none."""


@dataclass(frozen=True)
class ToolCallFormat:
    """A format of calls.

    marker: the text that every call comes after. bare: the beginning of an answer that is nothing
    but calls, without a marker.
    read: returns the calls in the text from there on. Raises UnreadableCall.
    """

    marker: str
    bare: str
    read: Callable[[str], list[ToolCall]]

    def find(self, text: str, ended: bool = True, begun: bool = False) -> int:
        """The offset at which calls begin, or the length of the text.

        If the text has not `ended`, that is where they may begin. `begun`: content came before it.
        """
        if self.bare and not begun:
            begin = len(text) - len(text.lstrip())
            if text.startswith(self.bare, begin):
                return begin
        start = text.find(self.marker)
        if start >= 0:
            return start
        if not ended:
            for size in range(len(self.marker) - 1, 0, -1):
                if text.endswith(self.marker[:size]):
                    return len(text) - size
        return len(text)

    def split(self, text: str, begun: bool = False) -> tuple[str, list[ToolCall]]:
        """An answer as its content and its calls; without calls where one cannot be read."""
        start = self.find(text, begun=begun)
        if start < len(text):
            with suppress(UnreadableCall):
                calls = self.read(text[start : start + MAX_CALL_CHARACTERS])
                if calls:
                    return text[:start].rstrip(), calls
        return text, []


def tool_call_format(template: ChatTemplate) -> ToolCallFormat:
    """The format of the calls that a template renders.

    Raises UserError where it renders none, or in no form that is known.
    """
    probe = ToolCall("probe_tool", '{"probe_key": "a value"}')
    function = {"name": probe.name, "arguments": json.loads(probe.arguments)}
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00000", "type": "function", "function": function}],
    }
    example = template.chat_example([{"role": "user", "content": "a"}, call], tools=PROBE_TOOLS)
    names = {special.id: text for text, special in template.specials.by_text.items()}
    parts: list[str] = []
    for part in one_layout(next(build_layouts([example]))):
        if isinstance(part, list):
            parts.append("".join(text for text, is_scored in part if is_scored))
        elif part[1]:
            parts.append(names[part[0]])
    *begin, _ = [part for part in parts if part]  # the last one ends the turn
    answer = "".join(begin)
    for each in FORMATS:
        if each.split(answer)[1] == [probe]:
            return each
    raise UserError("the model's chat template writes tool calls in no form that is known")


class AnswerReader:
    """The text of an answer as it comes, cut into content and, at its end, tool calls.

    Without a format all is content.
    """

    def __init__(self, call_format: ToolCallFormat | None) -> None:
        self._format = call_format
        self._held: list[str] = []
        self._begun = False  # content was returned
        self._calls = False  # what is held are calls, if they can be read

    def add(self, text: str, ended: bool) -> tuple[str, list[ToolCall]]:
        """The content that is certain with this text, and the calls of an answer that `ended`."""
        if self._format is None:
            return text, []
        self._held.append(text)
        # Calls may follow white space.
        if not ended and (self._calls or not (self._begun or text.strip())):
            return "", []
        held = "".join(self._held)
        if ended:
            return self._format.split(held, self._begun)
        start = self._format.find(held, False, self._begun)
        self._held = [held[start:]]
        self._calls = held.startswith(
            tuple(filter(None, (self._format.marker, self._format.bare))), start
        )
        self._begun |= bool(held[:start].strip())
        return held[:start], []


def marker_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """The special tokens that are part of calls."""
    ids = (tokenizer.token_to_id(marker) for marker in MARKERS)
    return frozenset(id for id in ids if id is not None) & tokenizer.all_special_ids


def _call(value: Any, *keys: str) -> ToolCall:
    """A call from an object with a name and its arguments under one of these keys."""
    if not isinstance(value, dict):
        raise UnreadableCall
    name = value.get("name")
    arguments: Any = next((value[key] for key in keys if key in value), {})
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise UnreadableCall
    # Neither half of a surrogate pair nor a number that is not finite, which no JSON holds.
    try:
        encoded = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        return ToolCall(check_encodable(name), check_encodable(encoded))
    except (UserError, TypeError, ValueError) as problem:
        raise UnreadableCall from problem


def _json(text: str) -> Any:
    try:
        return parse_json(
            text.encode(), object, "a call", max_bytes=4 * MAX_CALL_CHARACTERS, error=UnreadableCall
        )
    except (UserError, UnicodeEncodeError) as problem:
        raise UnreadableCall from problem


def _read_hermes(text: str) -> list[ToolCall]:
    """Read calls of Hermes 2, Qwen 2.5 and 3, one after another.

    A call is <tool_call>{"name": …, "arguments": {…}}</tool_call>.
    """
    blocks = re.split(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, flags=re.S)
    if any(between.strip() for between in blocks[::2]):
        raise UnreadableCall
    return [_call(_json(block), "arguments", "parameters") for block in blocks[1::2]]


def _read_mistral(text: str) -> list[ToolCall]:
    """Read calls of Mistral's models.

    They are [TOOL_CALLS][{"name": …, "arguments": {…}}, …], or since 2025 [TOOL_CALLS]name[ARGS]{…}
    for each.
    """
    calls: list[ToolCall] = []
    for block in text.split("[TOOL_CALLS]")[1:]:
        header, brace, arguments = block.partition("{")
        name, _, identity = header.strip().removesuffix("[ARGS]").rstrip().partition("[CALL_ID]")
        if brace and re.fullmatch(r"[\w.-]+", name) and re.fullmatch(r"\w*", identity):
            calls.append(_call({"name": name, "arguments": _json(brace + arguments)}, "arguments"))
            continue
        values = _json(block)
        if not isinstance(values, list):
            values = [values]
        calls += [_call(value, "arguments") for value in values]
    return calls


def _read_llama(text: str) -> list[ToolCall]:
    """Read calls of Llama 3, with semicolons or line ends between several.

    A call is {"name": …, "parameters": {…}}.
    """
    text = text.removeprefix("<|python_tag|>")
    decoder = json.JSONDecoder()
    calls = []
    at = 0
    while found := NEXT_VALUE.match(text, at):
        try:
            _, at = decoder.raw_decode(text, found.end())
        except (ValueError, RecursionError) as problem:
            raise UnreadableCall from problem
        calls.append(_call(_json(text[found.end() : at]), "parameters", "arguments"))
    return calls


def _read_pythonic(text: str) -> list[ToolCall]:
    """Read [name(key=value, …), …] in Python's literals (Llama 4, and smaller Llama 3.2)."""
    if any("f" in prefix.lower() for prefix, _ in STRING.findall(text)):  # which is no literal
        raise UnreadableCall
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            raise UnreadableCall
        calls = []
        for call in tree.elts:
            if not isinstance(call, ast.Call) or call.args:
                raise UnreadableCall
            if any(each.arg is None for each in call.keywords):
                raise UnreadableCall
            arguments = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
            named = {"name": ast.unparse(call.func), "arguments": arguments}
            calls.append(_call(named, "arguments"))
        return calls
    except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError) as problem:
        raise UnreadableCall from problem


FORMATS = (
    ToolCallFormat("<tool_call>", "", _read_hermes),
    ToolCallFormat("[TOOL_CALLS]", "", _read_mistral),
    ToolCallFormat("<|python_tag|>", "{", _read_llama),
    ToolCallFormat("<|python_tag|>", "[", _read_pythonic),
)
