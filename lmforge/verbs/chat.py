"""`lmforge chat`: a conversation with a model in the terminal, or over pipes, a line a turn."""

import json
import os
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lmforge.config.verbs import ChatOptions
from lmforge.data.chat.templates import ChatTemplate
from lmforge.data.order import derive_key
from lmforge.errors import UserError
from lmforge.generate.engine import Engine, GenerationRequest
from lmforge.generate.model_loading import LoadedModel, load_model, resolve_device_and_dtype, resolve_max_length
from lmforge.generate.sampling import SamplingParams
from lmforge.generate.text_streamer import TextStreamer

# What moves a terminal's cursor or changes its colours, and is not the model's to send.
CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
HELP = """\
/help            this list
/reset           forget the conversation, but for what /system said
/undo            forget the last turn
/retry           another answer to the last turn
/system TEXT     what the model is told before the conversation; without TEXT, nothing
/temperature X   0 is greedy
/save FILE       write the conversation to a new file, as training reads it
/exit            leave; so does Ctrl-D. Ctrl-C stops an answer"""


class ExitChat(Exception):
    """The conversation is over."""


def run_chat(options: ChatOptions) -> int:
    """Talk until the input ends. Raises UserError; at a terminal, one that a turn brings is told and the talk goes on."""
    device, dtype = resolve_device_and_dtype(options.device, options.dtype)
    opened = load_model(options.model, device, dtype, warn=partial(print, file=sys.stderr))
    try:
        template = ChatTemplate.from_tokenizer(opened.tokenizer)
    except UserError as problem:
        raise UserError(f"{options.model}: {problem}; lmforge generate {options.model} continues a text with it") from None
    at_terminal = sys.stdin.isatty()
    talk = ChatSession(opened, template, options, to_terminal=sys.stdout.isatty())
    if at_terminal:
        print(f"{opened.path}  (/help lists what else can be said)", file=sys.stderr)
    for line in _read_terminal_lines() if at_terminal else _read_piped_lines():
        try:
            talk.handle_line(line)
        except ExitChat:
            break
        except UserError as problem:
            if not at_terminal:
                raise
            print(f"lmforge: {problem}", file=sys.stderr)
    return 0


def _read_piped_lines() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            yield line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise UserError(f"standard input, line {number}: not UTF-8 text") from None


def _read_terminal_lines() -> Iterator[str]:
    import readline  # noqa: F401 - what input() edits lines with

    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D leaves)", file=sys.stderr)


