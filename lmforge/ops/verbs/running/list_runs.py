"""`lmforge runs`: a table of the runs in a folder, once or repeatedly, and of their jobs."""

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lmforge.core.errors import UserError, format_duration
from lmforge.core.files.untrusted import cut, describe_os_error
from lmforge.core.records.runs import JOB_FILE, LAUNCH_FOLDER, Run
from lmforge.ops.monitor.run_status import RUN_GOES_ON, read_run_status
from lmforge.ops.options.running import RunsOptions
from lmforge.ops.report.run_data import last_state
from lmforge.ops.terminal.cells import BAD, format_known, page_console
from lmforge.ops.verbs.running.jobs import jobs_table, launched_jobs
from lmforge.ops.verbs.running.top_screen import STATE_STYLES

REFRESH_SECONDS = 2.0
COLUMNS = ("run", "stage", "state", "step", "loss", "val", "tok/s", "MFU", "left", "written")
LEFT_ALIGNED = COLUMNS[:3]
# In a narrower terminal optional columns are left out.
NARROW_COLUMNS = ("stage", "MFU")
NARROW = 100
FILE_COLUMNS = 240  # where the output is no terminal


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One run.

    Values that it has not measured, or does not measure, are None. `written` in seconds since the
    epoch.
    """

    name: str
    stage: str
    state: str
    step: int
    steps: int = 0
    loss: float | None = None
    validation: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    seconds_left: float | None = None
    written: float
    problem: str = ""


def list_runs(options: RunsOptions) -> int:
    """Print the runs and the jobs of those that were launched, or keep the table of runs up to
    date.

    Raises UserError where the folder cannot be read, and, after all others were printed, where the
    record of a job cannot be.
    """
    if options.output == "json":
        for row in read_runs(options.folder):
            print(json.dumps(asdict(row)))
        return 0
    console = page_console(FILE_COLUMNS)
    rows = read_runs(options.folder)
    if not options.watch:
        jobs, problems = launched_jobs(_run_folders(options.folder))
        if rows:
            console.print(_table(rows, console.width))
        if jobs:
            console.print(*([""] if rows else []), jobs_table(jobs), sep="\n")
        if problems:
            more = ""
            if len(problems) > 1:
                more = f" (and {len(problems) - 1:,} more such files)"
            raise UserError(f"{problems[0]}{more}")
        if not rows and not jobs:
            raise UserError(f"{options.folder}: no runs in this folder")
        return 0
    with (
        suppress(KeyboardInterrupt),
        Live(
            _table(rows, console.width), console=console, auto_refresh=False, screen=False
        ) as live,
    ):
        while True:
            time.sleep(REFRESH_SECONDS)
            live.update(_table(read_runs(options.folder), console.width), refresh=True)
    return 0


def read_runs(folder: Path) -> list[RunRow]:
    """The runs of a folder, or the run that it is: active ones first, then by the time of their
    last write, the newest first.
    """
    rows = []
    for run in map(Run, _run_folders(folder)):
        try:
            if run.exists():
                rows.append(_read_run(run))
        except (UserError, OSError):
            if run.exists():  # otherwise it was removed while it was read
                raise
    return sorted(rows, key=lambda row: (row.state not in RUN_GOES_ON, -row.written))


def _run_folders(folder: Path) -> list[Path]:
    """The directories in a folder, or the folder itself where it is a run. Raises UserError."""
    if Run(folder).exists() or (folder / LAUNCH_FOLDER / JOB_FILE).exists():
        return [folder]
    try:
        with os.scandir(folder) as entries:
            return sorted(folder / entry.name for entry in entries if entry.is_dir())
    except OSError as problem:
        raise UserError(
            f"{describe_os_error(problem, folder)}; name the folder that holds the runs, or a run"
        ) from None


def _read_run(run: Run) -> RunRow:
    status = read_run_status(run)
    state = last_state(run, status)
    written = run.recipe_path.stat().st_mtime
    with suppress(OSError):
        written = max(written, run.metrics_path.stat().st_mtime)
    try:
        config = run.load_config()
    except UserError as problem:
        return RunRow(
            name=run.path.name,
            stage="?",
            state=state,
            step=status.step,
            written=written,
            problem=str(problem),
        )
    last = status.metrics
    return RunRow(
        name=run.path.name,
        stage=config.of_stage,
        state=state,
        step=status.step,
        written=written,
        steps=config.train.steps,
        loss=last.get("loss"),
        validation=last.get("val/loss", last.get("val/reward")),
        tokens_per_second=last.get("tokens_per_second"),
        mfu=last.get("mfu"),
        seconds_left=last.get("seconds_left") if state in RUN_GOES_ON else None,
    )


def _table(rows: list[RunRow], width: int) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim")
    columns = [name for name in COLUMNS if width >= NARROW or name not in NARROW_COLUMNS]
    for name in columns:
        table.add_column(
            name,
            justify="left" if name in LEFT_ALIGNED else "right",
            no_wrap=True,
            overflow="ellipsis",
        )
    now = time.time()
    for row in rows:
        cells: dict[str, str | Text] = {
            "run": Text(cut(row.name, 60)),
            "stage": row.stage,
            "state": Text(row.state, STATE_STYLES.get(row.state, BAD)),
            "step": f"{row.step:,}/{row.steps:,}" if row.steps else f"{row.step:,}",
            "loss": format_known(row.loss, "{:.4f}", ""),
            "val": format_known(row.validation, "{:.4f}", ""),
            "tok/s": format_known(row.tokens_per_second, "{:,.0f}", ""),
            "MFU": format_known(row.mfu, "{:.0%}", ""),
            "left": "" if row.seconds_left is None else format_duration(row.seconds_left),
            "written": f"{format_duration(now - row.written)} ago",
        }
        table.add_row(*(cells[name] for name in columns))
    return Group(table, *(Text(f"{row.name}: {row.problem}", "red") for row in rows if row.problem))
