"""`lmforge chat`: a conversation with a model in the terminal, or over pipes, a line a turn."""

import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from rich.console import Console

from lmforge.core import registry
from lmforge.core.data.order import derive_key
from lmforge.core.errors import UserError
from lmforge.serve.decoding.engine import Engine, GenerationRequest
from lmforge.serve.decoding.model_loading import (
    LoadedModel,
    load_model,
    resolve_device_and_dtype,
    resolve_max_length,
)
from lmforge.serve.decoding.prompts import MAX_PROMPT_BYTES, PromptTooLong, check_room
from lmforge.serve.decoding.text_streamer import TextStreamer
from lmforge.serve.options.models import ChatOptions

# Characters that move a terminal's cursor or change its colours: a model must not send them.
CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
MAX_ANSWERS = 16  # to one turn, as long as they call tools
HELP = """\
/help    show this list
/reset   start a new conversation with the same system prompt
/exit    leave, as does Ctrl-D; Ctrl-C stops an answer"""


class ExitChat(Exception):
    """The user leaves the conversation."""


def run_chat(options: ChatOptions) -> int:
    """Chat until the input ends.

    Raises UserError; in a terminal, errors of a turn are printed and the conversation goes on.
    """
    device, dtype = resolve_device_and_dtype(options.device, options.dtype)
    loaded = load_model(options.model, device, dtype, warn=partial(print, file=sys.stderr))
    session = ChatSession(loaded, options, to_terminal=sys.stdout.isatty())
    interactive = sys.stdin.isatty()
    if interactive:
        print(f"{loaded.path}  (/help lists the commands)", file=sys.stderr)
    read_line = _read_terminal_line if interactive else partial(next, _read_piped_lines(), None)
    while True:
        try:
            line = read_line()
        except KeyboardInterrupt:
            if not interactive:
                raise
            print("\n(/exit or Ctrl-D leaves)", file=sys.stderr)
            continue
        if line is None:
            return 0
        try:
            session.handle_line(line)
        except ExitChat:
            return 0
        except UserError as problem:
            if not interactive:
                raise
            print(f"lmforge: {problem}", file=sys.stderr)


def _read_piped_lines() -> Iterator[str]:
    lines = iter(partial(sys.stdin.buffer.readline, MAX_PROMPT_BYTES + 1), b"")
    for number, line in enumerate(lines, start=1):
        if len(line) > MAX_PROMPT_BYTES:
            raise UserError(
                f"standard input, line {number}: longer than {MAX_PROMPT_BYTES:,} bytes"
            )
        try:
            yield line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise UserError(f"standard input, line {number}: not UTF-8 text") from None


def _read_terminal_line() -> str | None:
    """The next line; None after Ctrl-D."""
    import readline  # noqa: F401 - line editing in input()

    try:
        return input("> ")
    except EOFError:
        print()
        return None


class AnswerReader(Protocol):
    """A reader of tool calls in answers."""

    tools: list[Any]

    def read_answer(self, token_ids: list[int], number: int, ended: bool) -> dict[str, Any]:
        """The message of an answer."""


