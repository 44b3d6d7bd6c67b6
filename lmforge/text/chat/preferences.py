"""Files of preferences and of prompts: pairs of completions, labelled completions, and prompts.

What an objective makes of them is in `post/objectives/`. A completion is everything after the
prompt; a prompt is never scored.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np

from lmforge.core.data.packing import TokenizedExample
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.errors import NothingToLearn, UserError
from lmforge.core.files.untrusted import quoted
from lmforge.text.chat.conversations import (
    LaidOut,
    ReadingOptions,
    RecordEncoder,
    check_media,
    check_plain_prompt,
    read_renamed_records,
    record_tools,
    record_variables,
    to_messages,
    with_system,
)
from lmforge.text.chat.layout import Layout, encode_layouts
from lmforge.text.chat.messages import Message, validate_messages
from lmforge.text.chat.templates import ChatExample, one_layout
from lmforge.text.sources.records import Record, UnusableRecords, require_fields

# The text before the last answer in a conversation that is written as one string (Anthropic's
# hh-rlhf).
HH_RLHF_ANSWER_MARKER = "\n\nAssistant:"
# The fields that may hold a prompt; all other fields of its record are columns.
PROMPT_FIELDS = ("prompt", "messages")
RENAMING_HINT = ": name it with fields"


class PreferencePair(NamedTuple):
    """Two completions of one prompt, each with the prompt before it.

    margin: by how much the chosen one is better, or 0.
    """

    chosen: TokenizedExample
    rejected: TokenizedExample
    margin: float = 0.0


class UnpairedPreference(NamedTuple):
    """A completion with its prompt, and whether it is desirable."""

    example: TokenizedExample
    desirable: bool


class TokenizedPrompt(NamedTuple):
    """A prompt to be answered.

    tokens: int32 [length] up to where the answer begins. prompt: its text or messages.
    """

    tokens: np.ndarray
    prompt: str | list[Message]
    columns: dict[str, Any]


@dataclass
class PromptCounts:
    """The numbers of records of prompts that were read, kept and dropped, counted while reading."""

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
    with_margins: bool = False,
    **reading: Unpack[ReadingOptions],
) -> Iterator[PreferencePair]:
    """Records {prompt, chosen, rejected} as pairs.

    Without a prompt both are whole conversations with the same beginning.

    Strings are encoded as they are and end with the end-of-text token, unless `apply_chat_template`
    makes messages of them. `with_margins` keeps the number in a record's `margin`. Pairs of equal
    sides are left out. Raises UserError naming a record without a prompt or an answer, unless
    `unusable` leaves it out. The rest as in `read_conversations`.
    """
    encoder = RecordEncoder(tokenizer, **reading)

    def lay_out(record: Record) -> LaidOut[PreferencePair]:
        margin = _parse_margin(record) if with_margins else 0.0

        def make_pair(chosen: TokenizedExample, rejected: TokenizedExample) -> list[PreferencePair]:
            return [PreferencePair(chosen, rejected, margin)]

        return make_pair, _pair_layouts(record, encoder)

    return encoder.encode_file(path, lay_out)


def read_unpaired_preferences(
    path: str | Path, tokenizer: Tokenizer, **reading: Unpack[ReadingOptions]
) -> Iterator[UnpairedPreference]:
    """Records {prompt, completion, label} with true or false labels, as for KTO.

    The rest is as in `read_preference_pairs`.
    """
    encoder = RecordEncoder(tokenizer, **reading)

    def lay_out(record: Record) -> LaidOut[UnpairedPreference]:
        require_fields(record, "prompt", "completion", "label", hint=RENAMING_HINT)
        if record["label"] not in (True, False):
            raise UserError(f"the label is {quoted(record['label'])}: expected true or false")
        layout = _completion_layout(record["prompt"], record["completion"], record, encoder)
        return lambda example: [UnpairedPreference(example, bool(record["label"]))], [layout]

    return encoder.encode_file(path, lay_out)


def read_prompts(
    path: str | Path,
    tokenizer: Tokenizer,
    *,
    max_prompt_length: int | None = None,
    counts: PromptCounts | None = None,
    tools_of: Callable[[Record], list[Any]] | None = None,
    **reading: Unpack[ReadingOptions],
) -> Iterator[TokenizedPrompt]:
    """Records {prompt, ...columns} as prompts.

    A prompt is a string as it is, or with `apply_chat_template` as a user's message; or messages,
    of which a last answer is left out. Prompts of more than `max_prompt_length` tokens are dropped,
    and counted in `counts`. With `tools_of`, which gives the tools of a record's environment, all
    are messages, and one without a prompt has an empty one. Raises UserError naming the record
    without a prompt.
    """
    counts = counts or PromptCounts()
    encoder = RecordEncoder(tokenizer, **reading)
    for place, record in read_renamed_records(path, encoder.fields, encoder.unusable):
        counts.records += 1
        tokens = None
        with encoder.unusable.leave_out(place):
            check_media(record, encoder.ignore_media)
            has_prompt = any(record.get(name) is not None for name in PROMPT_FIELDS)
            if tools_of is not None and not has_prompt:
                record = {**record, "prompt": [{"role": "user", "content": ""}]}
            prompt = _parse_prompt(record, encoder.apply_chat_template or tools_of is not None)
            if isinstance(prompt, str):
                [example] = encode_layouts(
                    tokenizer, [encoder.plain_text_layout([(prompt, False)], add_eos=False)]
                )
                tokens = example.tokens
            else:
                given = record_variables(record, encoder.chat_template)
                offered = record_tools(record) if tools_of is None else tools_of(record) or None
                ids = encoder.chat_template.encode_prompt(prompt, offered, variables=given)
                tokens = np.array(ids, np.int32)
        if tokens is None:
            continue
        if max_prompt_length is not None and len(tokens) > max_prompt_length:
            counts.overlong += 1
            continue
        counts.kept += 1
        yield TokenizedPrompt(tokens, prompt, _columns(record))


def encode_completions(
    tokenizer: Tokenizer,
    prompts: Sequence[Any],
    completions: Sequence[str],
    records: Sequence[Record] | None = None,
) -> list[list[int]]:
    """The ids of each prompt with its completion, to the end of that turn or text.

    A prompt is a text or messages; `records` have what each prompt offered beside its messages.
    Raises UserError.
    """
    encoder = RecordEncoder(tokenizer)
    records = records or [{}] * len(prompts)
    layouts = [
        _completion_layout(*each, encoder)
        for each in zip(prompts, completions, records, strict=True)
    ]
    finished = map(one_layout, encoder.finish_layouts(layouts))
    return [example.tokens.tolist() for example in encode_layouts(tokenizer, list(finished))]


def read_prompt_columns(
    path: str | Path, fields: Mapping[str, str], unusable: UnusableRecords
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, columns) of each record of prompts."""
    for place, record in read_renamed_records(path, fields, unusable):
        yield place, _columns(record)


