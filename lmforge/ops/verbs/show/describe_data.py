"""Lines about the token shards of a recipe, and the size of their vocabulary; tables of several
columns.
"""

from collections.abc import Sequence

from lmforge.core.data.mixture import MixedDataset
from lmforge.core.options.batch_plan import batch_plan
from lmforge.core.options.mixture import is_remote
from lmforge.core.options.stage import PretrainConfig, StageConfig
from lmforge.core.stages.training_data import TokenSources, find_missing_folders


def describe_data(config: PretrainConfig, step: int | None = None, batch_offset: int = 0) -> tuple[list[str], int | None]:
    """Lines about the data, and the size of the vocabulary where the data is there.

    With `step`, also how much has been read after that many steps. `batch_offset` is the number of
    batches that rollbacks have left out so far: they count as read. Raises UserError where the data
    is damaged.
    """
    if missing := find_missing_folders(config):
        return [f"data       {missing[0]}: not there yet; `lmforge prepare SOURCE {missing[0]}` makes it"], None
    sources = TokenSources.open(config)
    size = batch_plan(config.train, config.data.sequence_length, ranks=1).global_batch_size
    if not config.data.sources and not config.data.phases:
        num_tokens = sources.folders[0].split("train").num_tokens
        epochs = config.train.steps * size * config.data.sequence_length / num_tokens
        line = f"data       {sources.location}: {num_tokens:,} tokens, so {epochs:.2f} epochs"
        return [line], sources.tokenizer.vocab_size
    dataset = sources.training(size)
    steps = {} if step is None else {f"after {step:,} steps": step}
    steps[f"after all {config.train.steps:,}"] = config.train.steps
    rows = _rows(dataset, {title: (number + batch_offset) * size for title, number in steps.items()})
    title = "data       tokens of each source, padding included, and how often it is read"
    return [title, *align_right(rows), *dataset.describe_phases()], sources.tokenizer.vocab_size


def align_right(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines of a table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.rjust, row, widths)) for row in rows]


def find_vocab_size(config: StageConfig) -> int | None:
    """The size of the vocabulary of the recipe's data, where all of it is prepared on this machine;
    else None.

    Raises UserError where the data is damaged.
    """
    if not isinstance(config, PretrainConfig) or find_missing_folders(config):
        return None
    if any(is_remote(source.folder) for source in config.data.all_sources):
        return None
    return TokenSources.open(config).tokenizer.vocab_size


def _rows(dataset: MixedDataset, samples: dict[str, int]) -> list[list[str]]:
    """A row a source; for each number of samples, by its title: the tokens, their fraction of all,
    and the epochs.
    """
    rows = [["source"], *([name] for name in dataset.names)]
    for title, n in samples.items():
        uses = dataset.use_until(n)
        total = sum(use.tokens for use in uses) or 1
        rows[0] += [title, "of all", "epochs"]
        for row, use in zip(rows[1:], uses, strict=True):
            row += [f"{use.tokens:,}", f"{use.tokens / total:.2%}", f"{use.epochs:.2f}"]
    return rows
