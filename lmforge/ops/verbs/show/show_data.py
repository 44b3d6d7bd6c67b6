"""`lmforge show data`: the sources of a recipe or a token folder and their documents; or samples of
a run or a recipe as the model is given them. Examples of a file are shown by show_examples.py.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from lmforge.core.data.packing import PackedSequence, TokenizedExample
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.errors import UserError, format_count
from lmforge.core.files.untrusted import check_content
from lmforge.core.options.batch_plan import batch_plan
from lmforge.core.options.load import read_config
from lmforge.core.options.options import validate_options
from lmforge.core.options.ranges import COUNT
from lmforge.core.options.stage import PretrainConfig, StageConfig
from lmforge.core.records.kinds import Kind, kind_of, unexpected
from lmforge.core.records.run_records import BadStepFile, CompletionRecord, read_bad_step
from lmforge.core.records.runs import Run
from lmforge.core.stages.training_data import TokenSources
from lmforge.ops.report.source_report import SourceReport, read_source
from lmforge.ops.verbs.show.describe_data import align_right
from lmforge.post.options.tuning import TunedConfig
from lmforge.text.chat.example_display import RESET, format_example
from lmforge.text.sources.records import read_records

MAX_SAMPLES = 10_000  # printed at once
RULE_STYLE = "\x1b[36m"


def show_samples(source: Path, sample_range: str | None, count: int | None = None) -> str:
    """The text of samples of a run, a recipe, a token folder, or of the batch that the file of a
    bad step names.

    They are as the model is given them: a line begins each document, and tokens that the loss
    counts are in colour, or in brackets; for rollouts the completions are shown. `sample_range` is
    FIRST:AFTER_LAST; `count` is a number of samples instead, evenly spaced over the training data.
    Raises UserError where the data is not what was trained on.
    """
    record = None
    if source.is_file() and source.suffix != ".toml":
        if count is not None:
            raise UserError(
                f"{source}: --num_samples is for a run, a recipe or a token folder; give --samples"
                " FIRST:AFTER_LAST"
            )
        record = read_bad_step(source)
        title = f"step {record.step}: {record.reason}"
        if record.samples is None:
            return _show_completions(source, record, title, sample_range)
        run = Run.open(source.absolute().parent.parent)
        if not run.exists():
            raise UserError(
                f"{source}: {run.path} is not a run; leave this file in the directory of its run,"
                " whose recipe names the data"
            )
        config = run.load_config()
        default = record.samples
    else:
        title, config = open_config(source)
        default = (0, 3)
    size = batch_plan(config.train, config.data.sequence_length, ranks=1).global_batch_size
    if isinstance(config, TunedConfig):
        if config.kind == "prompts":
            raise UserError(
                "this run was trained on rollouts: what it sampled is in its folder completions"
            )
        # With torch, which reads checkpoints.
        from lmforge.post.examples import open_training_examples

        tokenizer, dataset = open_training_examples(config, size)
    else:
        assert isinstance(config, PretrainConfig)
        sources = TokenSources.open(config)
        tokenizer = sources.tokenizer
        dataset = sources.training(size)
    if (
        record is not None
        and record.samples
        and dataset.plan_hash_at(record.samples[1]) != record.plan_hash
    ):
        raise UserError(
            f"{dataset.location}: the data has changed since {source} was written; prepare it as"
            " it was"
        )
    if count is None:
        chosen: Sequence[int] = range(*parse_range(sample_range, default))
        which = f"samples {chosen[0]} to {chosen[-1]}"
    else:
        total = size * config.with_steps(dataset.sequences_per_epoch, size).train.steps
        chosen = [at * total // min(count, total) for at in range(min(count, total))]
        which = f"{format_count(len(chosen), 'sample')} of {total:,}, evenly spaced,"
    samples = (
        f"\nsample {n} ({dataset.describe_sample(n)}): {_render(dataset.sequence(n), tokenizer)}"
        for n in chosen
    )
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
    # More than one where the number of steps would exceed the option's limit.
    batch = 1 + transitions // length // COUNT["le"]
    table = {
        "data": {"folder": str(source), "sequence_length": length},
        "train": {"epochs": 1, "global_batch_size": batch},
        "schedule": {"warmup_steps": 0},  # of a small folder there are few steps
    }
    return f"folder {source}", validate_options(PretrainConfig, table, str(source))


def _render(sequence: PackedSequence, tokenizer: Tokenizer) -> str:
    """A line about the content of a sequence, each of its documents after a line with its length,
    and its padding.
    """
    padding = int((sequence.document_ids < 0).sum())
    scored = int((sequence.labels >= 0).sum())
    documents = list(_split_documents(sequence))
    lines = [f"{format_count(len(documents), 'document')}, {scored} scored tokens"]
    for number, example in enumerate(documents):
        tokens = format_count(int((sequence.document_ids == number).sum()), "token")
        lines += [_rule(f"document {number + 1}: {tokens}"), render_example(example, tokenizer)]
    if padding:
        lines.append(_rule(f"padding: {format_count(padding, 'token')}, not scored"))
    return "\n".join(lines)


def _rule(words: str) -> str:
    if sys.stdout.isatty():
        return f"{RULE_STYLE}── {words} ──{RESET}"
    return f"── {words} ──"


def _split_documents(sequence: PackedSequence) -> Iterator[TokenizedExample]:
    """The documents of a sequence, before labels were shifted.

    A last token that is not scored is lost.
    """
    for document in range(int(sequence.document_ids.max()) + 1):
        inside = sequence.document_ids == document
        tokens = sequence.tokens[inside]
        labels = sequence.labels[inside]
        last = labels[-1:][labels[-1:] >= 0]
        scored = np.concatenate([[False], labels >= 0])[: len(tokens) + len(last)]
        yield TokenizedExample(np.concatenate([tokens, last]).astype(np.int32), scored)


def render_example(example: TokenizedExample, tokenizer: Tokenizer) -> str:
    """An example with its scored tokens in colour, on a terminal, or in brackets."""
    return format_example(example, tokenizer, ansi=sys.stdout.isatty())


def _show_completions(
    source: Path, bad_step: BadStepFile, title: str, sample_range: str | None
) -> str:
    """The completions of a bad step, with their rewards."""
    completions = _read_completions(source.parent.parent, bad_step)
    first, after = parse_range(sample_range, (0, len(completions)))
    lines = [
        (
            f"{title}; completions {first} to {min(after, len(completions)) - 1} of"
            f" {bad_step.completions}"
        )
    ]
    for number, completion in enumerate(completions[first:after], start=first):
        cut = ", cut"
        if completion.ended:
            cut = ""
        lines.append(
            f"\ncompletion {number}: reward {completion.reward}, {completion.tokens} tokens{cut}"
        )
        lines += [repr(completion.prompt), repr(completion.completion)]
    return "\n".join(lines)


def _read_completions(run_folder: Path, bad_step: BadStepFile) -> list[CompletionRecord]:
    """The completions of a bad step, rank by rank.

    Raises UserError where there are none, or for an invalid record.
    """
    if bad_step.completions is None:
        raise UserError(
            f"{run_folder}: the completions of this step were not written;"
            " --rollout.log_completions_every 1 writes those of every step"
        )
    part, parts = bad_step.part
    records: list[CompletionRecord] = []
    # Files of higher ranks belong to another attempt. One that is missing is on the disk of another
    # host.
    paths = [
        run_folder / bad_step.completions.replace("*", str(rank)) for rank in range(bad_step.ranks)
    ]
    for path in filter(Path.exists, paths):
        table = [
            check_content(record, CompletionRecord, place) for place, record in read_records(path)
        ]
        size = len(table) // parts
        records += table[part * size : (part + 1) * size]
    if not records:
        raise UserError(
            f"{run_folder / bad_step.completions}: no such files, so the completions of this step"
            " cannot be shown"
        )
    return records


def parse_range(sample_range: str | None, default: tuple[int, int]) -> tuple[int, int]:
    """FIRST:AFTER_LAST as numbers, or as many of the default as are printed at once.

    Raises UserError.
    """
    if sample_range is None:
        return default[0], min(default[1], default[0] + MAX_SAMPLES)
    match = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", sample_range)
    if not match or int(match[1]) >= int(match[2]):
        raise UserError(f"--samples {sample_range}: expected FIRST:AFTER_LAST, such as 0:3")
    if int(match[2]) - int(match[1]) > MAX_SAMPLES:
        raise UserError(f"--samples {sample_range}: more than {MAX_SAMPLES:,} samples; give fewer")
    return int(match[1]), int(match[2])


def report_data(source: Path) -> str:
    """Tokens, documents and bytes per token by source, and document lengths.

    Raises UserError where that cannot be read, or is no data of pretraining.
    """
    title, config = open_config(source)
    if not isinstance(config, PretrainConfig):
        raise UserError(
            f"{source}: is not trained on token shards; --num_samples 5 prints samples of what it"
            " is trained on"
        )
    opened = TokenSources.open(config)
    size = batch_plan(config.train, config.data.sequence_length, ranks=1).global_batch_size
    dataset = opened.training(size)
    # The tokens of each source in the recipe's samples, padding included.
    used = [
        use.tokens
        for use in dataset.use_until(
            size * config.with_steps(dataset.sequences_per_epoch, size).train.steps
        )
    ]
    sources = list(map(read_source, opened.names, opened.folders))
    lengths = [line for each in sources for line in each.describe_lengths()]
    return "\n".join([title, *align_right(_rows(sources, used)), *lengths])


def _rows(sources: Sequence[SourceReport], used: Sequence[int]) -> list[list[str]]:
    """A row a source, after their titles.

    `of training` is the fraction of the tokens that the recipe reads.
    """
    tokens = sum(each.tokens for each in sources)
    all_used = sum(used)
    rows = [["source", "documents", "tokens", "of all tokens", "of training", "bytes per token"]]
    for each, of_source in zip(sources, used, strict=True):
        ratio = "unknown"
        if each.text_bytes:
            ratio = f"{each.text_bytes / each.tokens:.2f}"
        ratios = [f"{each.tokens / tokens:.2%}", f"{of_source / all_used:.2%}"]
        rows.append([each.name, f"{each.documents:,}", f"{each.tokens:,}", *ratios, ratio])
    return rows
