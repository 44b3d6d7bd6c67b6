"""`lmforge show data`: samples of a run or of a file, as the model is given them, with the tokens that the loss counts."""

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field

from lmforge.config.stage import PretrainConfig, StageConfig
from lmforge.config.tuning import TunedConfig, renamed_fields
from lmforge.config.verbs import ShowOptions
from lmforge.data.chat.conversations import FORMAT_FIELDS, read_conversations, read_renamed_records
from lmforge.data.chat.example_display import format_example
from lmforge.data.chat.examples import EXAMPLES_MANIFEST, ExampleFolder, example_dataset
from lmforge.data.chat.preferences import read_preference_pairs, read_prompts, read_unpaired_preferences
from lmforge.data.dataset import PackedDataset, TokenDataset
from lmforge.data.packing import PackedSequence, TokenizedExample
from lmforge.data.shards import TokenFolder
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import UserError
from lmforge.runs import Run
from lmforge.untrusted import read_json

MAX_SAMPLES = 10_000  # printed at once
Count = Annotated[int, Field(ge=0, lt=2**62)]


def show_samples(source: Path, sample_range: str | None) -> str:
    """The text of samples of a run, or of the batch that the file of a bad step names, as the model is given them.

    Tokens of examples that the loss counts are in colour, or in brackets; of rollouts the completions are shown.
    `sample_range` is FIRST:AFTER_LAST. Raises UserError where the data is not what was trained on.
    """
    record = None
    if source.is_file():
        record = _read_bad_step(source)
        title = f"step {record.step}: {record.reason}"
        if record.samples is None:
            return _show_completions(source, record, title, sample_range)
        data, pack = Path(record.data), record.packing == "best-fit"
        length, seed = record.sequence_length, record.seed
        first, after = _parse_range(sample_range, record.samples)
    elif (run := Run.open(source)).exists():
        config = run.load_config()
        data, pack = _data_folder(config)
        length, seed = config.data.sequence_length, config.train.seed
        title = f"run {source}"
        first, after = _parse_range(sample_range, (0, 3))
    else:
        raise UserError(f"{source}: not a run, nor the file of a bad step")
    dataset: PackedDataset
    examples = ExampleFolder.open(data) if (data / EXAMPLES_MANIFEST).exists() else None
    if examples is not None:
        tokenizer = examples.tokenizer
        dataset = example_dataset(examples, "train", sequence_length=length, pack=pack, seed=seed)
    else:
        tokens = TokenFolder.open(data)
        tokenizer, dataset = tokens.tokenizer, TokenDataset(tokens, sequence_length=length, seed=seed)
    if record is not None and dataset.plan_hash != record.plan_hash:
        raise UserError(f"{data}: is not what the run was given when {source} was written; prepare it as it was")
    lines = [f"{title}; samples {first} to {after - 1} of {dataset.location}"]
    samples = zip(range(first, after), dataset.sequences(first, after), dataset.indices(first, after), strict=True)
    for number, sequence, index in samples:
        is_token = sequence.document_ids >= 0
        scored, documents = int((sequence.labels >= 0).sum()), len(set(sequence.document_ids[is_token]))
        lines.append(f"\nsample {number} (sequence {index}): {documents} documents, {scored} scored tokens")
        if examples is None:  # every token is scored, so colours would say nothing
            lines.append(repr(tokenizer.decode(sequence.tokens[is_token].tolist(), include_special_tokens=True)))
        else:
            lines += [_render_example(example, tokenizer) for example in _split_documents(sequence)]
    return "\n".join(lines)


def _split_documents(sequence: PackedSequence) -> Iterator[TokenizedExample]:
    """The documents of a sequence, before labels were shifted. A last token that is not scored is lost."""
    for document in range(int(sequence.document_ids.max()) + 1):
        inside = sequence.document_ids == document
        tokens, labels = sequence.tokens[inside], sequence.labels[inside]
        last = labels[-1:][labels[-1:] >= 0]
        scored = np.concatenate([[False], labels >= 0])[: len(tokens) + len(last)]
        yield TokenizedExample(np.concatenate([tokens, last]).astype(np.int32), scored)


def _render_example(example: TokenizedExample, tokenizer: Tokenizer) -> str:
    return format_example(example, tokenizer, ansi=sys.stdout.isatty())


def _show_completions(source: Path, record: "BadStepFile", title: str, sample_range: str | None) -> str:
    """The completions of a bad step, with their rewards."""
    from lmforge.stages.completions import read_completions

    completions = read_completions(source.parent.parent, record.model_dump())
    first, after = _parse_range(sample_range, (0, len(completions)))
    lines = [f"{title}; answers {first} to {min(after, len(completions)) - 1} of {record.answers}"]
    for number, completion in enumerate(completions[first:after], start=first):
        cut = "" if completion["ended"] else ", cut"
        lines.append(f"\nanswer {number}: reward {completion['reward']}, {completion['tokens']} tokens{cut}")
        lines += [repr(completion["prompt"]), repr(completion["completion"])]
    return "\n".join(lines)


