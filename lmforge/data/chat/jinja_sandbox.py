"""Runs a chat template's Jinja source as transformers does, in a sandbox with bounds on its size, loops and output.

The result is text, with marks around the parts that the template tags as generated. `templates.py` makes tokens of it and
decides whether the template can be trained on.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lmforge.errors import UserError

# These surround what the template tags as the model's; texts that contain one must be escaped before.
GENERATION_START, GENERATION_END = "\U0010fff0", "\U0010fff1"

# Far above any template and conversation that a model can read: only a template that never ends reaches them.
MAX_TEMPLATE_CHARACTERS = 1 << 20
MAX_RENDERED_CHARACTERS = 1 << 26
MAX_LOOP_ITERATIONS = 10_000_000


class _TemplateError(jinja2.TemplateError):
    """Raised by a template's `raise_exception`, and where it exceeds a bound."""


class _GenerationTag(Extension):
    """`{% generation %}` surrounds what the model generates (transformers' `return_assistant_tokens_mask`)."""

    tags = {"generation"}  # noqa: RUF012  (the library's own type)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        opens, closes = (nodes.Output([nodes.TemplateData(mark)]) for mark in (GENERATION_START, GENERATION_END))
        return nodes.Scope([opens, *body, closes]).set_lineno(line)


class _BoundedSandbox(ImmutableSandboxedEnvironment):
    """A sandbox that bounds loops and products; the library's own bounds only `range`."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.iterations = 0
        self.filters["tojson"] = _tojson
        self.filters["_counted"] = self._count_iterations
        self.globals["raise_exception"] = _raise_exception

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for times, thing in ((left, right), (right, left)):
            if operator == "**" or (isinstance(times, int) and isinstance(thing, str | list | tuple) and times > 1000):
                raise _TemplateError(f"multiplies with {operator} beyond what a template needs")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None).set_lineno(loop.lineno)
            loop.iter.set_environment(self)
        return tree

    def _count_iterations(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.iterations += 1
            if self.iterations > MAX_LOOP_ITERATIONS:
                raise _TemplateError(f"its loops ran {MAX_LOOP_ITERATIONS:,} times")
            yield item


class JinjaTemplate:
    """A compiled chat template. `has_generation_tags`: it marks by `{% generation %}` what the model generates."""

    def __init__(self, source: str, variables: Mapping[str, str], location: str):
        """The template sees `variables`, such as bos_token; messages name its `location`. Raises UserError if not Jinja."""
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise UserError(f"{location}: {len(source):,} characters of chat template: more than {MAX_TEMPLATE_CHARACTERS:,}")
        self._location = location
        self._sandbox = _BoundedSandbox()
        # The same function for all calls: a conversation and its beginning are rendered alike.
        self._sandbox.globals |= {**variables, "strftime_now": datetime.now().strftime}
        try:
            self._template = self._sandbox.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"{location}: the chat template is not Jinja: line {error.lineno}: {error.message}") from None
        self.has_generation_tags = "generation" in source and any(
            GENERATION_START in data.data for data in self._sandbox.parse(source).find_all(nodes.TemplateData)
        )

    def render(self, messages: list[Any], tools: list[Any] | None, add_generation_prompt: bool) -> str:
        """The text of a conversation, with GENERATION_START and GENERATION_END around what is tagged.

        Raises UserError with the message of whatever the template raises.
        """
        self._sandbox.iterations = 0
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(
                messages=messages, tools=tools, documents=None, add_generation_prompt=add_generation_prompt
            ):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_RENDERED_CHARACTERS:
                    raise _TemplateError(f"wrote more than {MAX_RENDERED_CHARACTERS:,} characters")
        except Exception as error:  # a template is a program that can raise anything
            raise UserError(f"{self._location}: refuses the conversation: {error or repr(error)}") from None
        return "".join(pieces)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateError(message)
