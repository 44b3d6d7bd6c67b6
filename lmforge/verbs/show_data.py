"""`lmforge show data`: what a run reads, or a file holds, as the model is given it, with what is learnt of it."""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lmforge.config.post_training import TunedConfig
from lmforge.config.run import Config, ExampleFormat, StageConfig, renamed_fields
from lmforge.data.chat.colour import format_example
from lmforge.data.chat.conversations import FORMAT_FIELDS, TokenizedExample, read_conversations, read_renamed_records
from lmforge.data.chat.examples import EXAMPLES_MANIFEST as EXAMPLES
from lmforge.data.chat.examples import ExampleFolder, example_dataset
from lmforge.data.chat.preferences import read_preference_pairs, read_prompts, read_unpaired_preferences
from lmforge.data.chat.templates import LossMaskMode
from lmforge.data.packing import PackedSequence
from lmforge.data.shards import TokenFolder
from lmforge.data.stream import PackedDataset, TokenDataset
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import UserError
from lmforge.runs import Run


def show_samples(source: Path, sample_range: str | None) -> str:
    """The text of samples of a run, or of the batch that a bad step's file names, as the model is given them.

    Of examples it is in colour, or in brackets, which tokens are learnt; of rollouts the answers are shown. `samples` is
    FIRST:AFTER_LAST. Raises UserError where the data is not what was trained on.
    """
    fit = True
    if source.is_file():
        record = _read_bad_step(source)
        title = f"step {record['step']}: {record['reason']}"
        if "answers" in record:
            return _show_completions(source, record, title, sample_range)
        data, length, seed = Path(record["data"]), record["sequence_length"], record["seed"]
        fit = record.get("fit", True)
        first, after = record["samples"]
    elif (run := Run.open(source)).exists():
        config = run.load_config()
        data, fit = _data_folder(config)
        length, seed = config.data.sequence_length, config.train.seed
        first, after, title = 0, 3, f"run {source}"
    else:
        raise UserError(f"{source}: not a run, nor the file of a bad step")
    stream: PackedDataset
    examples = ExampleFolder.open(data) if (data / EXAMPLES).exists() else None
    if examples is not None:
        tokenizer, stream = examples.tokenizer, example_dataset(examples, "train", sequence_length=length, pack=fit, seed=seed)
    else:
        tokens = TokenFolder.open(data)
        tokenizer, stream = tokens.tokenizer, TokenDataset(tokens, sequence_length=length, seed=seed)
    if source.is_file() and stream.plan_hash != record["plan_hash"]:
        raise UserError(f"{data}: is not what the run was given when {source} was written; prepare it as it was")
    first, after = _parse_range(sample_range, (first, after))
    lines = [f"{title}; samples {first} to {after - 1} of {stream.location}"]
    rows = zip(range(first, after), stream.sequences(first, after), stream.indices(first, after), strict=True)
    for number, row, index in rows:
        there = row.document_ids >= 0
        scored, documents = int((row.labels >= 0).sum()), len(set(row.document_ids[there]))
        lines.append(f"\nsample {number} (row {index}): {documents} documents, {scored} scored tokens")
        if examples is None:  # where every token is learnt colours would say nothing
            lines.append(repr(tokenizer.decode(row.tokens[there].tolist(), include_special_tokens=True)))
        else:
            lines += [_render_example(example, tokenizer) for example in _split_documents(row)]
    return "\n".join(lines)


def _split_documents(sequence: PackedSequence) -> Iterator[TokenizedExample]:
    """The documents of a row as they were before inputs and targets were told apart. A last token that is not learnt is in
    neither."""
    for document in range(int(sequence.document_ids.max()) + 1):
        here = sequence.document_ids == document
        tokens, targets = sequence.tokens[here], sequence.labels[here]
        last = targets[-1:][targets[-1:] >= 0]
        scored = np.concatenate([[False], targets >= 0])[: len(tokens) + len(last)]
        yield TokenizedExample(np.concatenate([tokens, last]).astype(np.int32), scored)


def _render_example(example: TokenizedExample, tokenizer: Tokenizer) -> str:
    return format_example(example, tokenizer, ansi=sys.stdout.isatty())


def _show_completions(source: Path, record: dict[str, Any], title: str, sample_range: str | None) -> str:
    """The answers of a bad step, with what they earned."""
    from lmforge.stages.completions import read_completions

    answers = read_completions(source.parent.parent, record)
    first, after = _parse_range(sample_range, (0, len(answers)))
    lines = [f"{title}; answers {first} to {min(after, len(answers)) - 1} of {record['answers']}"]
    for number, answer in enumerate(answers[first:after], start=first):
        cut = "" if answer["ended"] else ", cut"
        lines.append(f"\nanswer {number}: reward {answer['reward']}, {answer['tokens']} tokens{cut}")
        lines += [repr(answer["prompt"]), repr(answer["completion"])]
    return "\n".join(lines)


