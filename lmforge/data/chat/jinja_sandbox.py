"""Runs a chat template's Jinja source as transformers does: lmforge's own in this process, a foreign one in a child process.

jinja2's sandbox keeps a template from the interpreter, and the child's bounds of time and memory keep it from the run. The
result is text, with marks around the parts that the template tags as generated: `templates.py` makes tokens of it. There is one
child for each process that renders, started when it is first needed; it ends when its standard input closes, and so with its
owner. macOS does not limit the memory of a process: there only the time is bounded.
"""

import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache, lru_cache
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lmforge.errors import UserError
from lmforge.foreign_code import JsonLineProcess, ProcessLost, encode_line, python_command

# Markers around what the template tags as generated. Texts that contain one must be escaped first.
GENERATION_START, GENERATION_END = "\U0010fff0", "\U0010fff1"

# Far above any conversation that a model can read.
MAX_RENDERED_CHARACTERS = 1 << 23
REFUSES = "refuses the conversation"
TOO_LONG = f"wrote more than {MAX_RENDERED_CHARACTERS:,} characters"
MAX_MESSAGE_CHARACTERS = 200
# A request to the child has conversations with so many prefixes, or one with more, whose time is longer in proportion.
PREFIXES_PER_REQUEST = 64
CPU_SECONDS = 5
WALL_SECONDS = 30.0  # longer, for a busy machine
START_SECONDS = 120.0  # in addition, for an interpreter on a network's file system that many ranks start at once
MEMORY_BYTES = 2 << 30

# How many of the messages are rendered, and whether the assistant is then prompted for its answer.
Prefix = tuple[int, bool]
# For each prefix how much of the text before it begins its text, and the rest; at last (None, error) if there is one.
_Answer = list[tuple[int | None, str]]


class Conversation(NamedTuple):
    """What is rendered: prefixes of messages, with the tools that are offered, and variables for this conversation alone."""

    messages: Sequence[Any]
    tools: list[Any] | None
    prefixes: Sequence[Prefix]
    variables: Mapping[str, Any] | None = None


class _GenerationTag(Extension):
    """`{% generation %}` surrounds what the model generates (transformers' `return_assistant_tokens_mask`)."""

    tags = {"generation"}  # noqa: RUF012  (the library's own type)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        opens, closes = (nodes.Output([nodes.TemplateData(mark)]) for mark in (GENERATION_START, GENERATION_END))
        return nodes.Scope([opens, *body, closes]).set_lineno(line)


class JinjaTemplate:
    """A template that is compiled and runs in this process, without bounds of time and memory."""

    def __init__(self, source: str, variables: Mapping[str, str], location: str):
        """The template sees `variables`, such as bos_token; messages name its `location`. Raises UserError if not Jinja."""
        self._location = location
        sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        sandbox.filters["tojson"] = _tojson
        # The same function for all calls: a conversation and its beginning are rendered alike.
        sandbox.globals |= {**variables, "raise_exception": _raise_exception, "strftime_now": datetime.now().strftime}
        try:
            self._template = sandbox.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            reason = f"line {error.lineno}: {_one_line(error.message or '')}"
            raise UserError(f"{location}: the chat template is not Jinja: {reason}") from None
        except RecursionError:
            raise UserError(f"{location}: the chat template is nested too deeply") from None
        except Exception as error:  # Python's compiler has its own limits
            raise UserError(f"{location}: the chat template cannot be compiled: {_one_line(error)}") from None

    def render(self, conversations: Iterable[Conversation]) -> Iterator[Iterator[str]]:
        """The text of each prefix of each conversation, with GENERATION_START and GENERATION_END around what is tagged.

        The texts raise UserError with the message of whatever the template raises.
        """
        return map(self._texts, conversations)

    def _texts(self, conversation: Conversation) -> Iterator[str]:
        messages, tools, prefixes, variables = conversation
        for count, add_generation_prompt in prefixes:
            given = {"documents": None, **(variables or {}), "tools": tools, "add_generation_prompt": add_generation_prompt}
            pieces: list[str] = []
            size = 0
            try:
                for piece in self._template.generate(given | {"messages": messages[:count]}):
                    pieces.append(piece)
                    size += len(piece)
                    if size > MAX_RENDERED_CHARACTERS:
                        _raise_exception(TOO_LONG)
            except MemoryError:
                raise UserError(f"{self._location}: needs too much memory for a conversation") from None
            except Exception as error:  # a template is a program that can raise anything
                raise UserError(f"{self._location}: {REFUSES}: {_one_line(error)}") from None
            yield "".join(pieces)


class ForeignTemplate:
    """A template that is compiled and runs in the child. Threads and forked processes may use it at any time."""

    def __init__(self, source: str, variables: Mapping[str, str], location: str):
        """As of JinjaTemplate; compiled when it first renders."""
        self._arguments = (source, json.dumps(variables), location)

    def render(self, conversations: Iterable[Conversation]) -> Iterator[Iterator[str]]:
        """As of JinjaTemplate. Raises UserError too where the template exceeds its bounds or crashes the child."""
        remaining = iter(conversations)
        while batch := list(_first_prefixes(remaining)):
            try:
                answers: Iterable[_Answer] = _renderer(os.getpid()).request(self._arguments, batch)
            except UserError:
                if len(batch) == 1:
                    raise
                # One of them is at fault, or all together take too long.
                answers = (_renderer(os.getpid()).request(self._arguments, [each])[0] for each in batch)
            yield from map(_texts, answers)


