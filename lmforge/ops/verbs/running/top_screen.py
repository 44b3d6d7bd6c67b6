"""The page of `lmforge top`: runs, hosts and GPUs, in each table the worst row first.

Colour only repeats what words say.

Everything is drawn for a number of columns (80 suffices) and, on a terminal, of lines: rows that do
not fit are counted.
"""

import time
from collections import Counter
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from lmforge.core.errors import format_count
from lmforge.ops.monitor.run_status import RUN_ENDED, RUN_GOES_ON, RankStatus, RunStatus
from lmforge.ops.monitor.usage.remote_hosts import HostAnswer
from lmforge.ops.terminal.cells import (
    BAD,
    DOUBTFUL,
    METRIC_WORDS,
    QUIET,
    clean,
    fit_words,
    format_age,
    note_table,
    omitted,
    progress_line,
)
from lmforge.ops.verbs.running.top_hosts import (
    cluster_line,
    device_table,
    host_table,
    process_table,
)

# The letters of the strip of ranks. A straggler's letter is a capital.
PHASE_LETTERS = {
    "starting": "-",
    "building": "-",
    "loading": "l",
    "data": "d",
    "forward": "f",
    "backward": "b",
    "reduce": "r",
    "optimizer": "o",
    "save": "s",
    "evaluate": "e",
    "sample": "g",
    "reward": "w",
    "compiling": "c",
    "barrier": "|",
    "done": "=",
    "interrupted": "~",
    "failed": "X",
}
CANNOT_GO_ON = "!"
STATE_STYLES = {
    "running": "green",
    "done": "green",
    "interrupted": "yellow",
    "not started": "yellow",
}


@dataclass(frozen=True)
class Snapshot:
    """The state at one time: the named hosts or this host, and the runs with their hosts."""

    time: float
    hosts: list[HostAnswer]
    runs: list[RunStatus]