def _columns(record: Record) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in PROMPT_FIELDS}


def _parse_prompt(record: Record, apply_chat_template: bool) -> str | list[Message]:
    if record.get("prompt") is not None or record.get("messages") is None:
        require_fields(record, "prompt", hint=RENAMING_HINT)
        if isinstance(record["prompt"], str) and not apply_chat_template:
            if not record["prompt"]:
                raise UserError("the prompt is empty")
            check_plain_prompt(record)
            return str(record["prompt"])
        return validate_messages(with_system(record, to_messages(record["prompt"], "user")))
    messages = validate_messages(with_system(record, to_messages(record["messages"], "user")))
    return messages[:-1] if messages[-1]["role"] == "assistant" else messages


def _pair_layouts(record: Record, encoder: RecordEncoder) -> list[Layout | ChatExample]:
    require_fields(record, "chosen", "rejected", hint=RENAMING_HINT)
    sides = [record["chosen"], record["rejected"]]
    if sides[0] == sides[1]:
        raise NothingToLearn("chosen and rejected are equal: there is nothing to prefer")
    prompt = record.get("prompt")
    if all(isinstance(side, list) and side for side in sides):
        sides = [to_messages(side, "assistant") for side in sides]
        if any(validate_messages(side)[0]["role"] != "assistant" for side in sides):
            # Both sides are whole conversations, whether or not the prompt has a field of its own.
            shared = sum(takewhile(bool, map(eq, *sides)))
            beside = prompt
            prompt = sides[0][:shared]
            sides = [side[shared:] for side in sides]
            if not shared or any(
                not side or validate_messages(side)[0]["role"] != "assistant" for side in sides
            ):
                raise UserError(
                    "chosen and rejected must have the same turns before the last message of the"
                    " assistant"
                )
            contents = [message["content"] for message in validate_messages(prompt)]
            given = validate_messages(to_messages(beside, "user")) if beside else []
            if any(message["content"] not in contents for message in given):
                raise UserError(
                    "the prompt is not in chosen and rejected, whole conversations; leave it out,"
                    " or add it"
                )
    elif prompt is None and all(isinstance(side, str) for side in sides):
        marker = HH_RLHF_ANSWER_MARKER
        starts = {side[: side.rfind(marker) + len(marker)] for side in sides if marker in side}
        if len(starts) != 1:
            raise UserError(
                "no prompt: expected a field 'prompt', or texts that are alike up to the last"
                f" {marker!r}"
            )
        [prompt] = starts
        sides = [side[len(prompt) :] for side in sides]
    return [_completion_layout(prompt, side, record, encoder) for side in sides]


def _parse_margin(record: Record) -> float:
    margin = record.get("margin")
    if margin is None:
        return 0.0
    # A whole number of hundreds of digits is none of a float.
    if (
        isinstance(margin, bool)
        or not isinstance(margin, int | float)
        or not abs(margin) <= sys.float_info.max
    ):
        raise UserError(f"the margin is {quoted(margin)}: expected a number")
    return float(margin)


def _completion_layout(
    prompt: Any, completion: Any, record: Record, encoder: RecordEncoder
) -> Layout | ChatExample:
    """A prompt, which must be given, and its completion, which is scored."""
    if prompt in ("", None) and isinstance(completion, str) and not encoder.apply_chat_template:
        raise UserError("the prompt is empty")
    if prompt is None:
        raise UserError("no field 'prompt', and no conversation that both sides share")
    if isinstance(completion, list):
        first = validate_messages(to_messages(completion, "assistant"))[0]
        if first["role"] != "assistant":
            raise UserError("what follows the prompt does not begin with the assistant's turn")
    return encoder.completion_layout(prompt, completion, record)
