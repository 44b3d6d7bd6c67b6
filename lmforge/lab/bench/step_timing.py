"""`lmforge bench`: the cost of a step of a recipe, or of a sweep over options or recipes.

`trial.py` measures it. The prediction of `lmforge plan` for these ranks is printed beside the
measurement.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from lmforge.core.distributed.rank_info import read_rank_info
from lmforge.core.errors import RunFailed, UserError
from lmforge.core.options.load import parse_config
from lmforge.lab.bench.trial import TIMED_PHASES, measure
from lmforge.lab.options.bench import RECIPE_AXIS, BenchConfig, sweep_combinations
from lmforge.ops.terminal.cells import page_console

OUT_OF_MEMORY = "out of memory"
# Columns where standard output is not a terminal: wide enough that nothing is cut off, since paths
# may differ only at the end.
FILE_WIDTH = 10_000


def bench(config: BenchConfig, arguments: list[str]) -> int:
    """Time the recipe, or every combination of a sweep, and print.

    `arguments` is the command line without the verb.

    Returns the exit status: 130 for a sweep that was interrupted, which prints what it has. Raises
    UserError where the recipe cannot be trained here, and RunFailed, after the whole sweep, where a
    combination failed for another reason than memory.
    """
    if config.bench.calibrate:
        from lmforge.lab.bench.calibrate import calibrate

        return calibrate(config)
    if not config.bench.sweep:
        row = measure(config)
        if read_rank_info().is_rank0:
            _print_results([row], config.bench.output)
        return 0
    if config.bench.trace:
        raise UserError("--trace: not with --sweep; trace one recipe")
    if read_rank_info().launched:
        raise UserError(
            "--sweep: starts ranks itself, so do not start it with torchrun; use --launch.processes"
        )
    return _sweep(config, arguments)


def _sweep(config: BenchConfig, arguments: list[str]) -> int:
    """Time every combination and print.

    Each is reported when it is done; finished ones are printed even after an interruption.

    Raises UserError where no combination can be timed, and RunFailed where one crashed: the others
    are timed all the same.
    """
    combinations = sweep_combinations(config.bench.sweep)
    rows = list[dict[str, Any]]()
    if RECIPE_AXIS in combinations[0] and not arguments[0].startswith("-"):
        raise UserError(
            f"--sweep {RECIPE_AXIS}=…: with {arguments[0]} before it there are two; leave one out"
        )
    try:
        for number, overrides in enumerate(combinations, start=1):
            print(
                f"{number} of {len(combinations)}  {_words(overrides)} …",
                file=sys.stderr,
                flush=True,
            )
            rows.append({**_run_trial(arguments, overrides), "swept": overrides})
            print(
                f"{number} of {len(combinations)}  {_summary_line(rows[-1])}",
                file=sys.stderr,
                flush=True,
            )
    except KeyboardInterrupt:
        print(
            f"lmforge: interrupted after {len(rows)} of {len(combinations)} combinations",
            file=sys.stderr,
            flush=True,
        )
        return 128 + signal.SIGINT
    finally:
        if rows:
            _print_results(rows, config.bench.output)
    crashed = [row for row in rows if row.get("crashed")]
    if crashed:
        raise RunFailed(
            f"--sweep: {len(crashed)} of {len(rows)} combinations failed; the first:"
            f" {_summary_line(crashed[0])}"
        )
    if all(row.get("failed", OUT_OF_MEMORY) != OUT_OF_MEMORY for row in rows):
        raise UserError(
            f"--sweep: none of its {len(rows)} combinations can be timed; the first:"
            f" {rows[0]['failed']}"
        )
    return 0


def _run_trial(arguments: list[str], overrides: dict[str, str]) -> dict[str, Any]:
    """Time one combination in separate processes.

    So its memory is freed and its failure is contained.
    """
    words = list(arguments)
    for name, value in overrides.items():
        if name == RECIPE_AXIS:
            words.insert(0, value)
        else:  # if an option is given twice, the last value counts; a list may be empty
            words += [f"--{name}", value]
    try:
        parse_config(BenchConfig, words)
    except UserError as problem:
        return {"failed": str(problem)}
    command = [sys.executable, "-m", "lmforge", "bench", *words]
    command += ["--bench.output", "json", "--bench.sweep"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return dict(json.loads(done.stdout)[0])
    if ran_out_of_memory(done.returncode, done.stderr):
        return {"failed": OUT_OF_MEMORY}
    lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no error message"]
    return {"failed": lines[-1].removeprefix("lmforge: "), "crashed": done.returncode != 2}


def ran_out_of_memory(status: int | None, stderr: str) -> bool:
    """Return True where a process with this exit status and stderr ran out of memory."""
    return (
        "OutOfMemoryError" in stderr
        or "out of memory" in stderr
        or "can't allocate memory" in stderr
        or status == -9
    )


def _words(overrides: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in overrides.items())


def _summary_line(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"{_words(row['swept'])}: {row['failed']}"
    step = row["step_seconds"]["median"]
    mfu = f", MFU {row['mfu']:.0%}" if row["mfu"] else ""
    beside = ""
    speeds = row["predicted"].get("tokens_per_second_interval")
    if speeds:
        beside = f" (predicted {_interval(speeds)})"
    rates = (
        f"{row['tokens_per_second']:,.0f} tokens/s{beside}, {1e3 * step:.0f} ms per step{mfu},"
        f" {row['memory_gib']:.2f} GiB"
    )
    return f"{_words(row['swept'])}: {rates}"


def _print_results(rows: list[dict[str, Any]], output: str) -> None:
    if output == "json":
        print(json.dumps(rows, indent=1))
        return
    console = page_console(FILE_WIDTH, markup=False, soft_wrap=True)
    timed = [row for row in rows if "failed" not in row]
    _print_of_each(
        console,
        timed,
        lambda row: f"{row['ranks']} × {row['device']}, {row['dtype']}, data: {row['data']}",
    )
    if timed and len(rows) == 1:
        console.print(
            f"{timed[0]['engine']}, {timed[0]['parameters']:,} parameters, {timed[0]['batch']}"
        )
    _print_table(console, rows)
    for row in rows:
        if row.get("failed", OUT_OF_MEMORY) != OUT_OF_MEMORY:
            console.print(f"{_outcome(row)}: {_summary_line(row)}")
    if timed:
        console.print(
            "ms of the phases: of the median step, which they add up to; comm.: collectives in them"
        )
        console.print("TFLOP/s and MFU: of a rank, counted as docs/tuning.md says")
        console.print(
            "predicted: from least to most, as lmforge plan does; in brackets the estimate divided"
            " by the measured"
        )
        _print_of_each(console, timed, lambda row: f"prediction: {row['predicted']['source']}")


def _print_of_each(
    console: Console, rows: list[dict[str, Any]], describe: Callable[[dict[str, Any]], str]
) -> None:
    """Print a line that holds for all rows.

    Where it differs, each line is printed with the combinations that it holds for.
    """
    rows_of = dict[str, list[dict[str, Any]]]()
    for row in rows:
        rows_of.setdefault(describe(row), []).append(row)
    for line, own in rows_of.items():
        if len(rows_of) > 1:
            line = f"{'; '.join(_words(row['swept']) for row in own)}: {line}"
        console.print(line)


def _print_table(console: Console, rows: list[dict[str, Any]]) -> None:
    """The rows as a table; in a terminal that is too narrow for it, as lines."""
    swept = list(rows[0].get("swept", {}))
    short = {name: name.rpartition(".")[2] for name in swept}
    options = swept
    if len(set(short.values())) == len(swept):
        options = list(short.values())
    rates = ("tokens/s", "predicted", "ms per step", "TFLOP/s", "MFU", "GiB", "predicted")
    titles = [*options, *rates, *TIMED_PHASES, "comm."]
    table = Table()
    lines = list[str]()
    for at, name in enumerate(titles):
        table.add_column(name, justify="left" if at < len(swept) else "right")
    for row in rows:
        cells = [_outcome(row)] if "failed" in row else _cells(row)
        values = [*(row["swept"][name] for name in swept), *cells]
        table.add_row(*values, style="yellow" if "failed" in row else None)
        lines.append(
            ", ".join(f"{title} {value}" for title, value in zip(titles, values, strict=False))
        )
    options_of_width = console.options.update(max_width=FILE_WIDTH)
    fits = Measurement.get(console, options_of_width, table).maximum <= console.width
    for each in [table] if fits else lines:
        console.print(each, soft_wrap=False)


def _outcome(row: dict[str, Any]) -> str:
    """A word or two that say why a combination was not timed."""
    if row["failed"] == OUT_OF_MEMORY:
        return OUT_OF_MEMORY
    return "failed" if row.get("crashed") else "refused"


def _interval(bounds: list[float]) -> str:
    return "–".join(f"{each:,.0f}" for each in bounds)


def _cells(row: dict[str, Any]) -> list[str]:
    step = row["step_seconds"]
    predicted = row["predicted"]
    speed = predicted.get("tokens_per_second")
    memory = predicted.get("memory_gib_interval")
    speeds = predicted.get("tokens_per_second_interval")
    predicted_speed = "?"
    if speed and speeds:
        predicted_speed = f"{_interval(speeds)} ({speed / row['tokens_per_second']:.2f})"
    cells = [
        f"{row['tokens_per_second']:,.0f}",
        predicted_speed,
        f"{1e3 * step['median']:.0f} ({1e3 * step['min']:.0f}–{1e3 * step['max']:.0f})",
        f"{row['tflops_a_rank']:.3g}",
        f"{row['mfu']:.0%}" if row["mfu"] else "?",
        f"{row['memory_gib']:.2f}",
    ]
    cells.append("–".join(f"{each:.2f}" for each in memory or ()) or "?")
    for phase in TIMED_PHASES:
        # A pipeline's schedule mixes the passes: all of it counts as forward.
        seconds = row["phase_seconds"][phase]
        cells.append(f"{1e3 * seconds:.0f}" if seconds else "–")
    cells.append(f"{1e3 * row['communication_seconds']:.0f}")
    return cells
