"""The values of run_data.py, with the page's style and script, as one HTML file."""

import html
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from lmforge.atomic_files import atomic_write, without_non_finite
from lmforge.report.run_data import read_run, subject, verdict
from lmforge.runs import Run
from lmforge.untrusted import open_file

REPORT_FILE = "report.html"  # in a run
BEGINNING = b"<!doctype html>\n<!-- A report of lmforge."  # of each report


def write_report(runs: Sequence[Run], path: Path, title: str | None = None, state: str | None = None) -> Path:
    """Write the report of one run, or of several side by side, to `path`. Returns it. `state` is as for `read_run`.

    Raises UserError where a run cannot be read, OSError where the file cannot be written.
    """
    page = render([read_run(run, state) for run in runs], title)
    with atomic_write(path, sync=False) as file:
        file.write(page.encode(errors="replace"))  # a path need not be Unicode
    return path


def is_report(path: Path) -> bool:
    """Whether a path is a file that `write_report` has written. Raises OSError where it cannot be read."""
    if not path.is_file():
        return False
    with open_file(path) as file:
        return file.read(len(BEGINNING)) == BEGINNING


def write_run_report(run: Run, state: str | None = None) -> Path:
    """Write `report.html` into a run. `state` is its state, which the ranks may not have written yet. Returns its path; raises
    as `write_report` does."""
    return write_report([run], run.path / REPORT_FILE, state=state)


def render(runs: Sequence[dict[str, Any]], title: str | None = None) -> str:
    """The page of some runs as `read_run` gives them."""
    web = files("lmforge.report") / "web"
    html_text, style, charts, script = (
        (web / name).read_text("utf-8") for name in ("report.html", "report.css", "charts.js", "report.js")
    )
    data = {"title": title, "runs": [run | {"subject": subject(run), "verdict": verdict(run)} for run in runs]}
    # Inside a script element only "</" ends it, and "<!--" changes how it is read.
    values = json.dumps(without_non_finite(data), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    heading = title or ", ".join(run["name"] for run in runs)
    parts = {"TITLE": html.escape(heading), "STYLE": style, "SCRIPT": script.replace("// @CHARTS@\n", charts), "DATA": values}
    return re.sub(f"@({'|'.join(parts)})@", lambda match: parts[match[1]], html_text)