class ChatSession:
    """What was said, and the engine that answers, a row wide."""

    def __init__(self, loaded: LoadedModel, template: ChatTemplate, options: ChatOptions, *, to_terminal: bool) -> None:
        self._loaded = loaded
        self._template = template
        self._max_tokens = options.max_tokens
        self._max_length = resolve_max_length(loaded, options.max_length)
        vocab_size = loaded.tokenizer.vocab_size
        self._engine = Engine(loaded.model, vocab_size=vocab_size, max_batch_size=1, max_length=self._max_length)
        self._sampling = SamplingParams(options.temperature, options.top_k, options.top_p)
        self._seed = secrets.randbelow(2**31) if options.seed is None else options.seed
        self._num_answers = 0
        self._system = options.system
        self._turns: list[dict[str, Any]] = []
        self._to_terminal = to_terminal
        self._use_colors = to_terminal and "NO_COLOR" not in os.environ
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: print(HELP, file=sys.stderr),
            "/reset": lambda _: self._turns.clear(),
            "/undo": lambda _: self._drop_messages(2),
            "/retry": self._retry,
            "/system": self._set_system,
            "/temperature": self._set_temperature,
            "/save": self._save,
            "/exit": self._exit,
        }

    def handle_line(self, line: str) -> None:
        """A line that was typed: a command, or something to be answered. Raises UserError, with all as it was, and Leave."""
        word, _, rest = line.strip().partition(" ")
        before = self._turns.copy()
        try:
            if word.startswith("/"):
                if word not in self._commands:
                    raise UserError(f"{word}: no such command; /help lists them")
                self._commands[word](rest.strip())
            elif word:
                self._turns.append({"role": "user", "content": line})
                self._answer()
        except UserError:
            self._turns = before
            raise

    @property
    def _messages(self) -> list[dict[str, Any]]:
        told = [{"role": "system", "content": self._system}] if self._system else []
        return told + self._turns

    def _answer(self) -> None:
        """Write an answer to the last turn. Raises UserError where there is no room for one."""
        prompt = self._template.encode_prompt(self._messages)
        room = self._max_length - len(prompt)
        if room < 1:
            raise UserError(
                f"the conversation has {len(prompt)} tokens, and there is room for {self._max_length}, an answer included;"
                " /undo or /reset makes room"
            )
        self._num_answers += 1
        text = self._stream_answer(
            GenerationRequest(
                prompt_ids=prompt,
                max_tokens=min(room, self._max_tokens or room),
                sampling=self._sampling,
                seed=derive_key(self._seed, "answer", self._num_answers),
                stop_token_ids=self._loaded.stop_token_ids | self._template.stop_ids | {self._loaded.tokenizer.eos_token_id},
            )
        )
        self._turns.append({"role": "assistant", "content": text})

    def _stream_answer(self, request: GenerationRequest) -> str:
        """Print an answer as it comes, until it ends or Ctrl-C stops it; returns its text."""
        writer = TextStreamer(self._loaded.tokenizer, ())
        begun = time.perf_counter()
        number = self._engine.add_request(request)
        with _deferred_interrupts() as stopped:
            while self._engine.num_unfinished and not stopped.is_set():
                for token in self._engine.step():
                    self._print(writer.add(token.token_id, is_stop=token.finish_reason == "stop"))
        self._engine.cancel(number)
        self._print(writer.finish())
        print(flush=True)
        if self._to_terminal:
            count, seconds = len(writer.token_ids), time.perf_counter() - begun
            note = f"({count} tokens, {count / seconds:.1f} tokens/s{', stopped' if stopped.is_set() else ''})"
            print(f"\x1b[2m{note}\x1b[0m" if self._use_colors else note, file=sys.stderr)
        return writer.text

    def _print(self, piece: str) -> None:
        if piece:
            print(
                CONTROL_CHARACTERS.sub("\N{REPLACEMENT CHARACTER}", piece) if self._to_terminal else piece, end="", flush=True
            )

    def _drop_messages(self, count: int) -> None:
        if not self._turns:
            raise UserError("nothing has been said yet")
        del self._turns[-count:]

    def _retry(self, _: str) -> None:
        self._drop_messages(1)
        self._answer()

    def _set_system(self, text: str) -> None:
        self._system = text or None

    def _set_temperature(self, text: str) -> None:
        try:
            temperature = float(text)
        except ValueError:
            temperature = -1.0
        if not 0 <= temperature < float("inf"):
            raise UserError(f"/temperature {text}".rstrip() + ": expected a number of at least 0")
        self._sampling = replace(self._sampling, temperature=temperature)

    def _save(self, name: str) -> None:
        if not name:
            raise UserError("/save: needs the name of a file")
        try:
            with open(Path(name).expanduser(), "x", encoding="utf-8") as file:
                file.write(json.dumps({"messages": self._messages}, ensure_ascii=False) + "\n")
        except FileExistsError:
            raise UserError(f"{name}: is there already; name another file") from None
        except OSError as problem:
            raise UserError(f"{name}: {problem.strerror}") from None

    def _exit(self, _: str) -> None:
        raise ExitChat


@contextmanager
def _deferred_interrupts() -> Iterator[threading.Event]:
    """Ctrl-C is noted, for whoever is at a point where it can stop; pressed again it interrupts as it always does."""
    pressed = threading.Event()

    def press(number: int, frame: object) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
