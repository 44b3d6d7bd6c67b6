"""Files of conversations, in the formats in use, as tokens and a mask of what is scored.

Templates are applied in `templates.py`; pairs and prompts are read in `preferences.py`. Nothing
here packs or stores.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import xxhash

from lmforge.core.data.packing import TokenizedExample
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.errors import NothingToLearn, UserError
from lmforge.core.files.untrusted import cut, list_names
from lmforge.core.options.sections import ConversationFormat as Format
from lmforge.text.chat.layout import Layout, SpecialTokens, encode_layouts
from lmforge.text.chat.messages import (
    NO_TEMPLATE_VARIABLES,
    check_encodable,
    decode_json_text,
    parse_embedded_json,
    read_messages,
    training_flag,
    unread_variable,
)
from lmforge.text.chat.templates import ChatExample, ChatTemplate, LossMaskMode, build_layouts
from lmforge.text.sources.records import (
    Record,
    UnusableRecords,
    read_records,
    record_text,
    require_fields,
)

# The fields of a record of each format, in the order in which they are looked for.
FORMAT_FIELDS: dict[Format, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt-completion": ("prompt", "completion"),
    "text": ("text",),
}
SHAREGPT_SPEAKERS = {
    "system": ("system",),
    "user": ("human", "user"),
    "assistant": ("gpt", "assistant", "model", "function_call"),
    "tool": ("tool", "observation", "function", "function_response"),
}
SHAREGPT_ROLES = {
    speaker: role for role, speakers in SHAREGPT_SPEAKERS.items() for speaker in speakers
}
# Fields whose content is for the model, and which may hold something that is no text.
TEXT_FIELDS = (
    "chosen",
    "rejected",
    "system",
    "input",
    "history",
    *(name for names in FORMAT_FIELDS.values() for name in names),
)
# Those of them that hold messages, or a text.
MESSAGE_FIELDS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
# Fields that are for the chat template alone.
BESIDE_MESSAGES = ("system", "tools", "documents", "chat_template_kwargs")
MEDIA = ("image", "video", "audio")
# The names of columns with media, or of their files.
MEDIA_FIELD = re.compile(
    "(image|img|picture|photo|video|audio|media)s?(_?(path|url|file|data|byte)s?)?|pixel_values",
    re.IGNORECASE,
)
ENCODE_BATCH_SIZE = 1000

ExampleT = TypeVar("ExampleT")
# The layouts of a record, or what they are made of, and the function that makes examples of them
# once they are encoded.
LaidOut = tuple[Callable[..., Iterable[ExampleT]], list[Layout | ChatExample]]


class ReadingOptions(TypedDict, total=False):
    """Fields of `RecordEncoder` that a reader of records takes."""

    fields: Mapping[str, str] | None
    apply_chat_template: bool
    ignore_media: bool
    unusable: UnusableRecords
    parse_special_tokens: bool


@dataclass
class RecordEncoder:
    """Makes examples of records, in the same way for every type of file.

    `fields` gives the file's name of a format's field.

    Prompts and completions that are texts are encoded as they are, unless `apply_chat_template`
    makes messages of them. Records with images, audio or videos are refused, unless `ignore_media`
    makes examples of their text.
    """

    tokenizer: Tokenizer
    fields: Mapping[str, str] | None = None
    apply_chat_template: bool = False
    ignore_media: bool = False
    unusable: UnusableRecords = field(default_factory=UnusableRecords)
    parse_special_tokens: bool = False

    @cached_property
    def chat_template(self) -> ChatTemplate:
        return ChatTemplate.from_tokenizer(self.tokenizer)

    def plain_text_layout(
        self, pieces: Iterable[tuple[str, bool]], *, add_eos: bool = True
    ) -> Layout:
        """Texts joined unchanged, with the tokenizer's beginning- and end-of-text tokens.

        These are left out where the texts spell them. With `parse_special_tokens` text that spells
        a special token is this token, as in transformers.
        """
        texts = [(check_encodable(text), scored) for text, scored in pieces if text]
        layout: Layout = [texts] if texts else []
        if any(self._specials.pattern.search(text) for text, _ in texts):
            if self.parse_special_tokens:
                layout = self._parse(texts)
            else:
                self.unusable.with_special_text += 1
        prefix_ids = self.tokenizer.prefix_ids
        eos = self.tokenizer.eos_token_id
        ids = [part[0] if isinstance(part, tuple) else None for part in layout]
        if ids[: len(prefix_ids)] != prefix_ids:
            layout = [*((id, False) for id in prefix_ids), *layout]
        if add_eos and ids[-1:] != [eos]:
            layout = [*layout, (eos, True)]
        return layout

    @cached_property
    def _specials(self) -> SpecialTokens:
        return SpecialTokens(self.tokenizer)

    def _parse(self, texts: Sequence[tuple[str, bool]]) -> Layout:
        """The texts cut at the special tokens that each spells.

        A text continues the one before it where no special token is between them.
        """
        layout: Layout = []
        for text, scored in texts:
            spans = [(0, len(text))] if scored else []
            for part in self._specials.cut(text, spans):
                if layout and isinstance(part, list) and isinstance(layout[-1], list):
                    layout[-1] += part
                else:
                    layout.append(part)
        return layout

    def completion_layout(
        self, prompt: Any, completion: Any, record: Record, mask: LossMaskMode = "assistant"
    ) -> Layout | ChatExample:
        """A prompt and its completion, each a text or messages.

        With `mask` "all" the prompt is scored too.
        """
        if isinstance(prompt, str) and isinstance(completion, str) and not self.apply_chat_template:
            check_plain_prompt(record)
            return self.plain_text_layout([(prompt, mask == "all"), (completion, True)])
        before = with_system(record, to_messages(prompt, "user"))
        messages = [*before, *to_messages(completion, "assistant")]
        return self.chat_example(messages, mask, record, len(before))

    def chat_example(
        self, messages: list[Any], mask: LossMaskMode, record: Record, first_scored: int = 0
    ) -> ChatExample:
        """A conversation, with what its record gives to the template beside it."""
        example = self.chat_template.chat_example(
            messages, mask, record_tools(record), first_scored
        )
        return replace(example, variables=record_variables(record, self.chat_template))

    def finish_layouts(
        self, layouts: Sequence[Layout | ChatExample]
    ) -> Iterator[list[Layout] | UserError]:
        """The layouts in their order, those of conversations as the chat template builds them."""
        built = build_layouts([each for each in layouts if isinstance(each, ChatExample)])
        return (next(built) if isinstance(each, ChatExample) else [each] for each in layouts)

    def encode_file(
        self, path: str | Path, lay_out: Callable[[Record], LaidOut[ExampleT]]
    ) -> Iterator[ExampleT]:
        """The examples that `lay_out` describes of the records of a file or folder.

        Many layouts are encoded at a time. A problem that `unusable` does not leave out is raised
        as a UserError with the place of the record, and the number of records beside it that the
        template refuses.
        """

        def laid_out() -> Iterator[tuple[str, LaidOut[ExampleT]]]:
            for place, record in read_renamed_records(path, self.fields, self.unusable):
                with self.unusable.leave_out(place):
                    check_media(record, self.ignore_media)
                    if training_flag({"weight": record.get("weight")}) is False:
                        raise NothingToLearn('"weight" is 0: there is nothing to learn from')
                    yield place, lay_out(record)

        remaining = laid_out()
        while batch := list(islice(remaining, ENCODE_BATCH_SIZE)):
            finishing = self.finish_layouts(
                [layout for _, (_, layouts) in batch for layout in layouts]
            )
            built = [list(islice(finishing, len(layouts))) for _, (_, layouts) in batch]
            problems = [
                next((each for each in of_record if isinstance(each, UserError)), None)
                for of_record in built
            ]
            refused = len(batch) - problems.count(None)
            others = f" ({refused:,} of {len(batch):,} records are refused)" if refused > 1 else ""
            makers: list[tuple[Callable[..., Iterable[ExampleT]], int]] = []
            finished: list[Layout] = []
            for (place, (make, _)), of_record, problem in zip(batch, built, problems, strict=True):
                with self.unusable.leave_out(place):
                    if problem:
                        raise UserError(f"{problem}{others}")
                    before = len(finished)
                    for each in of_record:
                        if isinstance(each, list):
                            finished += each
                    makers.append((make, len(finished) - before))
            examples = iter(encode_layouts(self.tokenizer, finished))
            for make, count in makers:
                yield from make(*islice(examples, count))


def read_renamed_records(
    path: str | Path, fields: Mapping[str, str] | None, unusable: UnusableRecords
) -> Iterator[tuple[str, Record]]:
    """`read_records`, with {our name: theirs} fields under our names.

    A field whose name is empty is left out, of messages too. Raises UserError naming a record that
    cannot be used.
    """
    fields = fields or {}
    renamed = {theirs: ours for ours, theirs in fields.items() if theirs}
    left_out = {ours for ours, theirs in fields.items() if not theirs}
    for place, record in read_records(path, unusable=unusable):
        with unusable.leave_out(place):
            require_fields(record, *renamed)
            ours_of_record = {
                name: value
                for name, value in record.items()
                if name not in renamed and name not in fields
            }
            ours_of_record |= {ours: record[theirs] for theirs, ours in renamed.items()}
            for name in MESSAGE_FIELDS:
                if name in ours_of_record:
                    ours_of_record[name] = read_messages(ours_of_record[name], left_out)
            yield place, ours_of_record


def read_conversations(
    path: str | Path,
    tokenizer: Tokenizer,
    *,
    format: Format = "auto",
    mask: LossMaskMode = "assistant",
    fields: Mapping[str, str] | None = None,
    split_turns: bool = False,
    ignore_media: bool = False,
    unusable: UnusableRecords | None = None,
    parse_special_tokens: bool = False,
) -> Iterator[TokenizedExample]:
    """The conversations of a file or folder, in order, as they are read.

    `format` "auto" detects it from the fields of the first record; `fields` gives the file's names
    of a format's fields, such as {"messages": "chat"}. Prompts and completions that are strings,
    and plain text, are encoded as they are, without a template, and end with the end-of-text token;
    `parse_special_tokens` is for these. With `split_turns`, a conversation whose earlier turns the
    template rewrites becomes an example for each answer. Raises UserError naming a record that does
    not have the format, unless `unusable` leaves it out.
    """
    unusable = unusable or UnusableRecords()
    encoder = RecordEncoder(tokenizer, fields, False, ignore_media, unusable, parse_special_tokens)

    def lay_out(record: Record) -> LaidOut[TokenizedExample]:
        nonlocal format
        if format == "auto":
            format = detect_format(record)
        layout = _record_layout(record, format, mask, encoder)
        if split_turns and isinstance(layout, ChatExample):
            layout = replace(layout, split_turns=True)
        return _of_one_conversation, [layout]

    return encoder.encode_file(path, lay_out)


def _of_one_conversation(*turns: TokenizedExample) -> Sequence[TokenizedExample]:
    if len(turns) == 1:
        return turns
    part_of = xxhash.xxh3_64_intdigest(turns[-1].tokens.tobytes())
    return [replace(turn, part_of=part_of) for turn in turns]


def detect_format(record: Record) -> Format:
    """The format of a record, by its fields. Raises UserError if it is none of FORMAT_FIELDS."""
    # A null is no field where there are those of another format: each row of a table has the
    # columns of all rows.
    for fields in ({name for name, value in record.items() if value is not None}, record.keys()):
        for format, names in FORMAT_FIELDS.items():
            if fields >= {*names}:
                return format
    known = "; ".join(f"{format}: {', '.join(names)}" for format, names in FORMAT_FIELDS.items())
    raise UserError(
        f"the fields {list_names(record)} are of no format known ({known}); name them with fields"
    )


def _record_layout(
    record: Record, format: Format, mask: LossMaskMode, encoder: RecordEncoder
) -> Layout | ChatExample:
    missing = [name for name in FORMAT_FIELDS[format] if name not in record]
    if missing:
        raise UserError(
            f"expected a record of format {format}, with {missing[0]!r}: there are"
            f" {list_names(record)}"
        )
    if format == "text":
        return encoder.plain_text_layout([(record_text(record, "text"), True)])
    if format == "prompt-completion":
        return encoder.completion_layout(record["prompt"], record["completion"], record, mask)
    return encoder.chat_example(MESSAGES_OF[format](record), mask, record)


def to_messages(value: Any, role: str) -> list[Any]:
    """Messages as they are; a string as one message of `role`."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return _message_list(value)