def _parse_range(sample_range: str | None, default: tuple[int, int]) -> tuple[int, int]:
    """FIRST:AFTER_LAST as numbers, or as many of the default as are printed at once. Raises UserError."""
    if sample_range is None:
        return default[0], min(default[1], default[0] + MAX_SAMPLES)
    match = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", sample_range)
    if not match or int(match[1]) >= int(match[2]):
        raise UserError(f"--samples {sample_range}: expected FIRST:AFTER_LAST, such as 0:3")
    if int(match[2]) - int(match[1]) > MAX_SAMPLES:
        raise UserError(f"--samples {sample_range}: more than {MAX_SAMPLES:,} samples; give fewer")
    return int(match[1]), int(match[2])


def _read_examples(options: ShowOptions, tokenizer: Tokenizer) -> Iterator[tuple[int, str, TokenizedExample]]:
    """The examples of the file, each with the number of its record and a title. Raises UserError."""
    assert options.of is not None
    file, fields = options.of, renamed_fields(options.fields, "--fields")
    _, record = next(read_renamed_records(file, fields), ("", {}))
    kind = _record_format(options, record)
    if kind != "conversations" and options.mask != "assistant":
        raise UserError(f"--mask {options.mask}: is for conversations, not for {kind}; leave it out")
    reading: dict[str, Any] = {"apply_chat_template": options.apply_chat_template, "fields": fields}
    if kind == "pairs":
        for number, pair in enumerate(read_preference_pairs(file, tokenizer, **reading)):
            yield number, f"pair {number}, chosen", pair.chosen
            yield number, f"pair {number}, rejected", pair.rejected
    elif kind == "unpaired":
        for number, labelled in enumerate(read_unpaired_preferences(file, tokenizer, **reading)):
            yield number, f"record {number}, {'good' if labelled.desirable else 'bad'}", labelled.example
    elif kind == "prompts":
        for number, prompt in enumerate(read_prompts(file, tokenizer, **reading)):
            yield number, f"prompt {number}", TokenizedExample(prompt.tokens, np.zeros(len(prompt.tokens), bool))
    else:
        assert options.format != "prompts"
        examples = read_conversations(file, tokenizer, format=options.format, mask=options.mask, fields=fields)
        for number, example in enumerate(examples):
            yield number, f"record {number}", example


def _record_format(options: ShowOptions, record: dict[str, Any]) -> str:
    """What a file holds whose first record this is."""
    if options.format == "prompts":
        return "prompts"
    if options.format == "auto":
        if {"chosen", "rejected"} <= record.keys():
            return "pairs"
        if {"prompt", "completion", "label"} <= record.keys() and options.mask == "assistant":
            return "unpaired"
        if "prompt" in record and not any(set(names) <= record.keys() for names in FORMAT_FIELDS.values()):
            return "prompts"
    if options.apply_chat_template:
        raise UserError(
            "--apply_chat_template: is for pairs, labelled completions and prompts; leave it out, or add --format prompts"
        )
    return "conversations"


def show_examples(options: ShowOptions, model: Path) -> str:
    """Conversations, pairs, unpaired preferences or prompts of a file, as a model's tokenizer and chat template encode them.

    Tokens that the loss counts are in colour, or in brackets where there is none. Raises UserError for a wrong record."""
    from lmforge.stages.pretrained import find_pretrained  # with torch, which reads checkpoints

    tokenizer = find_pretrained(model).tokenizer()
    first, after = _parse_range(options.samples, (0, 3))
    lines = []
    for number, title, example in _read_examples(options, tokenizer):
        if number >= after:
            break
        if number >= first:
            in_loss = "no completion" if title.startswith("prompt ") else f"{int(example.loss_mask.sum())} in the loss"
            lines.append(f"{title}: {len(example.tokens)} tokens, {in_loss}\n{_render_example(example, tokenizer)}\n")
    if not lines:
        raise UserError(f"{options.of}: has no record {first}")
    return "\n".join(lines)


def _data_folder(config: StageConfig) -> tuple[Path, bool]:
    """The data folder of a run, and whether examples are packed."""
    if isinstance(config, PretrainConfig):
        return config.data.folder, True
    assert isinstance(config, TunedConfig)
    if config.kind == "prompts":
        raise UserError("the batches of rollouts are answers, which are in the run's folder completions")
    from lmforge.stages.examples import examples_folder
    from lmforge.stages.pretrained import find_required_pretrained

    return examples_folder(config, find_required_pretrained(config).tokenizer()), config.data.packing == "best-fit"


class BadStepFile(BaseModel, extra="allow"):
    """What a run writes of a bad step: its samples, or with rollouts its completions."""

    step: Count
    reason: str = Field(max_length=200)
    samples: tuple[Count, Count] | None = None
    data: str = Field("", pattern=r"^[^\x00]*$")
    sequence_length: int = Field(1, ge=1, le=2**24)
    seed: Count = 0
    plan_hash: str = ""
    packing: str = "best-fit"
    answers: str | None = Field(None, pattern=r"^completions/[A-Za-z0-9_-]+\*\.jsonl$")
    ranks: int = Field(1, ge=1, le=1_000_000)
    part: tuple[Count, Annotated[int, Field(ge=1)]] = (0, 1)


def _read_bad_step(file: Path) -> BadStepFile:
    with suppress(UserError):
        record = read_json(file, BadStepFile)
        samples = record.samples
        if (samples and samples[0] < samples[1] and record.data and record.plan_hash) or "answers" in record.model_fields_set:
            return record
    raise UserError(f"{file}: not the file of a bad step; with --tokenizer MODEL a file of examples is shown")
