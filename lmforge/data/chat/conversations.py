"""Files of conversations, in the forms people keep them in, as tokens and what is scored of them.

What a template makes of a conversation is templates.py's; pairs and prompts are preferences.py's. Nothing here packs or stores.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from lmforge.config.run import ConversationFormat as Format
from lmforge.data.chat.layout import EncodedConversation, Layout, encode_layouts
from lmforge.data.chat.messages import check_encodable
from lmforge.data.chat.templates import ChatTemplate, LossMaskMode
from lmforge.data.sources.records import read_records
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import UserError

# By the fields that a record of it has, in the order they are looked for.
FORMAT_FIELDS: dict[Format, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt-completion": ("prompt", "completion"),
    "text": ("text",),
}
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
ENCODE_BATCH_SIZE = 1000

PayloadT = TypeVar("PayloadT")


@dataclass
class RecordEncoder:
    """How records become examples, the same for every kind of file. `template` is looked for when a record needs one."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None = None
    field_names: Mapping[str, str] = field(default_factory=dict)

    def get_chat_template(self) -> ChatTemplate:
        """The template given, or the tokenizer's."""
        if self.chat_template is None:
            self.chat_template = ChatTemplate.from_tokenizer(self.tokenizer)
        return self.chat_template

    def plain_text_layout(self, pieces: Iterable[tuple[str, bool]], *, add_eos: bool = True) -> Layout:
        """Texts as they are, one after another, begun and ended as the tokenizer begins and ends a text."""
        opening: Layout = [(id, False) for id in self.tokenizer.prefix_ids]
        texts = [(check_encodable(text), scored) for text, scored in pieces if text]
        return [*opening, *([texts] if texts else []), *([(self.tokenizer.eos_token_id, True)] if add_eos else [])]

    def iter_records(self, path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
        """Records with their places, their fields under the names that formats go by."""
        yield from read_renamed_records(path, self.field_names)

    def encode(self, items: Iterable[tuple[PayloadT, list[Layout]]]) -> Iterator[tuple[PayloadT, list[EncodedConversation]]]:
        """Many layouts at a time, as the tokenizer likes them, each with what came with it."""
        remaining = iter(items)
        while some := list(islice(remaining, ENCODE_BATCH_SIZE)):
            rendered = iter(encode_layouts(self.tokenizer, [layout for _, layouts in some for layout in layouts]))
            for item, layouts in some:
                yield item, list(islice(rendered, len(layouts)))


def read_renamed_records(path: str | Path, fields: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """read_records, with fields under our names for theirs. UserError naming the record that lacks one of them."""
    renamed = {theirs: ours for ours, theirs in fields.items()}
    for place, record in read_records(path):
        for name in renamed:
            if name not in record:
                raise UserError(f"{place}: no field {name!r}: there are {', '.join(sorted(record))}")
        others = {name: value for name, value in record.items() if name not in renamed and name not in fields}
        yield place, {**others, **{ours: record[theirs] for theirs, ours in renamed.items()}}


def read_conversations(
    path: str | Path,
    tokenizer: Tokenizer,
    *,
    template: ChatTemplate | None = None,
    format: Format = "auto",
    mask: LossMaskMode = "assistant",
    fields: Mapping[str, str] | None = None,
) -> Iterator[TokenizedExample]:
    """The conversations of a file or folder, in order, as they are read.

    `format` is found by the fields of the first record unless named; `fields` says which of the file's stands for one of
    a format's, {"messages": "chat"}. Prompts and completions that are strings, and plain text, are no turns: they go as
    they are, without a template, and end with the separator. UserError naming the record where one makes no sense.
    """
    reading = RecordEncoder(tokenizer, template, fields or {})

    def laid_out() -> Iterator[tuple[None, list[Layout]]]:
        form = format
        for place, record in reading.iter_records(path):
            try:
                form = detect_format(record) if form == "auto" else form
                yield None, [_record_layout(record, form, mask, reading)]
            except UserError as error:
                raise UserError(f"{place}: {error}") from None

    for _, [rendered] in reading.encode(laid_out()):
        yield TokenizedExample.from_encoded(rendered)


def detect_format(record: dict[str, Any]) -> Format:
    """What a record is, by its fields. Raises UserError where it is nothing known."""
    for form, names in FORMAT_FIELDS.items():
        if all(name in record for name in names):
            return form
    known = "; ".join(f"{form}: {', '.join(names)}" for form, names in FORMAT_FIELDS.items())
    raise UserError(f"the fields {', '.join(sorted(record))} are of no format known ({known}): name them with fields")


def _record_layout(record: dict[str, Any], format_name: Format, mask: LossMaskMode, encoder: RecordEncoder) -> Layout:
    missing = [name for name in FORMAT_FIELDS[format_name] if name not in record]
    if missing:
        raise UserError(
            f"expected a record of format {format_name}, with {missing[0]!r}: there are {', '.join(sorted(record))}"
        )
    if format_name == "text":
        return encoder.plain_text_layout([(text_field(record, "text"), True)])
    if format_name == "prompt-completion":
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return encoder.plain_text_layout([(prompt, mask == "all"), (completion, True)])
        before, after = to_messages(prompt, "user"), to_messages(completion, "assistant")
        return encoder.get_chat_template().build_layout(
            [*before, *after], mask, record_tools(record), first_scored_message=len(before)
        )
    messages = {"messages": _from_messages, "sharegpt": _from_sharegpt, "alpaca": _from_alpaca}[format_name](record)
    return encoder.get_chat_template().build_layout(messages, mask, record_tools(record))


def to_messages(value: Any, role: str) -> list[Any]:
    """Messages as they are; a string as one of `role`."""
    return [{"role": role, "content": value}] if isinstance(value, str) else _message_list(value)


def _message_list(value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise UserError(f"expected text or a list of messages, not {json.dumps(value, default=str)[:40]}")
    return [_sharegpt_message(entry) if isinstance(entry, dict) and "from" in entry else entry for entry in value]


def text_field(record: dict[str, Any], name: str) -> str:
    """A field that holds text, or nothing."""
    text = record.get(name)
    if not isinstance(text, str | None):
        raise UserError(f"the field {name!r} is not text but {type(text).__name__}")
    return text or ""


def record_tools(record: dict[str, Any]) -> list[Any] | None:
    """The tools that a record offers the assistant: a list of JSON schemas, or its JSON."""
    tools = record.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools or "null")
        except ValueError:
            raise UserError("the field 'tools' is not JSON") from None
    if not isinstance(tools, list | None):
        raise UserError(f"the field 'tools' is not a list but {type(tools).__name__}")
    return tools or None


def _from_messages(record: dict[str, Any]) -> list[Any]:
    return _message_list(record["messages"])


def _from_sharegpt(record: dict[str, Any]) -> list[Any]:
    system = text_field(record, "system")
    return [*([{"role": "system", "content": system}] if system else []), *_message_list(record["conversations"])]


def _sharegpt_message(entry: dict[str, Any]) -> dict[str, Any]:
    speaker, value = entry["from"], entry.get("value")
    if speaker not in SHAREGPT_ROLES:
        raise UserError(f'"from" is {speaker!r}: expected one of {", ".join(SHAREGPT_ROLES)}')
    if speaker != "function_call":
        return {"role": SHAREGPT_ROLES[speaker], "content": value}
    try:
        call = json.loads(value or "")
    except (TypeError, ValueError):
        raise UserError('the value of a "function_call" is not JSON') from None
    return {"role": "assistant", "content": "", "tool_calls": call if isinstance(call, list) else [call]}


def _from_alpaca(record: dict[str, Any]) -> list[Any]:
    asked = [text_field(record, "instruction"), text_field(record, "input")]
    history = record.get("history") or []
    if not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise UserError("the field 'history' is not a list of [question, answer]")
    exchanges = [*history, ["\n\n".join(text for text in asked if text), text_field(record, "output")]]
    system = text_field(record, "system")
    messages: list[Any] = [{"role": "system", "content": system}] if system else []
    for question, answer in exchanges:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages
