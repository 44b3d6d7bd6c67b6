"""`lmforge show data`: the sources of a recipe or a token folder and their documents; samples of a run or a recipe as the model
is given them; or examples of a file as a model's tokenizer and chat template encode them, with the tokens that the loss counts.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field

from lmforge.config.batch_plan import batch_plan
from lmforge.config.load import read_config
from lmforge.config.options import validate_options
from lmforge.config.ranges import COUNT
from lmforge.config.stage import PretrainConfig, StageConfig
from lmforge.config.tuning import TunedConfig, renamed_fields
from lmforge.config.verbs.examine import ShowOptions
from lmforge.data.chat.conversations import FORMAT_FIELDS, read_conversations, read_renamed_records
from lmforge.data.chat.example_display import RESET, format_example
from lmforge.data.chat.preferences import read_preference_pairs, read_prompts, read_unpaired_preferences
from lmforge.data.mixture import TrainingDataset
from lmforge.data.packing import PackedSequence, TokenizedExample
from lmforge.data.shards.folder import TokenFolder
from lmforge.data.shards.source_report import SourceReport, read_source
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import UserError, format_count
from lmforge.interop.kinds import Kind, kind_of, unexpected
from lmforge.runs import Run
from lmforge.stages.training_data import TokenSources
from lmforge.untrusted import read_json
from lmforge.verbs.show.describe import align_right

MAX_SAMPLES = 10_000  # printed at once
RULE_STYLE = "\x1b[36m"
Count = Annotated[int, Field(ge=0, lt=2**62)]


def show_samples(source: Path, sample_range: str | None, count: int | None = None) -> str:
    """The text of samples of a run, a recipe, a token folder, or of the batch that the file of a bad step names.

    They are as the model is given them: a line begins each document, and tokens that the loss counts are in colour, or in
    brackets; for rollouts the completions are shown. `sample_range` is FIRST:AFTER_LAST; `count` is a number of samples
    instead, evenly spaced over the training data. Raises UserError where the data is not what was trained on.
    """
    record = None
    if source.is_file() and source.suffix != ".toml":
        if count is not None:
            raise UserError(
                f"{source}: --num_samples is for a run, a recipe or a token folder; give --samples FIRST:AFTER_LAST"
            )
        record = _read_bad_step(source)
        title = f"step {record.step}: {record.reason}"
        if record.samples is None:
            return _show_completions(source, record, title, sample_range)
        run = Run.open(source.absolute().parent.parent)
        if not run.exists():
            raise UserError(
                f"{source}: {run.path} is not a run; leave this file in the directory of its run, whose recipe names the data"
            )
        config, default = run.load_config(), record.samples
    else:
        title, config = open_config(source)
        default = (0, 3)
    size = batch_plan(config.train, config.data.sequence_length, ranks=1).global_batch_size
    tokenizer, dataset = _open_training_data(config, size)
    if record is not None and record.samples and dataset.plan_hash_at(record.samples[1]) != record.plan_hash:
        raise UserError(f"{dataset.location}: the data has changed since {source} was written; prepare it as it was")
    if count is None:
        chosen: Sequence[int] = range(*parse_range(sample_range, default))
        which = f"samples {chosen[0]} to {chosen[-1]}"
    else:
        total = size * config.with_steps(dataset.sequences_per_epoch, size).train.steps
        chosen = [at * total // min(count, total) for at in range(min(count, total))]
        which = f"{format_count(len(chosen), 'sample')} of {total:,}, evenly spaced,"
    samples = (f"\nsample {n} ({dataset.describe_sample(n)}): {_render(dataset.sequence(n), tokenizer)}" for n in chosen)
    return "\n".join([f"{title}; {which} of {dataset.location}", *samples])


def open_config(source: Path) -> tuple[str, StageConfig]:
    """A title, and the config with the training data: of a run, a recipe, or a token folder.

    That of a folder is one epoch of its train split. Raises UserError for anything else.
    """
    kind = kind_of(source)
    if kind == Kind.RECIPE:
        return f"recipe {source}", read_config(source)
    if kind == Kind.RUN:
        return f"run {source}", Run(source).load_config()
    if kind != Kind.TOKENS:
        raise unexpected(source, (Kind.RUN, Kind.RECIPE, Kind.TOKENS, "the file of a bad step"))
    transitions = TokenFolder.open(source).split("train").num_tokens - 1
    length = max(1, min(transitions, PretrainConfig().data.sequence_length))
    batch = 1 + transitions // length // COUNT["le"]  # more than one where the number of steps would exceed the option's limit
    table = {
        "data": {"folder": str(source), "sequence_length": length},
        "train": {"epochs": 1, "global_batch_size": batch},
        "schedule": {"warmup_steps": 0},  # of a small folder there are few steps
    }
    return f"folder {source}", validate_options(PretrainConfig, table, str(source))


def _render(sequence: PackedSequence, tokenizer: Tokenizer) -> str:
    """A line about the content of a sequence, each of its documents after a line with its length, and its padding."""
    padding, scored = int((sequence.document_ids < 0).sum()), int((sequence.labels >= 0).sum())
    documents = list(_split_documents(sequence))
    lines = [f"{format_count(len(documents), 'document')}, {scored} scored tokens"]
    for number, example in enumerate(documents):
        tokens = format_count(int((sequence.document_ids == number).sum()), "token")
        lines += [_rule(f"document {number + 1}: {tokens}"), render_example(example, tokenizer)]
    if padding:
        lines.append(_rule(f"padding: {format_count(padding, 'token')}, not scored"))
    return "\n".join(lines)


def _rule(words: str) -> str:
    return f"{RULE_STYLE}── {words} ──{RESET}" if sys.stdout.isatty() else f"── {words} ──"


def _split_documents(sequence: PackedSequence) -> Iterator[TokenizedExample]:
    """The documents of a sequence, before labels were shifted. A last token that is not scored is lost."""
    for document in range(int(sequence.document_ids.max()) + 1):
        inside = sequence.document_ids == document
        tokens, labels = sequence.tokens[inside], sequence.labels[inside]
        last = labels[-1:][labels[-1:] >= 0]
        scored = np.concatenate([[False], labels >= 0])[: len(tokens) + len(last)]
        yield TokenizedExample(np.concatenate([tokens, last]).astype(np.int32), scored)


def render_example(example: TokenizedExample, tokenizer: Tokenizer) -> str:
    """An example with its scored tokens in colour, on a terminal, or in brackets."""
    return format_example(example, tokenizer, ansi=sys.stdout.isatty())


def _show_completions(source: Path, record: "BadStepFile", title: str, sample_range: str | None) -> str:
    """The completions of a bad step, with their rewards."""
    from lmforge.stages.alignment.completions import read_completions

    completions = read_completions(source.parent.parent, record.model_dump())
    first, after = parse_range(sample_range, (0, len(completions)))
    lines = [f"{title}; completions {first} to {min(after, len(completions)) - 1} of {record.completions}"]
    for number, completion in enumerate(completions[first:after], start=first):
        cut = "" if completion.ended else ", cut"
        lines.append(f"\ncompletion {number}: reward {completion.reward}, {completion.tokens} tokens{cut}")
        lines += [repr(completion.prompt), repr(completion.completion)]
    return "\n".join(lines)


def parse_range(sample_range: str | None, default: tuple[int, int]) -> tuple[int, int]:
    """FIRST:AFTER_LAST as numbers, or as many of the default as are printed at once. Raises UserError."""
    if sample_range is None:
        return default[0], min(default[1], default[0] + MAX_SAMPLES)
    match = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", sample_range)
    if not match or int(match[1]) >= int(match[2]):
        raise UserError(f"--samples {sample_range}: expected FIRST:AFTER_LAST, such as 0:3")
    if int(match[2]) - int(match[1]) > MAX_SAMPLES:
        raise UserError(f"--samples {sample_range}: more than {MAX_SAMPLES:,} samples; give fewer")
    return int(match[1]), int(match[2])


def _open_training_data(config: StageConfig, global_batch_size: int) -> tuple[Tokenizer, TrainingDataset]:
    """The tokenizer of a run and the samples that it is trained on."""
    if isinstance(config, PretrainConfig):
        sources = TokenSources.open(config)
        return sources.tokenizer, sources.training(global_batch_size)
    assert isinstance(config, TunedConfig)
    if config.kind == "prompts":
        raise UserError("this run was trained on rollouts: what it sampled is in its folder completions")
    from lmforge.stages.examples import open_training_examples  # with torch, which reads checkpoints

    return open_training_examples(config, global_batch_size)


class BadStepFile(BaseModel, extra="allow"):
    """The file of a bad step: its samples, or with rollouts its completions."""

    step: Count
    reason: str = Field(max_length=200)
    samples: tuple[Count, Count] | None = None
    plan_hash: str = ""
    completions: str | None = Field(None, pattern=r"^completions/[A-Za-z0-9_-]+\*\.jsonl$")
    ranks: int = Field(1, ge=1, le=1_000_000)
    part: tuple[Count, Annotated[int, Field(ge=1)]] = (0, 1)


def _read_bad_step(file: Path) -> BadStepFile:
    with suppress(UserError):
        record = read_json(file, BadStepFile)
        samples = record.samples
        if (samples and samples[0] < samples[1] and record.plan_hash) or "completions" in record.model_fields_set:
            return record
    raise UserError(f"{file}: not the file of a bad step; with --tokenizer MODEL a file of examples is shown")


def is_reported(source: Path) -> bool:
    """Whether this is a recipe or a token folder, whose data is summarized unless samples are requested."""
    return kind_of(source) in (Kind.RECIPE, Kind.TOKENS)


def report_data(source: Path) -> str:
    """Tokens, documents and bytes per token by source, and document lengths.

    Raises UserError where that cannot be read, or is no data of pretraining.
    """
    title, config = open_config(source)
    if not isinstance(config, PretrainConfig):
        raise UserError(f"{source}: is not trained on token shards; --num_samples 5 prints samples of what it is trained on")
    sources, used = _read_sources(config)
    lengths = [line for each in sources for line in each.describe_lengths()]
    return "\n".join([title, *align_right(_rows(sources, used)), *lengths])


def _read_sources(config: PretrainConfig) -> tuple[list[SourceReport], list[int]]:
    """The sources, and for each the tokens in the recipe's samples, including padding."""
    opened = TokenSources.open(config)
    size = batch_plan(config.train, config.data.sequence_length, ranks=1).global_batch_size
    dataset = opened.training(size)
    uses = dataset.use_until(size * config.with_steps(dataset.sequences_per_epoch, size).train.steps)
    return list(map(read_source, opened.names, opened.folders)), [use.tokens for use in uses]


