"""`lmforge show data FILE --tokenizer MODEL`: examples of a file as a model's tokenizer and chat
template encode them, with the tokens that the loss counts.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lmforge.core.data.packing import TokenizedExample
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.errors import UserError
from lmforge.core.records.kinds import Kind, kind_of
from lmforge.ops.options.examine import ShowOptions
from lmforge.ops.verbs.show.show_data import parse_range, render_example
from lmforge.post.options.tuning import renamed_fields
from lmforge.text.chat.conversations import FORMAT_FIELDS, read_conversations, read_renamed_records
from lmforge.text.chat.preferences import (
    read_preference_pairs,
    read_prompts,
    read_unpaired_preferences,
)
from lmforge.text.sources.records import UnusableRecords, describe_folders


def show_examples(options: ShowOptions, model: Path) -> str:
    """Conversations, pairs, unpaired preferences or prompts of a file, as a model's tokenizer and
    chat template encode them.

    Tokens that the loss counts are in colour, or in brackets where there is none. Raises UserError
    for a wrong record.
    """
    from lmforge.hf.pretrained import find_pretrained  # with torch, which reads checkpoints

    # A folder may hold a tokenizer alone.
    if kind_of(model) == Kind.FOLDER:
        tokenizer = Tokenizer.open(model)
    else:
        tokenizer = find_pretrained(model).tokenizer()
    first, after = parse_range(options.samples, (0, 3))
    lines = []
    unusable = UnusableRecords(options.skip_invalid)
    for number, title, example in _read_examples(options, tokenizer, unusable):
        if number >= after:
            break
        if number >= first:
            if title.startswith("prompt "):
                in_loss = "no completion"
            else:
                in_loss = f"{int(example.loss_mask.sum())} in the loss"
            lines.append(
                f"{title}: {len(example.tokens)} tokens,"
                f" {in_loss}\n{render_example(example, tokenizer)}\n"
            )
    assert options.of is not None
    if not lines:
        raise UserError(f"{options.of}: has no record {first}")
    notes = [f"{note}\n" for note in f"{unusable}{describe_folders([options.of])}".split("; ")[1:]]
    return "\n".join([*lines, *notes])


def _read_examples(
    options: ShowOptions, tokenizer: Tokenizer, unusable: UnusableRecords
) -> Iterator[tuple[int, str, TokenizedExample]]:
    """The examples of the file, each with the number of its record and a title.

    Raises UserError.
    """
    assert options.of is not None
    file = options.of
    fields = renamed_fields(options.fields, "--fields")
    _, record = next(
        read_renamed_records(file, fields, UnusableRecords(options.skip_invalid)), ("", {})
    )
    kind = _record_format(options, record)
    if kind != "conversations" and (options.mask != "assistant" or options.split_turns):
        given = "--split_turns" if options.split_turns else f"--mask {options.mask}"
        raise UserError(f"{given}: is for conversations, not for {kind}; leave it out")
    reading: dict[str, Any] = {
        "fields": fields,
        "unusable": unusable,
        "ignore_media": options.ignore_media,
    }
    conversations = {
        **reading,
        "format": options.format,
        "mask": options.mask,
        "split_turns": options.split_turns,
    }
    reading["apply_chat_template"] = options.apply_chat_template
    if kind == "pairs":
        for number, pair in enumerate(read_preference_pairs(file, tokenizer, **reading)):
            yield number, f"pair {number}, chosen", pair.chosen
            yield number, f"pair {number}, rejected", pair.rejected
    elif kind == "unpaired":
        for number, labelled in enumerate(read_unpaired_preferences(file, tokenizer, **reading)):
            yield (
                number,
                f"record {number}, {'good' if labelled.desirable else 'bad'}",
                labelled.example,
            )
    elif kind == "prompts":
        for number, prompt in enumerate(read_prompts(file, tokenizer, **reading)):
            yield (
                number,
                f"prompt {number}",
                TokenizedExample(prompt.tokens, np.zeros(len(prompt.tokens), bool)),
            )
    else:
        assert options.format != "prompts"
        for number, example in enumerate(read_conversations(file, tokenizer, **conversations)):
            yield number, f"{'answer' if options.split_turns else 'record'} {number}", example


def _record_format(options: ShowOptions, record: dict[str, Any]) -> str:
    """The kind of examples in a file, by the fields of its first record; a null of a table is
    none.
    """
    fields = {name for name, value in record.items() if value is not None}
    if options.format == "prompts":
        return "prompts"
    if options.format == "auto":
        if {"chosen", "rejected"} <= fields:
            return "pairs"
        if {"prompt", "completion", "label"} <= fields and options.mask == "assistant":
            return "unpaired"
        if "prompt" in fields and not any(fields >= {*names} for names in FORMAT_FIELDS.values()):
            return "prompts"
    if options.apply_chat_template:
        raise UserError(
            "--apply_chat_template: is for pairs, labelled completions and prompts; leave it out,"
            " or add --format prompts"
        )
    return "conversations"
