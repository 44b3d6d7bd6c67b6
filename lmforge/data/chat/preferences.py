"""Files of preferences and of prompts: pairs of answers, answers with a label, and questions to be answered.

What an objective makes of them is not said here. An answer is everything after the prompt, and its prompt is never scored.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lmforge.data.chat.conversations import RecordEncoder, TokenizedExample, read_renamed_records, record_tools, to_messages
from lmforge.data.chat.layout import Layout, encode_layouts
from lmforge.data.chat.messages import Message, validate_messages
from lmforge.data.chat.templates import ChatTemplate
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import UserError

# Where the last answer begins in a conversation that is written as one text (Anthropic's hh-rlhf).
HH_RLHF_ANSWER_MARKER = "\n\nAssistant:"
# Where a prompt may be in its record; whatever else is there is a column.
PROMPT_FIELDS = ("prompt", "messages")


@dataclass(frozen=True)
class PreferencePair:
    """Two answers to one prompt, each with the prompt before it. margin: by how much the chosen one is better, if known."""

    chosen: TokenizedExample
    rejected: TokenizedExample
    margin: float = 0.0


@dataclass(frozen=True)
class UnpairedPreference:
    """An answer with its prompt, and whether it is a good one."""

    example: TokenizedExample
    desirable: bool


@dataclass(frozen=True)
class TokenizedPrompt:
    """What is to be answered: int32 `tokens` after which the answer begins, what they were, and the record's other columns."""

    tokens: np.ndarray
    prompt: str | list[Message]
    columns: dict[str, Any]


@dataclass
class PromptCounts:
    """What became of the records of files of prompts, counted while they are read."""

    records: int = 0
    kept: int = 0
    overlong: int = 0

    def __str__(self) -> str:
        left_out = f", {self.overlong:,} left out as too long" if self.overlong else ""
        return f"{self.kept:,} of {self.records:,} records{left_out}"


def read_preference_pairs(
    path: str | Path,
    tokenizer: Tokenizer,
    *,
    template: ChatTemplate | None = None,
    apply_chat_template: bool = False,
    with_margins: bool = False,
    fields: Mapping[str, str] | None = None,
) -> Iterator[PreferencePair]:
    """Records {prompt, chosen, rejected}, or {chosen, rejected} of whole conversations that begin alike.

    Strings go as they are and end with the separator, unless `as_chat` makes turns of them. With `margins` the
    number that a record has as its `margin` is kept with it. UserError naming the record where there is no prompt, no answer, or
    no difference. The rest as in read_conversations.
    """
    reading = RecordEncoder(tokenizer, template, fields or {})

    def laid_out() -> Iterator[tuple[float, list[Layout]]]:
        for place, record in reading.iter_records(path):
            try:
                yield _parse_margin(record) if with_margins else 0.0, _pair_layouts(record, reading, apply_chat_template)
            except UserError as error:
                raise UserError(f"{place}: {error}") from None

    for margin, sides in reading.encode(laid_out()):
        chosen, rejected = map(TokenizedExample.from_encoded, sides)
        yield PreferencePair(chosen, rejected, margin)


def read_unpaired_preferences(
    path: str | Path,
    tokenizer: Tokenizer,
    *,
    template: ChatTemplate | None = None,
    apply_chat_template: bool = False,
    fields: Mapping[str, str] | None = None,
) -> Iterator[UnpairedPreference]:
    """Records {prompt, completion, label} of true or false labels, as KTO wants them; the rest as in read_pairs."""
    reading = RecordEncoder(tokenizer, template, fields or {})

    def laid_out() -> Iterator[tuple[bool, list[Layout]]]:
        for place, record in reading.iter_records(path):
            try:
                _require_fields(record, "prompt", "completion", "label")
                if record["label"] not in (True, False):
                    raise UserError(f"the label is {record['label']!r}: expected true or false")
                yield (
                    bool(record["label"]),
                    [_completion_layout(record["prompt"], record["completion"], record, reading, apply_chat_template)],
                )
            except UserError as error:
                raise UserError(f"{place}: {error}") from None

    for good, [rendered] in reading.encode(laid_out()):
        yield UnpairedPreference(TokenizedExample.from_encoded(rendered), good)


def read_prompts(
    path: str | Path,
    tokenizer: Tokenizer,
    *,
    template: ChatTemplate | None = None,
    apply_chat_template: bool = False,
    fields: Mapping[str, str] | None = None,
    max_prompt_length: int | None = None,
    counts: PromptCounts | None = None,
) -> Iterator[TokenizedPrompt]:
    """Records {prompt, ...columns}: a string as it is, or `as_chat` as a user's turn; or messages, of which a last answer
    is left off. Prompts of more than `length` tokens are dropped, and counted in `tally`.
    """
    reading, counts = RecordEncoder(tokenizer, template, fields or {}), counts or PromptCounts()
    for place, record in reading.iter_records(path):
        counts.records += 1
        try:
            prompt = _parse_prompt(record, apply_chat_template)
            if isinstance(prompt, str):
                [(_, [rendered])] = reading.encode([(None, [reading.plain_text_layout([(prompt, False)], add_eos=False)])])
                tokens = rendered.tokens
            else:
                tokens = reading.get_chat_template().encode_prompt(prompt, record_tools(record))
        except UserError as error:
            raise UserError(f"{place}: {error}") from None
        if max_prompt_length is not None and len(tokens) > max_prompt_length:
            counts.overlong += 1
            continue
        counts.kept += 1
        yield TokenizedPrompt(np.array(tokens, np.int32), prompt, _columns(record))


