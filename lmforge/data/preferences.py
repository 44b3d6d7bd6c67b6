"""Files of preferences and of prompts: pairs of answers, answers with a label, and questions to be answered.

What an objective makes of them is not said here. An answer is everything after the prompt, and its prompt is never scored.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lmforge.data.conversations import Example, Reading, renamed_records, tools_of, turns_of
from lmforge.data.layout import Layout, encode_layouts
from lmforge.data.messages import Message, typed_messages
from lmforge.data.templates import ChatTemplate
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import Mistake

# Where the last answer begins in a conversation that is written as one text (Anthropic's hh-rlhf).
SPEAKER = "\n\nAssistant:"
# Where a prompt may be in its record; whatever else is there is a column.
ASKED = ("prompt", "messages")


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, each with the prompt before it. margin: by how much the chosen one is better, if known."""

    chosen: Example
    rejected: Example
    margin: float = 0.0


@dataclass(frozen=True)
class Labelled:
    """An answer with its prompt, and whether it is a good one."""

    example: Example
    good: bool


@dataclass(frozen=True)
class Prompt:
    """What is to be answered: int32 `tokens` after which the answer begins, what they were, and the record's other columns."""

    tokens: np.ndarray
    prompt: str | list[Message]
    columns: dict[str, Any]


@dataclass
class Tally:
    """What became of the records of files of prompts, counted while they are read."""

    records: int = 0
    kept: int = 0
    too_long: int = 0

    def __str__(self) -> str:
        left_out = f", {self.too_long:,} left out as too long" if self.too_long else ""
        return f"{self.kept:,} of {self.records:,} records{left_out}"


def read_pairs(
    path: str | Path,
    tokenizer: Tokenizer,
    *,
    template: ChatTemplate | None = None,
    as_chat: bool = False,
    margins: bool = False,
    fields: Mapping[str, str] | None = None,
) -> Iterator[Pair]:
    """Records {prompt, chosen, rejected}, or {chosen, rejected} of whole conversations that begin alike.

    Strings go as they are and end with the separator, unless `as_chat` makes turns of them. With `margins` the
    number that a record has as its `margin` is kept with it. Mistake naming the record where there is no prompt, no answer, or
    no difference. The rest as in read_conversations.
    """
    reading = Reading(tokenizer, template, fields or {})

    def laid_out() -> Iterator[tuple[float, list[Layout]]]:
        for place, record in reading.records(path):
            try:
                yield _margin(record) if margins else 0.0, _pair(record, reading, as_chat)
            except Mistake as error:
                raise Mistake(f"{place}: {error}") from None

    for margin, sides in reading.encoded(laid_out()):
        chosen, rejected = map(Example.of, sides)
        yield Pair(chosen, rejected, margin)


def read_labelled(
    path: str | Path,
    tokenizer: Tokenizer,
    *,
    template: ChatTemplate | None = None,
    as_chat: bool = False,
    fields: Mapping[str, str] | None = None,
) -> Iterator[Labelled]:
    """Records {prompt, completion, label} of true or false labels, as KTO wants them; the rest as in read_pairs."""
    reading = Reading(tokenizer, template, fields or {})

    def laid_out() -> Iterator[tuple[bool, list[Layout]]]:
        for place, record in reading.records(path):
            try:
                _require(record, "prompt", "completion", "label")
                if record["label"] not in (True, False):
                    raise Mistake(f"the label is {record['label']!r}: expected true or false")
                yield bool(record["label"]), [_answer(record["prompt"], record["completion"], record, reading, as_chat)]
            except Mistake as error:
                raise Mistake(f"{place}: {error}") from None

    for good, [rendered] in reading.encoded(laid_out()):
        yield Labelled(Example.of(rendered), good)


def read_prompts(
    path: str | Path,
    tokenizer: Tokenizer,
    *,
    template: ChatTemplate | None = None,
    as_chat: bool = False,
    fields: Mapping[str, str] | None = None,
    length: int | None = None,
    tally: Tally | None = None,
) -> Iterator[Prompt]:
    """Records {prompt, ...columns}: a string as it is, or `as_chat` as a user's turn; or messages, of which a last answer
    is left off. Prompts of more than `length` tokens are dropped, and counted in `tally`.
    """
    reading, tally = Reading(tokenizer, template, fields or {}), tally or Tally()
    for place, record in reading.records(path):
        tally.records += 1
        try:
            prompt = _prompt(record, as_chat)
            if isinstance(prompt, str):
                [(_, [rendered])] = reading.encoded([(None, [reading.plain([(prompt, False)], ended=False)])])
                tokens = rendered.tokens
            else:
                tokens = reading.chat().prompt(prompt, tools_of(record))
        except Mistake as error:
            raise Mistake(f"{place}: {error}") from None
        if length is not None and len(tokens) > length:
            tally.too_long += 1
            continue
        tally.kept += 1
        yield Prompt(np.array(tokens, np.int32), prompt, _columns(record))