def _parse_range(sample_range: str | None, default: tuple[int, int]) -> tuple[int, int]:
    """FIRST:AFTER_LAST as numbers, `usual` where nothing was asked for."""
    if sample_range is None:
        return default
    found = re.fullmatch(r"(\d+):(\d+)", sample_range)
    if not found or int(found[1]) >= int(found[2]):
        raise UserError(f"--samples {sample_range}: expected FIRST:AFTER_LAST, such as 0:3")
    return int(found[1]), int(found[2])


@dataclass(frozen=True)
class ExampleReader:
    """How the records of a file become examples: options of `data` by their names there."""

    mask: LossMaskMode = "assistant"
    format: ExampleFormat = "auto"
    fields: tuple[str, ...] = ()
    apply_chat_template: bool = False

    def examples(self, file: Path, tokenizer: Tokenizer) -> Iterator[tuple[int, str, TokenizedExample]]:
        """Each with the number of its record, and what it is in words. Raises UserError."""
        fields = renamed_fields(self.fields, "--fields")
        _, record = next(read_renamed_records(file, fields), ("", {}))
        kind = self._record_format(record)
        if kind != "conversations" and self.mask != "assistant":
            raise UserError(f"--mask {self.mask}: is for conversations; of {kind} the answers are learnt: leave it out")
        if kind == "pairs":
            for number, pair in enumerate(
                read_preference_pairs(file, tokenizer, apply_chat_template=self.apply_chat_template, fields=fields)
            ):
                yield number, f"pair {number}, chosen", pair.chosen
                yield number, f"pair {number}, rejected", pair.rejected
        elif kind == "judged":
            for number, judged in enumerate(
                read_unpaired_preferences(file, tokenizer, apply_chat_template=self.apply_chat_template, fields=fields)
            ):
                yield number, f"record {number}, {'good' if judged.desirable else 'bad'}", judged.example
        elif kind == "prompts":
            for number, prompt in enumerate(
                read_prompts(file, tokenizer, apply_chat_template=self.apply_chat_template, fields=fields)
            ):
                yield number, f"prompt {number}", TokenizedExample(prompt.tokens, np.zeros(len(prompt.tokens), bool))
        else:
            assert self.format != "prompts"
            read = read_conversations(file, tokenizer, format=self.format, mask=self.mask, fields=fields)
            for number, example in enumerate(read):
                yield number, f"record {number}", example

    def _record_format(self, record: dict[str, Any]) -> str:
        """What a file holds whose first record this is."""
        if self.format == "prompts":
            return "prompts"
        if self.format == "auto" and {"chosen", "rejected"} <= record.keys():
            return "pairs"
        if self.format == "auto" and {"prompt", "completion", "label"} <= record.keys() and self.mask == "assistant":
            return "judged"
        if (
            self.format == "auto"
            and "prompt" in record
            and not any(set(names) <= record.keys() for names in FORMAT_FIELDS.values())
        ):
            return "prompts"
        if self.apply_chat_template:
            raise UserError(
                "--apply_chat_template: is for pairs, judged answers and prompts; leave it out, or add --format prompts"
            )
        return "conversations"


def show_examples(file: Path, model: Path, reader: ExampleReader, sample_range: str | None) -> str:
    """Conversations, pairs, judged answers or prompts of a file as a model's tokenizer and template make them: which tokens
    are learnt is in colour, or in brackets where that cannot be seen. Raises UserError where one makes no sense."""
    from lmforge.stages.pretrained import find_pretrained  # with torch, which reads checkpoints

    tokenizer = find_pretrained(model).tokenizer()
    first, after = _parse_range(sample_range, (0, 3))
    lines = []
    for number, title, example in reader.examples(file, tokenizer):
        if number >= after:
            break
        if number >= first:
            learnt = "to be answered" if title.startswith("prompt ") else f"{int(example.loss_mask.sum())} of them learnt"
            lines.append(f"{title}: {len(example.tokens)} tokens, {learnt}")
            lines.append(_render_example(example, tokenizer) + "\n")
    if not lines:
        raise UserError(f"{file}: has no record {first}")
    return "\n".join(lines)


def _data_folder(config: StageConfig) -> tuple[Path, bool]:
    """Where a run's data lies, and whether several examples share a row."""
    if isinstance(config, Config):
        return config.data.folder, True
    assert isinstance(config, TunedConfig)
    if config.kind == "prompts":
        raise UserError("the batches of rollouts are answers, which are in the run's folder completions")
    from lmforge.stages.examples import examples_folder
    from lmforge.stages.inputs import find_required_pretrained

    return examples_folder(config, find_required_pretrained(config).tokenizer()), config.data.packing == "best-fit"


def _read_bad_step(file: Path) -> dict[str, Any]:
    of_samples, of_answers = {"samples", "data", "sequence_length", "seed", "plan_hash"}, {"answers", "part"}
    try:
        record = dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        record = {}
    if not {"step", "reason"} <= record.keys() or not (of_samples <= record.keys() or of_answers <= record.keys()):
        raise UserError(f"{file}: not the file of a bad step; with --tokenizer MODEL a file of examples is shown")
    return record