def encode_completions(
    tokenizer: Tokenizer, prompts: Sequence[Any], completions: Sequence[str], tools: Sequence[Any] | None = None
) -> list[list[int]]:
    """Ids of each prompt, a text or messages, with its completion, to the end of that turn or text; `tools` are those that the
    prompt was asked with. Raises UserError."""
    reading = RecordEncoder(tokenizer)
    records = [{"tools": each} if each else {} for each in tools or [None] * len(prompts)]
    asked = zip(prompts, completions, records, strict=True)
    layouts = [
        _completion_layout(prompt, completion, record, reading, apply_chat_template=False)
        for prompt, completion, record in asked
    ]
    return [rendered.tokens for rendered in encode_layouts(tokenizer, layouts)]


def read_prompt_columns(path: str | Path, fields: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The columns of each record of prompts, with its place."""
    for place, record in read_renamed_records(path, fields):
        yield place, _columns(record)


def _columns(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in PROMPT_FIELDS}


def _parse_prompt(record: dict[str, Any], apply_chat_template: bool) -> str | list[Message]:
    if "prompt" in record or "messages" not in record:
        _require_fields(record, "prompt")
        if isinstance(record["prompt"], str) and not apply_chat_template:
            if not record["prompt"]:
                raise UserError("the prompt is empty")
            return str(record["prompt"])
        return validate_messages(to_messages(record["prompt"], "user"))
    messages = validate_messages(to_messages(record["messages"], "user"))
    return messages[:-1] if messages[-1]["role"] == "assistant" else messages


def _pair_layouts(record: dict[str, Any], encoder: RecordEncoder, apply_chat_template: bool) -> list[Layout]:
    _require_fields(record, "chosen", "rejected")
    sides = [record["chosen"], record["rejected"]]
    if sides[0] == sides[1]:
        raise UserError("chosen and rejected are equal: there is nothing to prefer")
    prompt = record.get("prompt")
    if all(isinstance(side, list) and side for side in sides):
        sides = [to_messages(side, "assistant") for side in sides]
        if any(validate_messages(side)[0]["role"] != "assistant" for side in sides):
            # The whole conversation on either side, whether or not its prompt is told beside.
            shared = _num_common_messages(*sides)
            prompt, sides = sides[0][:shared], [side[shared:] for side in sides]
            if not shared or any(not side or validate_messages(side)[0]["role"] != "assistant" for side in sides):
                raise UserError("chosen and rejected differ before the answer: expected the same turns, then other answers")
    elif prompt is None and all(isinstance(side, str) for side in sides):
        starts = {
            side[: side.rfind(HH_RLHF_ANSWER_MARKER) + len(HH_RLHF_ANSWER_MARKER)]
            for side in sides
            if HH_RLHF_ANSWER_MARKER in side
        }
        if len(starts) != 1:
            raise UserError(
                f"no prompt: expected a field 'prompt', or texts that are alike up to the last {HH_RLHF_ANSWER_MARKER!r}"
            )
        [prompt] = starts
        sides = [side[len(prompt) :] for side in sides]
    return [_completion_layout(prompt, side, record, encoder, apply_chat_template) for side in sides]


def _parse_margin(record: dict[str, Any]) -> float:
    margin = record.get("margin")
    if margin is None:
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise UserError(f"the margin is {margin!r}: expected a number")
    return float(margin)


def _completion_layout(
    prompt: Any, completion: Any, record: dict[str, Any], encoder: RecordEncoder, apply_chat_template: bool
) -> Layout:
    """A prompt and what was answered, the answer scored."""
    if isinstance(prompt, str | None) and isinstance(completion, str) and not apply_chat_template:
        if not prompt:
            raise UserError("the prompt is empty")
        return encoder.plain_text_layout([(prompt, False), (completion, True)])
    if prompt is None:
        raise UserError("no field 'prompt', and no conversation that both sides share")
    before = to_messages(prompt, "user")
    return encoder.get_chat_template().build_layout(
        [*before, *to_messages(completion, "assistant")], "assistant", record_tools(record), first_scored_message=len(before)
    )


def _num_common_messages(chosen: list[Any], rejected: list[Any]) -> int:
    """How many messages two conversations have in common at their beginning."""
    return next(
        (at for at, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), min(len(chosen), len(rejected))
    )


def _require_fields(record: dict[str, Any], *names: str) -> None:
    for name in names:
        if name not in record:
            raise UserError(f"no field {name!r}: there are {', '.join(sorted(record))}: name it with fields")