def render_screen(snapshot: Snapshot, columns: int, lines: int | None) -> RenderableType:
    """The page. `lines`: of the screen, or None to draw everything."""
    hosts = [*snapshot.hosts, *_hosts_of_runs(snapshot)]
    num_tables = (
        len(snapshot.runs) + bool(hosts) + any(host.usage and host.usage.devices for host in hosts)
    )
    fixed = 2 + sum(8 + -(-len(run.ranks) // _strip_width(columns)) for run in snapshot.runs) + 5
    rows = None if lines is None else max(3, (lines - fixed) // max(1, num_tables) - 2)
    parts: list[RenderableType] = [_title(snapshot, is_live=lines is not None)]
    for run in snapshot.runs:
        parts += ["", *_render_run(run, columns, rows)]
    if hosts:
        parts += ["", cluster_line(hosts), *host_table(hosts, columns, rows)]
        parts += device_table(hosts, snapshot.runs, columns, rows)
    parts += process_table(snapshot.hosts, columns)
    return Group(*parts)


def _title(snapshot: Snapshot, *, is_live: bool) -> Text:
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(snapshot.time))
    return Text.assemble(
        ("lmforge top", "bold"), f"  {clock}", ("  q quits" if is_live else "", QUIET)
    )


def _hosts_of_runs(snapshot: Snapshot) -> list[HostAnswer]:
    """Hosts that publish their usage in a run's directory, without those that are queried
    anyway.
    """
    named = {host.usage.host for host in snapshot.hosts if host.usage}
    ages = {
        usage.host: HostAnswer(usage.host, usage, max(0.0, snapshot.time - usage.time))
        for run in snapshot.runs
        if run.state not in RUN_ENDED
        for usage in run.hosts
        if usage.host not in named
    }
    return list(ages.values())


# --- runs -----------------------------------------------------------------------------------------


def _render_run(run: RunStatus, columns: int, rows: int | None) -> list[RenderableType]:
    hosts = {rank.host for rank in run.ranks if rank.host}
    where = f"{format_count(len(run.ranks), 'rank')} on {format_count(len(hosts), 'host')}"
    parts: list[RenderableType] = [
        Text.assemble(
            (clean(run.path), "bold"),
            f"  attempt {run.attempt}, {where}: ",
            (
                run.state.upper() if run.state not in STATE_STYLES else run.state,
                STATE_STYLES.get(run.state, BAD),
            ),
        ),
        progress_line(
            run.step,
            run.steps,
            run.metrics.get("seconds_left") if run.state in RUN_GOES_ON else None,
            columns,
        ),
    ]
    parts += [Text(clean(run.job), DOUBTFUL)] if run.job else []
    parts += _metrics_lines(run, columns)
    if run.state in ("failed", "lost", "degraded"):
        parts.append(Text(f"lmforge logs {clean(run.path)} shows the first error", BAD))
    if run.ranks:
        parts += [*_phase_strip(run, columns), *_rank_table(run, columns, rows)]
    return parts


def _metrics_lines(run: RunStatus, columns: int) -> list[Text]:
    """The newest metrics, and how old they are where steps come more slowly than that."""
    formats = METRIC_WORDS | {"step_seconds": "{:.3g} s per step", "data_share": "data {:.0%}"}
    metrics = dict(run.metrics)
    if metrics.get("step_seconds") and "data_seconds" in metrics:
        metrics["data_share"] = metrics["data_seconds"] / metrics["step_seconds"]
    words = [form.format(metrics[name]) for name, form in formats.items() if name in metrics]
    if words and run.metrics_age_seconds is not None:
        words.append(f"({format_age(run.metrics_age_seconds)} ago)")
    return [Text(line) for line in fit_words(words, columns)]


def _strip_width(columns: int) -> int:
    """Ranks per line: a power of two, as the number of ranks per host usually is."""
    if columns >= 140:
        return 128
    return 64


def _letter(rank: RankStatus) -> str:
    if rank.state in ("missing", "gone", "silent", "stopped"):
        return CANNOT_GO_ON
    letter = PHASE_LETTERS.get(rank.phase, "?")
    if rank.slow:
        return letter.upper()
    return letter


def _rank_style(rank: RankStatus) -> str:
    if rank.has_problem or rank.verdict == "stuck":
        return BAD
    if rank.slow or rank.stalled:
        return DOUBTFUL
    if rank.state == "running":
        return "green"
    return ""


def _legend_order(item: tuple[tuple[str, str], int]) -> tuple[bool, bool, int]:
    """Problems come first, since the end of a long line is cut."""
    (letter, _), count = item
    return letter != CANNOT_GO_ON, not letter.isupper(), -count


def _phase_strip(run: RunStatus, columns: int) -> list[RenderableType]:
    """A letter for each rank, and what the letters mean."""
    width = _strip_width(columns)
    number_width = len(str(max(0, len(run.ranks) - 1)))
    counts = Counter(
        (_letter(rank), clean(rank.phase) if _letter(rank) != CANNOT_GO_ON else "cannot go on")
        for rank in run.ranks
    )
    legend = [
        f"{letter} {phase}{' (slow)' if letter.isupper() and phase != 'failed' else ''} {count}"
        for (letter, phase), count in sorted(counts.items(), key=_legend_order)
    ]
    lines: list[RenderableType] = [
        Text("ranks  " + "   ".join(legend), QUIET, no_wrap=True, overflow="ellipsis")
    ]
    for begin in range(0, len(run.ranks), width):
        strip = Text(f"{begin:>{max(5, number_width)}}  ")
        for rank in run.ranks[begin : begin + width]:
            strip.append(_letter(rank), _rank_style(rank))
        lines.append(strip)
    return lines


def _rank_table(run: RunStatus, columns: int, rows: int | None) -> list[RenderableType]:
    table = note_table(
        columns,
        [
            ("rank", 6, True),
            ("host", 0, False),
            ("phase", 0, False),
            ("for", 7, True),
            ("step", 9, True),
        ],
    )
    ranks = sorted(run.ranks, key=lambda rank: rank.severity)
    shown = ranks[:rows]
    for rank in shown:
        known = bool(rank.phase)
        table.add_row(
            str(rank.rank),
            clean(rank.host) or "?",
            clean(rank.phase) or "?",
            format_age(rank.seconds_in_phase)
            if known and rank.state not in ("ended", "gone")
            else "",
            f"{rank.step:,}" if known else "",
            rank.note,
            style=_rank_style(rank).replace("green", ""),
        )
    return [table, *omitted(len(ranks) - len(shown), "rank")]
