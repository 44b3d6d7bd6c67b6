"""`lmforge show data` of a recipe or a token folder: its sources and their documents, in lines and as a picture.

It describes the train splits. Samples are in show_data.py.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lmforge.atomic_files import atomic_write
from lmforge.config.batch_plan import batch_plan
from lmforge.config.stage import PretrainConfig
from lmforge.data.shards.source_report import SourceReport, read_source
from lmforge.errors import UserError
from lmforge.kinds import Kind, kind_of
from lmforge.stages.training_data import TokenSources
from lmforge.verbs.show.describe_data import align_right
from lmforge.verbs.show.show_data import open_config

MAX_PICTURE_ROWS = 40  # of sources; more are drawn closer


def is_reported(source: Path) -> bool:
    """Whether this is a recipe or a token folder, whose data is summarized unless samples are requested."""
    return kind_of(source) in (Kind.RECIPE, Kind.TOKENS)


def report_data(source: Path, picture: Path | None) -> str:
    """Tokens, documents and bytes per token by source, and document lengths; `picture` is a PNG file to draw them to.

    Raises UserError where that cannot be read or written, or is no data of pretraining.
    """
    title, config = open_config(source)
    if not isinstance(config, PretrainConfig):
        raise UserError(f"{source}: is not trained on token shards; --num_samples 5 prints samples of what it is trained on")
    sources, used = _read_sources(config)
    rows = _rows(sources, used)
    if picture is not None:
        _draw(sources, used, rows, title, picture)
    return "\n".join([title, *align_right(rows), *(line for each in sources for line in each.describe_lengths())])


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


def _draw(sources: Sequence[SourceReport], used: Sequence[int], rows: Sequence[Sequence[str]], title: str, path: Path) -> None:
    """The fractions of `rows` and the histograms as a PNG file. A source has one colour in all panels."""
    from matplotlib.figure import Figure

    height = 4.5 + 0.25 * min(len(sources), MAX_PICTURE_ROWS)
    figure = Figure(figsize=(11, height), dpi=120, layout="constrained")
    figure.suptitle(title, parse_math=False)
    panels = figure.subplot_mosaic([["tokens", "used", "bytes"], ["lengths"] * 3], height_ratios=[height - 3.5, 3])
    names, colors = [each.name for each in sources], [f"C{number % 10}" for number in range(len(sources))]
    values: dict[str, list[float]] = {
        "tokens": [each.tokens for each in sources],
        "used": [*used],
        "bytes": [each.text_bytes / each.tokens for each in sources],
    }
    for (panel, sizes), (column, *labels) in zip(values.items(), list(zip(*rows, strict=True))[3:], strict=True):
        bars = panels[panel].barh(range(len(sources)), sizes, color=colors, tick_label=names)
        panels[panel].bar_label(bars, labels, padding=3)
        panels[panel].margins(x=0.25)
        panels[panel].invert_yaxis()  # the first source at the top, as in the text
        panels[panel].set_title(column)
        panels[panel].set_xticks([])
    for each, color in zip(sources, colors, strict=True):
        counts = each.histogram()
        panels["lengths"].stairs(100 * counts / counts.sum(), 2.0 ** np.arange(len(counts) + 1), color=color, linewidth=1.5)
    panels["lengths"].set_xscale("log", base=2)
    panels["lengths"].set_xlabel("tokens in a document")
    panels["lengths"].set_ylabel("% of the documents")
    for axes in panels.values():
        axes.spines[["top", "right"]].set_visible(False)
    try:
        with atomic_write(path, sync=False) as file:
            figure.savefig(file, format="png")
    except OSError as problem:
        raise UserError(f"--picture {path}: cannot be written ({problem.strerror or problem}); name another file") from None
