"""Tool calls in the text of an answer, in the formats that models are trained to write.

A template's own format is found by letting it render a call. What is written is a stranger's: a call that cannot be read is
text.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from lmforge.data.chat.messages import check_encodable
from lmforge.data.chat.template_probe import PROBE_TOOLS
from lmforge.data.chat.templates import ChatTemplate, build_layouts, one_layout
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import UserError
from lmforge.untrusted import parse_json

MAX_CALL_CHARACTERS = 2**16
# Special tokens of some tokenizers, which are part of calls.
MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>")


class ToolCall(NamedTuple):
    """The name of a function, and its arguments: an object as JSON."""

    name: str
    arguments: str


class UnreadableCall(Exception):
    """What begins like a call is none."""


@dataclass(frozen=True)
class ToolCallFormat:
    """marker: what every call comes after. bare: what an answer begins with that is nothing but calls, without a marker.

    read: the calls in the text from there on. Raises UnreadableCall.
    """

    marker: str
    bare: str
    read: Callable[[str], list[ToolCall]]

    def find(self, text: str, ended: bool = True) -> int:
        """Where calls begin, or the length of the text; if it has not `ended`, where they may begin."""
        begin = len(text) - len(text.lstrip())
        if self.bare and text[begin : begin + 1] == self.bare:
            return begin
        if self.bare and begin == len(text) and not ended:
            return 0
        start = text.find(self.marker)
        if start >= 0 or ended:
            return start if start >= 0 else len(text)
        begun = (size for size in range(len(self.marker) - 1, 0, -1) if text.endswith(self.marker[:size]))
        return len(text) - next(begun, 0)

    def split(self, text: str) -> tuple[str, list[ToolCall]]:
        """An answer as its content and its calls; without calls where one cannot be read."""
        start = self.find(text)
        try:
            calls = self.read(text[start : start + MAX_CALL_CHARACTERS]) if start < len(text) else []
        except UnreadableCall:
            calls = []
        return (text[:start].rstrip(), calls) if calls else (text, [])


def tool_call_format(template: ChatTemplate) -> ToolCallFormat:
    """The format of the calls that a template renders. Raises UserError where it renders none, or in no form that is known."""
    probe = ToolCall("probe_tool", '{"probe_key": "a value"}')
    function = {"name": probe.name, "arguments": json.loads(probe.arguments)}
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "call00000", "type": "function", "function": function}]}
    example = template.chat_example([{"role": "user", "content": "a"}, call], tools=PROBE_TOOLS)
    names = {special.id: text for text, special in template.specials.by_text.items()}
    parts = [""]
    for part in one_layout(next(build_layouts([example]))):
        if isinstance(part, tuple):
            parts.append(names[part[0]] * part[1])
        else:
            parts.append("".join(text for text, is_scored in part if is_scored))
    answer = "".join(list(filter(None, parts))[:-1])  # without the token that ends the turn
    known = (each for each in FORMATS if each.split(answer)[1] == [probe])
    if found := next(known, None):
        return found
    raise UserError("the model's chat template writes tool calls in no form that is known")


class AnswerReader:
    """The text of an answer as it comes, cut into content and, at its end, tool calls. Without a format all is content."""

    def __init__(self, call_format: ToolCallFormat | None) -> None:
        self._format, self._text, self._num_returned = call_format, "", 0

    def add(self, text: str, ended: bool) -> tuple[str, list[ToolCall]]:
        """The content that is certain with this text, and, once the answer has `ended`, its calls."""
        if self._format is None:
            return text, []
        self._text += text
        content, calls = self._format.split(self._text) if ended else (self._text[: self._format.find(self._text, False)], [])
        piece = content[self._num_returned :]
        self._num_returned += len(piece)
        return piece, calls


def marker_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """The special tokens that are part of calls."""
    ids = (tokenizer.token_to_id(marker) for marker in MARKERS)
    return frozenset(id for id in ids if id is not None) & tokenizer.all_special_ids


def _call(value: Any, *keys: str) -> ToolCall:
    """A call from an object with a name and its arguments under one of these keys."""
    if isinstance(value, dict) and isinstance(name := value.get("name"), str) and name:
        arguments: Any = next((value[key] for key in keys if key in value), {})
        if isinstance(arguments, dict):
            try:  # neither half of a surrogate pair nor a number that is not finite, which no JSON holds
                return ToolCall(
                    check_encodable(name), check_encodable(json.dumps(arguments, ensure_ascii=False, allow_nan=False))
                )
            except (UserError, TypeError, ValueError) as problem:
                raise UnreadableCall from problem
    raise UnreadableCall


def _json(text: str) -> Any:
    try:
        return parse_json(text.encode(), object, "a call", max_bytes=4 * MAX_CALL_CHARACTERS, error=UnreadableCall)
    except (UserError, UnicodeEncodeError) as problem:
        raise UnreadableCall from problem


def _read_hermes(text: str) -> list[ToolCall]:
    """<tool_call>{"name": …, "arguments": {…}}</tool_call>, one after another (Hermes 2, Qwen 2.5 and 3)."""
    blocks = re.split(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, flags=re.S)
    if any(between.strip() for between in blocks[::2]):
        raise UnreadableCall
    return [_call(_json(block), "arguments", "parameters") for block in blocks[1::2]]


def _read_mistral(text: str) -> list[ToolCall]:
    """[TOOL_CALLS][{"name": …, "arguments": {…}}, …], or since 2025 [TOOL_CALLS]name[ARGS]{…} for each."""
    calls: list[ToolCall] = []
    for block in text.split("[TOOL_CALLS]")[1:]:
        if named := re.fullmatch(r"\s*([\w.-]+)(?:\[CALL_ID\]\w*)?\s*(?:\[ARGS\])?\s*(\{.*\})\s*", block, re.S):
            calls.append(_call({"name": named[1], "arguments": _json(named[2])}, "arguments"))
            continue
        values = _json(block)
        calls += [_call(value, "arguments") for value in (values if isinstance(values, list) else [values])]
    return calls


def _read_llama(text: str) -> list[ToolCall]:
    """{"name": …, "parameters": {…}}, several with semicolons or line ends between them (Llama 3)."""
    return [_call(value, "parameters", "arguments") for value in _json_values(text.removeprefix("<|python_tag|>"))]


def _json_values(text: str) -> Iterator[Any]:
    decoder, text = json.JSONDecoder(), text.strip()
    while text:
        try:
            _, end = decoder.raw_decode(text)
        except (ValueError, RecursionError) as problem:
            raise UnreadableCall from problem
        yield _json(text[:end])
        text = text[end:].lstrip().removeprefix(";").lstrip()


def _read_pythonic(text: str) -> list[ToolCall]:
    """[name(key=value, …), …] in Python's literals (Llama 4, and smaller Llama 3.2)."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else []
        return [_call(_keywords(each), "arguments") for each in calls] or [_call(None)]
    except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError) as problem:
        raise UnreadableCall from problem


def _keywords(call: ast.expr) -> dict[str, Any]:
    if not isinstance(call, ast.Call) or call.args or any(each.arg is None for each in call.keywords):
        raise UnreadableCall
    arguments = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    return {"name": ast.unparse(call.func), "arguments": arguments}


FORMATS = (
    ToolCallFormat("<tool_call>", "", _read_hermes),
    ToolCallFormat("[TOOL_CALLS]", "", _read_mistral),
    ToolCallFormat("<|python_tag|>", "{", _read_llama),
    ToolCallFormat("<|python_tag|>", "[", _read_pythonic),
)
