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

from lmforge.config import ConversationFormat as Format
from lmforge.data.layout import Layout, Rendered, encode_layouts
from lmforge.data.messages import well_formed
from lmforge.data.records import read_records
from lmforge.data.templates import ChatTemplate, Mask
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import Mistake

# By the fields that a record of it has, in the order they are looked for.
FORMATS: dict[Format, tuple[str, ...]] = {
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
AT_ONCE = 1000

Item = TypeVar("Item")


@dataclass(frozen=True)
class Example:
    """Something to train on: `tokens` int32 [length] and `scored` bool [length], which of them are to be predicted."""

    tokens: np.ndarray
    scored: np.ndarray

    @classmethod
    def of(cls, rendered: Rendered) -> Self:
        return cls(np.array(rendered.tokens, np.int32), np.array(rendered.scored, bool))


@dataclass
class Reading:
    """How records become examples, the same for every kind of file. `template` is looked for when a record needs one."""

    tokenizer: Tokenizer
    template: ChatTemplate | None = None
    fields: Mapping[str, str] = field(default_factory=dict)

    def chat(self) -> ChatTemplate:
        """The template given, or the tokenizer's."""
        if self.template is None:
            self.template = ChatTemplate.of(self.tokenizer)
        return self.template

    def plain(self, pieces: Iterable[tuple[str, bool]], *, ended: bool = True) -> Layout:
        """Texts as they are, one after another, begun and ended as the tokenizer begins and ends a text."""
        opening: Layout = [(id, False) for id in self.tokenizer.opening_ids]
        texts = [(well_formed(text), scored) for text, scored in pieces if text]
        return [*opening, *([texts] if texts else []), *([(self.tokenizer.separator_id, True)] if ended else [])]

    def records(self, path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
        """Records with their places, their fields under the names that formats go by."""
        yield from renamed_records(path, self.fields)

    def encoded(self, laid_out: Iterable[tuple[Item, list[Layout]]]) -> Iterator[tuple[Item, list[Rendered]]]:
        """Many layouts at a time, as the tokenizer likes them, each with what came with it."""
        remaining = iter(laid_out)
        while some := list(islice(remaining, AT_ONCE)):
            rendered = iter(encode_layouts(self.tokenizer, [layout for _, layouts in some for layout in layouts]))
            for item, layouts in some:
                yield item, list(islice(rendered, len(layouts)))


def renamed_records(path: str | Path, fields: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """read_records, with fields under our names for theirs. Mistake naming the record that lacks one of them."""
    renamed = {theirs: ours for ours, theirs in fields.items()}
    for place, record in read_records(path):
        for name in renamed:
            if name not in record:
                raise Mistake(f"{place}: no field {name!r}: there are {', '.join(sorted(record))}")
        others = {name: value for name, value in record.items() if name not in renamed and name not in fields}
        yield place, {**others, **{ours: record[theirs] for theirs, ours in renamed.items()}}


def read_conversations(
    path: str | Path,
    tokenizer: Tokenizer,
    *,
    template: ChatTemplate | None = None,
    format: Format = "auto",
    mask: Mask = "assistant",
    fields: Mapping[str, str] | None = None,
) -> Iterator[Example]:
    """The conversations of a file or folder, in order, as they are read.

    `format` is found by the fields of the first record unless named; `fields` says which of the file's stands for one of
    a format's, {"messages": "chat"}. Prompts and completions that are strings, and plain text, are no turns: they go as
    they are, without a template, and end with the separator. Mistake naming the record where one makes no sense.
    """
    reading = Reading(tokenizer, template, fields or {})

    def laid_out() -> Iterator[tuple[None, list[Layout]]]:
        form = format
        for place, record in reading.records(path):
            try:
                form = found_format(record) if form == "auto" else form
                yield None, [_laid_out(record, form, mask, reading)]
            except Mistake as error:
                raise Mistake(f"{place}: {error}") from None

    for _, [rendered] in reading.encoded(laid_out()):
        yield Example.of(rendered)


def found_format(record: dict[str, Any]) -> Format:
    """What a record is, by its fields. Raises Mistake where it is nothing known."""
    for form, names in FORMATS.items():
        if all(name in record for name in names):
            return form
    known = "; ".join(f"{form}: {', '.join(names)}" for form, names in FORMATS.items())
    raise Mistake(f"the fields {', '.join(sorted(record))} are of no format known ({known}): name them with fields")


def _laid_out(record: dict[str, Any], form: Format, mask: Mask, reading: Reading) -> Layout:
    missing = [name for name in FORMATS[form] if name not in record]
    if missing:
        raise Mistake(f"expected a record of format {form}, with {missing[0]!r}: there are {', '.join(sorted(record))}")
    if form == "text":
        return reading.plain([(text_of(record, "text"), True)])
    if form == "prompt-completion":
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return reading.plain([(prompt, mask == "all"), (completion, True)])
        before, after = turns_of(prompt, "user"), turns_of(completion, "assistant")
        return reading.chat().lay_out([*before, *after], mask, tools_of(record), since=len(before))
    messages = {"messages": _messages, "sharegpt": _sharegpt, "alpaca": _alpaca}[form](record)
    return reading.chat().lay_out(messages, mask, tools_of(record))


def turns_of(words: Any, role: str) -> list[Any]:
    """Messages as they are; a string as one of `role`."""
    return [{"role": role, "content": words}] if isinstance(words, str) else _listed(words)


def _listed(words: Any) -> list[Any]:
    if not isinstance(words, list) or not words:
        raise Mistake(f"expected text or a list of messages, not {json.dumps(words, default=str)[:40]}")
    return [_turn(entry) if isinstance(entry, dict) and "from" in entry else entry for entry in words]


def text_of(record: dict[str, Any], name: str) -> str:
    """A field that holds text, or nothing."""
    text = record.get(name)
    if not isinstance(text, str | None):
        raise Mistake(f"the field {name!r} is not text but {type(text).__name__}")
    return text or ""


def tools_of(record: dict[str, Any]) -> list[Any] | None:
    """The tools that a record offers the assistant: a list of JSON schemas, or its JSON."""
    tools = record.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools or "null")
        except ValueError:
            raise Mistake("the field 'tools' is not JSON") from None
    if not isinstance(tools, list | None):
        raise Mistake(f"the field 'tools' is not a list but {type(tools).__name__}")
    return tools or None


def _messages(record: dict[str, Any]) -> list[Any]:
    return _listed(record["messages"])


def _sharegpt(record: dict[str, Any]) -> list[Any]:
    system = text_of(record, "system")
    return [*([{"role": "system", "content": system}] if system else []), *_listed(record["conversations"])]


def _turn(entry: dict[str, Any]) -> dict[str, Any]:
    speaker, value = entry["from"], entry.get("value")
    if speaker not in SHAREGPT_ROLES:
        raise Mistake(f'"from" is {speaker!r}: expected one of {", ".join(SHAREGPT_ROLES)}')
    if speaker != "function_call":
        return {"role": SHAREGPT_ROLES[speaker], "content": value}
    try:
        call = json.loads(value or "")
    except (TypeError, ValueError):
        raise Mistake('the value of a "function_call" is not JSON') from None
    return {"role": "assistant", "content": "", "tool_calls": call if isinstance(call, list) else [call]}


def _alpaca(record: dict[str, Any]) -> list[Any]:
    asked = [text_of(record, "instruction"), text_of(record, "input")]
    history = record.get("history") or []
    if not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise Mistake("the field 'history' is not a list of [question, answer]")
    exchanges = [*history, ["\n\n".join(text for text in asked if text), text_of(record, "output")]]
    system = text_of(record, "system")
    messages: list[Any] = [{"role": "system", "content": system}] if system else []
    for question, answer in exchanges:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages
