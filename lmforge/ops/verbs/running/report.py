"""`lmforge report`: an HTML page of runs, written to the given path."""

from pathlib import Path

from lmforge.core.errors import UserError
from lmforge.core.files.atomic_files import check_output
from lmforge.core.options.options import read_recipe, validate_options
from lmforge.core.records.kinds import Kind, kind_of, unexpected
from lmforge.core.records.runs import Run
from lmforge.ops.options.running import PipelineOptions, ReportOptions
from lmforge.ops.report.page import REPORT_FILE, is_report, write_report
from lmforge.ops.verbs.running.jobs import JobWatch
from lmforge.ops.verbs.running.pipeline import plan_stages

MAX_RUNS = 50


def run_report(options: ReportOptions) -> int:
    """Write the page and print its path.

    Raises UserError where a path is not a run, or the page cannot be written.
    """
    runs = [run for path in options.runs for run in _runs_of(path)]
    if len(runs) > MAX_RUNS:
        raise UserError(f"report: {len(runs)} runs; a page shows at most {MAX_RUNS}")
    own = None
    if len(runs) == 1:
        own = runs[0].path / REPORT_FILE
    out = options.out or own or Path("report.html")
    title = None
    if kind_of(options.runs[0]) == Kind.RECIPE:
        title = options.runs[0].stem
    try:
        if out != own:
            check_output(out, "--out", kind="a report of lmforge", is_of_kind=is_report)
        print(write_report(runs, out, title))
    except OSError as problem:
        raise UserError(f"--out: {out}: {problem.strerror}; name another file") from None
    return 0


def _runs_of(path: Path) -> list[Run]:
    """The run of a folder, or those of a pipeline's stages that have begun."""
    if (kind := kind_of(path)) == Kind.RUN:
        return [Run.open(path)]
    if line := JobWatch(Run(path)).look()[1]:
        raise UserError(f"{path}: {line}; there is nothing to report yet")
    if kind != Kind.RECIPE:
        raise unexpected(path, (Kind.RUN, "the file of a pipeline"))
    stages = plan_stages(validate_options(PipelineOptions, read_recipe(path), str(path)), path)
    runs = [
        run for stage in stages if stage.run is not None and (run := Run.open(stage.run)).exists()
    ]
    if not runs:
        raise UserError(f"{path}: none of its stages has begun; `lmforge run {path}` begins")
    return runs
