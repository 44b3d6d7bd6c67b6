"""Cells, lines and tables for terminals: numbers with their units, bars, sparklines, tables with
notes.
"""

import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from lmforge.core.errors import format_count, format_duration

WIDE_COLUMNS = 120
BAD = "bold red"
DOUBTFUL = "yellow"
QUIET = "dim"
SPARKS = "▁▂▃▄▅▆▇█"
NOT_FINITE = "×"
# How a metric of metrics.jsonl is written, in this order.
METRIC_WORDS = {
    "loss": "loss {:.4f}",
    "val/loss": "val {:.4f}",
    "val/bits_per_byte": "({:.3f} bits/byte)",
    "val/reward": "val reward {:.2f}",
    "rewards/accuracy": "preferred {:.2f}",
    "rewards/margin": "margin {:.2f}",
    "reward": "reward {:.2f}",
    "pass@1": "pass {:.2f}",
    "reward_failures": "{:.0%} of rewards failed",
    "environment_failures": "{:.0%} of episodes failed",
    "kl": "KL {:.2f}",
    "sampling_logp_difference/mean": "sampling off by {:.1e}",
    "lr": "lr {:.2e}",
    "grad_norm": "grad {:.2f}",
    "tokens_per_second": "{:,.0f} tok/s",
    "mfu": "MFU {:.0%}",
    "memory_gib": "{:.1f} GiB",
}


def page_console(file_columns: int, **options: Any) -> Console:
    """The console for tables on standard output.

    In a file or a pipe they have their full width, up to this maximum.
    """
    return Console(width=None if sys.stdout.isatty() else file_columns, highlight=False, **options)


def format_metrics(record: Mapping[str, Any]) -> dict[str, str]:
    """The metrics of a record that people read, in words, by name."""
    shown = [
        name
        for name in METRIC_WORDS
        if record.get(name) or (record.get(name) == 0 and not name.endswith("_failures"))
    ]
    parts = {name: METRIC_WORDS[name].format(record[name]) for name in shown}
    if (bits := parts.pop("val/bits_per_byte", None)) and "val/loss" in parts:
        parts["val/loss"] += f" {bits}"
    return parts


def fit_words(words: Sequence[str], columns: int) -> list[str]:
    """Words on as few lines as possible, separated by two blanks."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + 2 + len(word) <= columns:
            lines[-1] += f"  {word}"
        else:
            lines.append(word)
    return lines


def progress_line(step: int, steps: int | None, seconds_left: float | None, columns: int) -> Text:
    """step 1,200 of 5,000  ━━━━────  24%  1h12m left"""
    if not steps:
        return Text(f"step {step:,}")
    ratio = min(1.0, step / steps)
    remaining = ""
    if seconds_left is not None:
        remaining = f"  {format_age(seconds_left)} left"
    width = max(10, min(40, columns - 50))
    done = int(ratio * width)
    bar = ("━" * done, "green"), ("─" * (width - done), QUIET)
    return Text.assemble(f"step {step:,} of {steps:,}  ", *bar, f"  {ratio:.0%}{remaining}")


def sparkline(values: Sequence[float | None], columns: int) -> str:
    """The curve of values in at most this many characters: means of equal parts, scaled from their
    minimum to their maximum. None stands for a value that is not finite.
    """
    if len(values) > columns:
        edges = [index * len(values) // max(1, columns) for index in range(columns + 1)]
        parts = [values[begin:end] for begin, end in pairwise(edges)]
        values = [
            None if None in part else sum(each for each in part if each is not None) / len(part)
            for part in parts
        ]
    known = [value for value in values if value is not None]
    low = min(known, default=0.0)
    high = max(known, default=0.0)
    scale = 0.0
    if high > low:
        scale = (len(SPARKS) - 1) / (high - low)
    return "".join(
        NOT_FINITE if value is None else SPARKS[round((value - low) * scale)] for value in values
    )


def note_table(columns: int, heads: Sequence[tuple[str, int, bool]]) -> Table:
    """A table with these columns (name, least width, right-aligned), and one for notes, which may
    be on several lines.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=QUIET, width=columns)
    for name, width, is_number in heads:
        if is_number:
            most = None
        elif columns >= WIDE_COLUMNS:
            most = 24
        else:
            most = 12
        justify: Literal["right", "left"] = "right" if is_number else "left"
        table.add_column(
            name,
            justify=justify,
            min_width=width or None,
            max_width=most,
            no_wrap=True,
            overflow="ellipsis",
        )
    table.add_column("", ratio=1)
    return table


def omitted(count: int, noun: str) -> list[RenderableType]:
    if count > 0:
        return [Text(f"… {format_count(count, noun)} more, none in a worse state", QUIET)]
    return []


def clean(text: str) -> str:
    """Untrusted text, without control characters for the terminal."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else "·" for each in text)


def format_known(value: float | None, words: str = "{:.0f}", unknown: str = "?") -> str:
    """A number in words such as "{:.0f} %"; `unknown` where there is none."""
    return unknown if value is None else words.format(value)


def format_gib(used: int | None, total: int | None) -> str:
    return "/".join(
        "?" if count is None else format_short(count / 2**30) for count in (used, total)
    )


def format_short(value: float) -> str:
    if value < 100:
        return f"{value:.1f}"
    return f"{value:,.0f}"


def format_age(seconds: float) -> str:
    """5.0 s, 12 s, and from 100 seconds on as `format_duration`."""
    if seconds < 99.5:
        if seconds < 10:
            return f"{seconds:.1f} s"
        return f"{int(seconds + 0.5)} s"
    return format_duration(seconds)
