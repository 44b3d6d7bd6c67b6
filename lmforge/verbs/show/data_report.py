"""`lmforge show data` of a recipe or a token folder: its sources and their documents.

It describes the train splits. Samples are in show_data.py.
"""

from collections.abc import Sequence
from pathlib import Path

from lmforge.config.batch_plan import batch_plan
from lmforge.config.stage import PretrainConfig
from lmforge.data.shards.source_report import SourceReport, read_source
from lmforge.errors import UserError
from lmforge.interop.kinds import Kind, kind_of
from lmforge.stages.training_data import TokenSources
from lmforge.verbs.show.describe_data import align_right
from lmforge.verbs.show.show_data import open_config


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