def _message_list(value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise UserError(
            f"expected text or a list of messages, not {json.dumps(value, default=str)[:40]}"
        )

    def as_message(entry: Any) -> Any:
        if not isinstance(entry, dict):
            return entry
        message = _sharegpt_message(entry) if "from" in entry else entry
        content = message.get("content")
        if isinstance(content, list):
            return message | {"content": [each for each in content if not _is_media(each)]}
        return message

    return [as_message(each) for each in value]


def check_media(record: Record, ignored: bool) -> None:
    """Raise UserError where a record holds images, audio or videos, unless these are `ignored`."""
    if ignored:
        return
    held = _media_field(record) or _find_media([record.get(name) for name in TEXT_FIELDS])
    if held:
        raise UserError(
            f"holds {held!r}, and only text is trained on: leave it out, or set data.ignore_media"
        )


def _media_field(fields: Mapping[str, Any]) -> str | None:
    """The first field that holds media by its name; lists of nothing are empty."""
    for name, value in fields.items():
        # A number of them.
        if isinstance(value, list):
            given = any(value)
        else:
            given = value and not isinstance(value, int | float)
        if given and MEDIA_FIELD.fullmatch(name):
            return name
    return None


def _find_media(value: Any) -> str | None:
    """The first image, audio or video in messages: a part, or a field that holds one."""
    if isinstance(value, dict):
        if _is_media(value):
            return str(value["type"])
        # Of a message; the arguments of a call may have any names.
        return _media_field(value) or _find_media(value.get("content"))
    if isinstance(value, list):
        return next(filter(None, map(_find_media, value)), None)
    return None


def _is_media(part: Any) -> bool:
    """Return True for an image, audio or video: "image", "image_url", "input_audio"."""
    if not isinstance(part, dict):
        return False
    return not set(MEDIA).isdisjoint(str(part.get("type")).split("_"))


def record_variables(record: Record, template: ChatTemplate) -> dict[str, Any]:
    """The variables of a record for the chat template, beside messages and tools.

    They are as `apply_chat_template` of transformers takes them.
    """

    def decoded(name: str, kind: type, words: str) -> Any:
        value = decode_json_text(record.get(name) or None, f"the field {name!r}")
        if not isinstance(value, kind | None):
            raise UserError(f"the field {name!r} is not {words} but {type(value).__name__}")
        return value

    given = dict(decoded("chat_template_kwargs", dict, "an object") or {})
    documents = decoded("documents", list, "a list")
    if documents:
        given["documents"] = documents
    taken = NO_TEMPLATE_VARIABLES & given.keys()
    if taken:
        raise UserError(
            f"chat_template_kwargs: {min(taken)!r} is not a variable of a template; leave it out"
        )
    # A template that reads no documents is found out by its text.
    sources = " ".join(["documents", *template.files.values()])
    unread = unread_variable(given, sources)
    if unread:
        raise UserError(
            f"chat_template_kwargs: the chat template reads no variable {unread!r}; leave it out"
        )
    return given


def record_tools(record: Record) -> list[Any] | None:
    """The tools that a record offers the assistant, or else its legacy functions.

    Tools are a list of JSON schemas, or the JSON of one.
    """
    tools = decode_json_text(record.get("tools") or None, "the field 'tools'")
    if not isinstance(tools, list | None):
        raise UserError(f"the field 'tools' is not a list but {type(tools).__name__}")
    if tools:
        return [_decode_tool(each, "the field 'tools'") for each in tools]
    functions = record.get("functions")
    if not isinstance(functions, list) or not functions:
        return None
    if not all(isinstance(each, dict) and "name" in each for each in functions):
        return None
    return [
        _decode_tool({"type": "function", "function": each}, "the field 'functions'")
        for each in functions
    ]


def _decode_tool(tool: Any, source: str) -> Any:
    """A tool in which objects that are kept as JSON text are objects."""
    tool = decode_json_text(tool, source)
    if isinstance(tool, dict):
        tool = dict(tool)
        for key in ("function", "parameters"):
            if key in tool:
                tool[key] = _decode_tool(tool[key], source)
    return tool


def _sharegpt_message(entry: dict[str, Any]) -> dict[str, Any]:
    speaker = entry["from"]
    value = entry.get("value")
    others = {name: each for name, each in entry.items() if name not in ("from", "value")}
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        raise UserError(
            f'"from" is {cut(repr(speaker))}: expected one of {", ".join(SHAREGPT_ROLES)}'
        )
    if speaker != "function_call":
        return others | {"role": SHAREGPT_ROLES[speaker], "content": value}
    calls = parse_embedded_json(value, 'the value of a "function_call"')
    if not isinstance(calls, list):
        calls = [calls]
    return others | {"role": "assistant", "content": "", "tool_calls": calls}


def check_plain_prompt(record: Record) -> None:
    """Raise UserError where a record has more than fits into a prompt that is text."""
    for name in BESIDE_MESSAGES:
        if record.get(name):
            raise UserError(
                f"the field {name!r} has no place in a prompt that is text; write messages, or"
                " leave it out"
            )


def with_system(record: Record, messages: list[Any]) -> list[Any]:
    """The messages after that of the field `system`, if they do not begin with it."""
    first = {"role": "system", "content": record_text(record, "system")}
    if not first["content"] or messages[:1] == [first]:
        return messages
    return [first, *messages]


def _alpaca_messages(record: Record) -> list[Any]:
    request = [record_text(record, "instruction"), record_text(record, "input")]
    history = record.get("history") or []
    if not isinstance(history, list) or not all(
        isinstance(turn, list) and len(turn) == 2 for turn in history
    ):
        raise UserError("the field 'history' is not a list of [question, answer]")
    messages: list[Any] = []
    turn = ["\n\n".join(filter(None, request)), record_text(record, "output")]
    for question, answer in [*history, turn]:
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    return with_system(record, messages)


MESSAGES_OF: dict[Format, Callable[[Record], list[Any]]] = {
    "messages": lambda record: with_system(record, _message_list(record["messages"])),
    "sharegpt": lambda record: with_system(record, _message_list(record["conversations"])),
    "alpaca": _alpaca_messages,
}