def _first_prefixes(conversations: Iterator[Conversation]) -> Iterator[Conversation]:
    """As many conversations as a request takes, at least one if there is one."""
    count = 0
    for conversation in conversations:
        yield conversation
        count += len(conversation.prefixes)
        if count >= PREFIXES_PER_REQUEST:
            return


def _texts(answer: _Answer) -> Iterator[str]:
    text = ""
    for same, rest in answer:
        if same is None:
            raise UserError(rest)
        text = text[:same] + rest
        yield text


class _Renderer:
    """The child of a process, which renders for one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: JsonLineProcess | None = None

    def request(self, template: tuple[str, str, str], conversations: list[Conversation]) -> list[_Answer]:
        """The answer for each conversation. Raises UserError, after which another child is started for the next request."""
        scale = max(1, sum(len(each.prefixes) for each in conversations) // PREFIXES_PER_REQUEST)
        cpu_seconds, wall_seconds = CPU_SECONDS * scale, WALL_SECONDS * scale
        with self._lock:
            try:
                if self._process is None or self._process.closed:
                    self._process = JsonLineProcess(python_command(__name__, str(MEMORY_BYTES)), capture_stderr=True)
                    wall_seconds += START_SECONDS
                request = [cpu_seconds, template, conversations]
                answers: list[_Answer] = self._process.request(request, wall_seconds, default=str)["answers"]
                return answers
            except TimeoutError:
                reason = f"needs more than {wall_seconds:g} seconds for a conversation: correct the template"
            except RecursionError:
                reason = "the messages of a conversation are nested too deeply: correct the data"
            except OSError as error:
                reason = f"no process can be started to render it: {error.strerror}"
            except ProcessLost as lost:
                assert self._process is not None
                status = self._process.returncode
                if status == -signal.SIGXCPU:
                    reason = f"needs more than {cpu_seconds} seconds for a conversation: correct the template"
                else:
                    reason = f"cannot be rendered: {lost} (status {status}): correct the template"
        raise UserError(f"{template[2]}: {reason}")


@cache
def _renderer(pid: int) -> _Renderer:
    """The child of process `pid`, the caller: a forked process has another than its parent."""
    return _Renderer()


# --- in the child --------------------------------------------------------------------------------------------------------


def main() -> None:
    """Answer requests until the input closes. The argument is the limit of memory in bytes."""
    for limit, amount in ((resource.RLIMIT_AS, int(sys.argv[1])), (resource.RLIMIT_CORE, 0)):
        _set_soft_limit(limit, amount)
    for line in sys.stdin.buffer:
        cpu_seconds, template, conversations = json.loads(line)
        _set_soft_limit(resource.RLIMIT_CPU, int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2])) + 1 + cpu_seconds)
        answers = [_answer(template, Conversation(*each)) for each in conversations]
        sys.stdout.buffer.write(encode_line({"answers": answers}))
        sys.stdout.buffer.flush()


@lru_cache(maxsize=16)
def _compiled(source: str, variables: str, location: str) -> JinjaTemplate:
    return JinjaTemplate(source, json.loads(variables), location)


def _answer(template: list[str], conversation: Conversation) -> _Answer:
    answer: _Answer = []
    before, size = "", 0
    try:
        [texts] = _compiled(*template).render([conversation])
        for text in texts:
            same = common_prefix_length(before, text)
            answer.append((same, text[same:]))
            before, size = text, size + len(text) - same
            if size > MAX_RENDERED_CHARACTERS:
                raise UserError(f"{template[2]}: {TOO_LONG}")
    except UserError as error:
        answer.append((None, str(error)))
    return answer


def _set_soft_limit(limit: int, amount: int) -> None:
    hard = resource.getrlimit(limit)[1]
    with suppress(ValueError, OSError):  # not every system limits memory
        resource.setrlimit(limit, (amount if hard == resource.RLIM_INFINITY else min(amount, hard), hard))


def common_prefix_length(one: str, other: str) -> int:
    """How many characters the beginnings of two texts share."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if other.startswith(one[low:middle], low) else (low, middle - 1)
    return low


def first_difference(one: str, other: str) -> str:
    """Where two texts begin to differ, for a message."""
    at = common_prefix_length(one, other)
    start = max(0, at - 20)
    return f"{one[start : at + 20]!r} against {other[start : at + 20]!r}"


def _one_line(error: object) -> str:
    """The text of an error on one line, cut where it is long: a template can raise any text."""
    text = " ".join(str(error).split()) or repr(error)
    return text if len(text) <= MAX_MESSAGE_CHARACTERS else f"{text[:MAX_MESSAGE_CHARACTERS]}… ({len(text):,} characters)"


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
