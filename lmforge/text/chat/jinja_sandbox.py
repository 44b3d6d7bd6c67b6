"""Runs a chat template's Jinja source as transformers does, in jinja2's sandbox.

The sandbox keeps it from the interpreter.
The result is text, with marks around the parts that the template tags as generated: `templates.py`
makes tokens of it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lmforge.core.errors import UserError

# Markers around what the template tags as generated. Texts that contain one must be escaped first.
GENERATION_START = "\U0010fff0"
GENERATION_END = "\U0010fff1"

# Far above any conversation that a model can read.
MAX_RENDERED_CHARACTERS = 1 << 23
REFUSES = "refuses the conversation"
TOO_LONG = f"wrote more than {MAX_RENDERED_CHARACTERS:,} characters"
MAX_MESSAGE_CHARACTERS = 200

# The number of messages that are rendered, and whether the assistant is then prompted to answer.
Prefix = tuple[int, bool]


class Conversation(NamedTuple):
    """The input of a template.

    prefixes: those of the messages that are rendered. tools: those that are offered. variables: for
    this conversation alone.
    """

    messages: Sequence[Any]
    tools: list[Any] | None
    prefixes: Sequence[Prefix]
    variables: Mapping[str, Any] | None = None


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which surrounds what the model generates.

    transformers has it for `return_assistant_tokens_mask`.
    """

    tags = {"generation"}  # noqa: RUF012  (the library's own type)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        opens = nodes.Output([nodes.TemplateData(GENERATION_START)])
        closes = nodes.Output([nodes.TemplateData(GENERATION_END)])
        return nodes.Scope([opens, *body, closes]).set_lineno(line)


class JinjaTemplate:
    """A compiled template. Threads may render with it at the same time."""

    def __init__(self, source: str, variables: Mapping[str, str], location: str):
        """The template sees `variables`, such as bos_token; messages name its `location`.

        Raises UserError if not Jinja.
        """
        self._location = location
        sandbox = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        sandbox.filters["tojson"] = _tojson
        # The same function for all calls: a conversation and its beginning are rendered alike.
        sandbox.globals |= {
            **variables,
            "raise_exception": _raise_exception,
            "strftime_now": datetime.now().strftime,
        }
        try:
            self._template = sandbox.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            reason = f"line {error.lineno}: {_one_line(error.message or '')}"
            raise UserError(f"{location}: the chat template is not Jinja: {reason}") from None
        except RecursionError:
            raise UserError(f"{location}: the chat template is nested too deeply") from None
        except Exception as error:  # Python's compiler has its own limits
            raise UserError(
                f"{location}: the chat template cannot be compiled: {_one_line(error)}"
            ) from None

    def render(self, conversation: Conversation) -> Iterator[str]:
        """The text of each prefix of a conversation.

        It has GENERATION_START and GENERATION_END around what is tagged. Raises UserError with the
        message of whatever the template raises.
        """
        messages, tools, prefixes, variables = conversation
        for count, add_generation_prompt in prefixes:
            given = {
                "documents": None,
                **(variables or {}),
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
            }
            pieces: list[str] = []
            size = 0
            try:
                for piece in self._template.generate(given | {"messages": messages[:count]}):
                    pieces.append(piece)
                    size += len(piece)
                    if size > MAX_RENDERED_CHARACTERS:
                        _raise_exception(TOO_LONG)
            except MemoryError:
                raise UserError(
                    f"{self._location}: needs too much memory for a conversation"
                ) from None
            except Exception as error:  # a template is a program that can raise anything
                raise UserError(f"{self._location}: {REFUSES}: {_one_line(error)}") from None
            yield "".join(pieces)


def common_prefix_length(one: str, other: str) -> int:
    """The number of characters that the beginnings of two texts share."""
    low = 0
    high = min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if other.startswith(one[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


def first_difference(one: str, other: str) -> str:
    """The place where two texts begin to differ, for a message."""
    at = common_prefix_length(one, other)
    start = max(0, at - 20)
    return f"{one[start : at + 20]!r} against {other[start : at + 20]!r}"


def _one_line(error: object) -> str:
    """The text of an error on one line, cut where it is long: a template can raise any text."""
    text = " ".join(str(error).split()) or repr(error)
    if len(text) <= MAX_MESSAGE_CHARACTERS:
        return text
    return f"{text[:MAX_MESSAGE_CHARACTERS]}… ({len(text):,} characters)"


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(
        value,
        default=str,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