def encode_answers(
    tokenizer: Tokenizer, prompts: Sequence[Any], completions: Sequence[str], tools: Sequence[Any] | None = None
) -> list[list[int]]:
    """Ids of each prompt, a text or messages, with its completion, to the end of that turn or text; `tools` are those that the
    prompt was asked with. Raises Mistake."""
    reading = Reading(tokenizer)
    records = [{"tools": each} if each else {} for each in tools or [None] * len(prompts)]
    asked = zip(prompts, completions, records, strict=True)
    layouts = [_answer(prompt, completion, record, reading, as_chat=False) for prompt, completion, record in asked]
    return [rendered.tokens for rendered in encode_layouts(tokenizer, layouts)]


def prompt_columns(path: str | Path, fields: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The columns of each record of prompts, with its place."""
    for place, record in renamed_records(path, fields):
        yield place, _columns(record)


def _columns(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in ASKED}


def _prompt(record: dict[str, Any], as_chat: bool) -> str | list[Message]:
    if "prompt" in record or "messages" not in record:
        _require(record, "prompt")
        if isinstance(record["prompt"], str) and not as_chat:
            if not record["prompt"]:
                raise Mistake("the prompt is empty")
            return str(record["prompt"])
        return typed_messages(turns_of(record["prompt"], "user"))
    messages = typed_messages(turns_of(record["messages"], "user"))
    return messages[:-1] if messages[-1]["role"] == "assistant" else messages


def _pair(record: dict[str, Any], reading: Reading, as_chat: bool) -> list[Layout]:
    _require(record, "chosen", "rejected")
    sides = [record["chosen"], record["rejected"]]
    if sides[0] == sides[1]:
        raise Mistake("chosen and rejected are equal: there is nothing to prefer")
    prompt = record.get("prompt")
    if all(isinstance(side, list) and side for side in sides):
        sides = [turns_of(side, "assistant") for side in sides]
        if any(typed_messages(side)[0]["role"] != "assistant" for side in sides):
            # The whole conversation on either side, whether or not its prompt is told beside.
            shared = _agree(*sides)
            prompt, sides = sides[0][:shared], [side[shared:] for side in sides]
            if not shared or any(not side or typed_messages(side)[0]["role"] != "assistant" for side in sides):
                raise Mistake("chosen and rejected differ before the answer: expected the same turns, then other answers")
    elif prompt is None and all(isinstance(side, str) for side in sides):
        starts = {side[: side.rfind(SPEAKER) + len(SPEAKER)] for side in sides if SPEAKER in side}
        if len(starts) != 1:
            raise Mistake(f"no prompt: expected a field 'prompt', or texts that are alike up to the last {SPEAKER!r}")
        [prompt] = starts
        sides = [side[len(prompt) :] for side in sides]
    return [_answer(prompt, side, record, reading, as_chat) for side in sides]


def _margin(record: dict[str, Any]) -> float:
    margin = record.get("margin")
    if margin is None:
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise Mistake(f"the margin is {margin!r}: expected a number")
    return float(margin)


def _answer(prompt: Any, completion: Any, record: dict[str, Any], reading: Reading, as_chat: bool) -> Layout:
    """A prompt and what was answered, the answer scored."""
    if isinstance(prompt, str | None) and isinstance(completion, str) and not as_chat:
        if not prompt:
            raise Mistake("the prompt is empty")
        return reading.plain([(prompt, False), (completion, True)])
    if prompt is None:
        raise Mistake("no field 'prompt', and no conversation that both sides share")
    before = turns_of(prompt, "user")
    return reading.chat().lay_out(
        [*before, *turns_of(completion, "assistant")], "assistant", tools_of(record), since=len(before)
    )


def _agree(chosen: list[Any], rejected: list[Any]) -> int:
    """How many messages two conversations have in common at their beginning."""
    return next(
        (at for at, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), min(len(chosen), len(rejected))
    )


def _require(record: dict[str, Any], *names: str) -> None:
    for name in names:
        if name not in record:
            raise Mistake(f"no field {name!r}: there are {', '.join(sorted(record))}: name it with fields")
