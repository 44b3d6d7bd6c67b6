"""`lmforge show data`: what a run reads, or a file holds, as the model is given it, with what is learnt of it."""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lmforge.config import Config, ExampleFormat, StageConfig, renamed_fields
from lmforge.config_post import TunedConfig
from lmforge.data.colour import colour
from lmforge.data.conversations import FORMATS, Example, read_conversations, renamed_records
from lmforge.data.examples import MANIFEST as EXAMPLES
from lmforge.data.examples import ExampleFolder, example_rows
from lmforge.data.packing import Row
from lmforge.data.preferences import read_labelled, read_pairs, read_prompts
from lmforge.data.shards import TokenFolder
from lmforge.data.stream import Rows, Stream
from lmforge.data.templates import Mask
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import Mistake
from lmforge.runs import Run


def show_samples(of: Path, samples: str | None) -> str:
    """The text of samples of a run, or of the batch that a bad step's file names, as the model is given them.

    Of examples it is in colour, or in brackets, which tokens are learnt; of rollouts the answers are shown. `samples` is
    FIRST:AFTER_LAST. Raises Mistake where the data is not what was trained on.
    """
    fit = True
    if of.is_file():
        record = _bad_step(of)
        title = f"step {record['step']}: {record['reason']}"
        if "answers" in record:
            return _answers(of, record, title, samples)
        data, length, seed = Path(record["data"]), record["length"], record["seed"]
        fit = record.get("fit", True)
        first, after = record["samples"]
    elif (run := Run.open(of)).exists():
        config = run.config()
        data, fit = _data_of(config)
        length, seed = config.data.length, config.train.seed
        first, after, title = 0, 3, f"run {of}"
    else:
        raise Mistake(f"{of}: not a run, nor the file of a bad step")
    stream: Rows
    examples = ExampleFolder.open(data) if (data / EXAMPLES).exists() else None
    if examples is not None:
        tokenizer, stream = examples.tokenizer, example_rows(examples, "train", length=length, fit=fit, seed=seed)
    else:
        tokens = TokenFolder.open(data)
        tokenizer, stream = tokens.tokenizer, Stream(tokens, length=length, seed=seed)
    if of.is_file() and stream.plan_hash != record["plan_hash"]:
        raise Mistake(f"{data}: is not what the run was given when {of} was written; prepare it as it was")
    first, after = _asked(samples, (first, after))
    lines = [f"{title}; samples {first} to {after - 1} of {stream.where}"]
    rows = zip(range(first, after), stream.rows(first, after), stream.indices(first, after), strict=True)
    for number, row, index in rows:
        there = row.documents >= 0
        scored, documents = int((row.targets >= 0).sum()), len(set(row.documents[there]))
        lines.append(f"\nsample {number} (row {index}): {documents} documents, {scored} scored tokens")
        if examples is None:  # where every token is learnt colours would say nothing
            lines.append(repr(tokenizer.decode(row.tokens[there].tolist(), specials=True)))
        else:
            lines += [_coloured(example, tokenizer) for example in _examples_of(row)]
    return "\n".join(lines)


def _examples_of(row: Row) -> Iterator[Example]:
    """The documents of a row as they were before inputs and targets were told apart. A last token that is not learnt is in
    neither."""
    for document in range(int(row.documents.max()) + 1):
        here = row.documents == document
        tokens, targets = row.tokens[here], row.targets[here]
        last = targets[-1:][targets[-1:] >= 0]
        scored = np.concatenate([[False], targets >= 0])[: len(tokens) + len(last)]
        yield Example(np.concatenate([tokens, last]).astype(np.int32), scored)


def _coloured(example: Example, tokenizer: Tokenizer) -> str:
    return colour(example, tokenizer, ansi=sys.stdout.isatty())


def _answers(of: Path, record: dict[str, Any], title: str, samples: str | None) -> str:
    """The answers of a bad step, with what they earned."""
    from lmforge.train.completions import answers_at

    answers = answers_at(of.parent.parent, record)
    first, after = _asked(samples, (0, len(answers)))
    lines = [f"{title}; answers {first} to {min(after, len(answers)) - 1} of {record['answers']}"]
    for number, answer in enumerate(answers[first:after], start=first):
        cut = "" if answer["ended"] else ", cut"
        lines.append(f"\nanswer {number}: reward {answer['reward']}, {answer['tokens']} tokens{cut}")
        lines += [repr(answer["prompt"]), repr(answer["completion"])]
    return "\n".join(lines)