class ChatTools(Protocol):
    """Tools of a conversation."""

    @property
    def encoder(self) -> AnswerReader:
        """The reader of their calls."""

    def call(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """The messages that the tools return to the calls of an answer."""


class ChatSession:
    """A conversation, and the engine that answers it.

    `turns` are its messages but for the system prompt.
    """

    def __init__(self, loaded: LoadedModel, options: ChatOptions, *, to_terminal: bool) -> None:
        """Raises UserError where the model has no chat template."""
        try:
            loaded.chat_template  # noqa: B018
        except UserError as problem:
            raise UserError(
                f"{options.model}: {problem}; continue a text with lmforge generate {options.model}"
            ) from None
        self._loaded = loaded
        self._options = options
        self._max_length = resolve_max_length(loaded, options.max_length)
        vocab_size = loaded.tokenizer.vocab_size
        self._engine = Engine(
            loaded.model, vocab_size=vocab_size, max_batch_size=1, max_length=self._max_length
        )
        self._sampling = loaded.sampling(
            0.8, temperature=options.temperature, top_k=options.top_k, top_p=options.top_p
        )
        self._seed = secrets.randbelow(2**31) if options.seed is None else options.seed
        self._num_answers = 0
        self.turns: list[dict[str, Any]] = []
        self._tools: ChatTools | None = None
        if options.tools is not None:
            self._tools = registry.get("chat_tools", "environment").build(options.tools, loaded)
        self._to_terminal = to_terminal

    def handle_line(self, line: str) -> None:
        """Carry out a command, or answer a turn.

        Raises UserError, and then leaves the conversation as it was, or ExitChat.
        """
        words = line.split()
        match words[0] if words else "":
            case "":
                return
            case "/help":
                print(HELP, file=sys.stderr)
            case "/reset":
                self.turns = []
            case "/exit":
                raise ExitChat
            case command if command.startswith("/"):
                raise UserError(f"{command}: no such command; /help lists them")
            case _:
                self._add_turn(line)

    def _add_turn(self, text: str) -> None:
        previous = self.turns.copy()
        try:
            self.turns.append({"role": "user", "content": text})
            self._answer()
        except UserError:
            self.turns = previous
            raise

    @property
    def messages(self) -> list[dict[str, Any]]:
        system = []
        if self._options.system:
            system = [{"role": "system", "content": self._options.system}]
        return system + self.turns

    def _answer(self) -> None:
        """Answer the last turn, and the messages of the tools that the answer calls.

        Raises UserError where there is no room for it.
        """
        for _ in range(MAX_ANSWERS):
            answer = self._read(self._stream_answer(self._request()))
            self.turns.append(answer)
            if self._tools is None or not answer.get("tool_calls"):
                return
            for message in self._tools.call(answer):
                self.turns.append(message)
                self._print(f"{message['name']}: {message['content']}\n")
        raise UserError(f"still calls tools after {MAX_ANSWERS} answers")

    def _read(self, streamer: TextStreamer) -> dict[str, Any]:
        if self._tools is None:
            return {"role": "assistant", "content": streamer.text}
        ids = streamer.token_ids
        ended = streamer.finish_reason == "stop" and ids[-1] in self._loaded.chat_stop_ids
        return self._tools.encoder.read_answer(ids, self._num_answers, ended)

    def _request(self) -> GenerationRequest:
        schemas = None
        if self._tools is not None:
            schemas = self._tools.encoder.tools or None
        prompt = self._loaded.chat_template.encode_prompt(self.messages, schemas)
        try:
            available = check_room(len(prompt), self._max_length)
        except PromptTooLong as problem:
            raise PromptTooLong(f"{problem}; use /reset") from None
        self._num_answers += 1
        length = self._options.max_tokens or self._loaded.answer_length(len(prompt), available)
        return GenerationRequest(
            prompt_ids=prompt,
            max_tokens=min(available, length),
            sampling=self._sampling,
            seed=derive_key(self._seed, "answer", self._num_answers),
            stop_token_ids=self._loaded.chat_stop_ids,
        )

    def _stream_answer(self, request: GenerationRequest) -> TextStreamer:
        """Print an answer as it is generated, until it ends or Ctrl-C stops it."""
        streamer = TextStreamer(self._loaded.tokenizer, self._loaded.stop_strings)
        start = time.perf_counter()
        with _deferred_interrupts() as interrupted:
            request_id = self._engine.add_request(request)
            while (
                self._engine.num_unfinished
                and not streamer.finish_reason
                and not interrupted.is_set()
            ):
                for token in self._engine.step():
                    self._print(streamer.add(token.token_id, is_stop=token.finish_reason == "stop"))
            self._engine.cancel(request_id)
            self._print(streamer.finish())
            print(flush=True)
        if self._to_terminal:
            count = len(streamer.token_ids)
            seconds = time.perf_counter() - start
            stopped = ", stopped" if interrupted.is_set() else ""
            note = f"({count} tokens, {count / seconds:.1f} tokens/s{stopped})"
            Console(stderr=True, highlight=False).print(note, style="dim")
        return streamer

    def _print(self, text: str) -> None:
        if self._to_terminal:
            text = CONTROL_CHARACTERS.sub("\N{REPLACEMENT CHARACTER}", text)
        if text:
            print(text, end="", flush=True)


@contextmanager
def _deferred_interrupts() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets, so that the block can stop at a safe point.

    The second raises KeyboardInterrupt.
    """
    interrupted = threading.Event()

    def on_interrupt(number: int, frame: object) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