def _rows(sources: Sequence[SourceReport], used: Sequence[int]) -> list[list[str]]:
    """A row a source, after their titles. `of training` is the fraction of the tokens that the recipe reads."""
    tokens, all_used = sum(each.tokens for each in sources), sum(used)
    rows = [["source", "documents", "tokens", "of all tokens", "of training", "bytes per token"]]
    for each, of_source in zip(sources, used, strict=True):
        ratio = f"{each.text_bytes / each.tokens:.2f}" if each.text_bytes else "unknown"
        ratios = [f"{each.tokens / tokens:.2%}", f"{of_source / all_used:.2%}"]
        rows.append([each.name, f"{each.documents:,}", f"{each.tokens:,}", *ratios, ratio])
    return rows


def show_examples(options: ShowOptions, model: Path) -> str:
    """Conversations, pairs, unpaired preferences or prompts of a file, as a model's tokenizer and chat template encode them.

    Tokens that the loss counts are in colour, or in brackets where there is none. Raises UserError for a wrong record."""
    from lmforge.stages.pretrained import find_pretrained  # with torch, which reads checkpoints

    # A folder may hold a tokenizer alone.
    tokenizer = Tokenizer.open(model) if kind_of(model) == Kind.FOLDER else find_pretrained(model).tokenizer()
    first, after = parse_range(options.samples, (0, 3))
    lines = []
    for number, title, example in _read_examples(options, tokenizer):
        if number >= after:
            break
        if number >= first:
            in_loss = "no completion" if title.startswith("prompt ") else f"{int(example.loss_mask.sum())} in the loss"
            lines.append(f"{title}: {len(example.tokens)} tokens, {in_loss}\n{render_example(example, tokenizer)}\n")
    if not lines:
        raise UserError(f"{options.of}: has no record {first}")
    return "\n".join(lines)


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
    """The kind of examples in a file, by its first record."""
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