def _asked(samples: str | None, usual: tuple[int, int]) -> tuple[int, int]:
    """FIRST:AFTER_LAST as numbers, `usual` where nothing was asked for."""
    if samples is None:
        return usual
    found = re.fullmatch(r"(\d+):(\d+)", samples)
    if not found or int(found[1]) >= int(found[2]):
        raise Mistake(f"--samples {samples}: expected FIRST:AFTER_LAST, such as 0:3")
    return int(found[1]), int(found[2])


@dataclass(frozen=True)
class Reader:
    """How the records of a file become examples: options of `data` by their names there."""

    mask: Mask = "assistant"
    format: ExampleFormat = "auto"
    fields: tuple[str, ...] = ()
    as_chat: bool = False

    def examples(self, file: Path, tokenizer: Tokenizer) -> Iterator[tuple[int, str, Example]]:
        """Each with the number of its record, and what it is in words. Raises Mistake."""
        fields = renamed_fields(self.fields, "--fields")
        _, record = next(renamed_records(file, fields), ("", {}))
        kind = self._kind(record)
        if kind != "conversations" and self.mask != "assistant":
            raise Mistake(f"--mask {self.mask}: is for conversations; of {kind} the answers are learnt: leave it out")
        if kind == "pairs":
            for number, pair in enumerate(read_pairs(file, tokenizer, as_chat=self.as_chat, fields=fields)):
                yield number, f"pair {number}, chosen", pair.chosen
                yield number, f"pair {number}, rejected", pair.rejected
        elif kind == "judged":
            for number, judged in enumerate(read_labelled(file, tokenizer, as_chat=self.as_chat, fields=fields)):
                yield number, f"record {number}, {'good' if judged.good else 'bad'}", judged.example
        elif kind == "prompts":
            for number, prompt in enumerate(read_prompts(file, tokenizer, as_chat=self.as_chat, fields=fields)):
                yield number, f"prompt {number}", Example(prompt.tokens, np.zeros(len(prompt.tokens), bool))
        else:
            assert self.format != "prompts"
            read = read_conversations(file, tokenizer, format=self.format, mask=self.mask, fields=fields)
            for number, example in enumerate(read):
                yield number, f"record {number}", example

    def _kind(self, record: dict[str, Any]) -> str:
        """What a file holds whose first record this is."""
        if self.format == "prompts":
            return "prompts"
        if self.format == "auto" and {"chosen", "rejected"} <= record.keys():
            return "pairs"
        if self.format == "auto" and {"prompt", "completion", "label"} <= record.keys() and self.mask == "assistant":
            return "judged"
        if self.format == "auto" and "prompt" in record and not any(set(names) <= record.keys() for names in FORMATS.values()):
            return "prompts"
        if self.as_chat:
            raise Mistake("--as_chat: is for pairs, judged answers and prompts; leave it out, or add --format prompts")
        return "conversations"


def show_examples(file: Path, model: Path, reader: Reader, samples: str | None) -> str:
    """Conversations, pairs, judged answers or prompts of a file as a model's tokenizer and template make them: which tokens
    are learnt is in colour, or in brackets where that cannot be seen. Raises Mistake where one makes no sense."""
    from lmforge.train.origin import find_origin  # with torch, which reads checkpoints

    tokenizer = find_origin(model).tokenizer()
    first, after = _asked(samples, (0, 3))
    lines = []
    for number, title, example in reader.examples(file, tokenizer):
        if number >= after:
            break
        if number >= first:
            learnt = "to be answered" if title.startswith("prompt ") else f"{int(example.scored.sum())} of them learnt"
            lines.append(f"{title}: {len(example.tokens)} tokens, {learnt}")
            lines.append(_coloured(example, tokenizer) + "\n")
    if not lines:
        raise Mistake(f"{file}: has no record {first}")
    return "\n".join(lines)


def _data_of(config: StageConfig) -> tuple[Path, bool]:
    """Where a run's data lies, and whether several examples share a row."""
    if isinstance(config, Config):
        return config.data.folder, True
    assert isinstance(config, TunedConfig)
    if config.kind == "prompts":
        raise Mistake("the batches of rollouts are answers, which are in the run's folder completions")
    from lmforge.train.examples import folder_of, origin_of

    return folder_of(config, origin_of(config).tokenizer()), config.data.packing == "best-fit"


def _bad_step(file: Path) -> dict[str, Any]:
    of_samples, of_answers = {"samples", "data", "length", "seed", "plan_hash"}, {"answers", "part"}
    try:
        record = dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        record = {}
    if not {"step", "reason"} <= record.keys() or not (of_samples <= record.keys() or of_answers <= record.keys()):
        raise Mistake(f"{file}: not the file of a bad step; with --tokenizer MODEL a file of examples is shown")
    return record
