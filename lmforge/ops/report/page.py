"""The values of run_data.py, with the page's style and script, as one HTML file."""

import hashlib
import html
import json
import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from lmforge.core.files.atomic_files import atomic_write, without_non_finite
from lmforge.core.files.untrusted import open_file
from lmforge.core.options.stage import StageConfig
from lmforge.core.records.runs import Run
from lmforge.core.seams import Console
from lmforge.core.stages.attempt import describe_failure
from lmforge.ops.report.run_data import read_run, subject, verdict

REPORT_FILE = "report.html"  # in a run
BEGINNING = b"<!doctype html>\n<!-- A report of lmforge."  # of each report
LAST_LINE_BYTES = 81
# The time until a run's first report, so that it does not slow the first steps.
FIRST_AFTER_SECONDS = 60.0
# The maximum fraction of a run's time for its reports: a long run has more records to read.
MAX_FRACTION = 0.01
CLOSE_SECONDS = 30.0  # a file server that does not answer must not hang the end


def write_report(
    runs: Sequence[Run], path: Path, title: str | None = None, state: str | None = None
) -> Path:
    """Write the report of one run, or of several side by side, to `path`.

    Returns it. `state` is as for `read_run`.

    Raises UserError where a run cannot be read, OSError where the file cannot be written.
    """
    # A path need not be Unicode.
    page = render([read_run(run, state) for run in runs], title).encode(errors="replace")
    with atomic_write(path, sync=False) as file:
        file.write(page + _last_line(page))
    return path


def is_report(path: Path) -> bool:
    """Whether a path is a file as `write_report` has written it, unedited.

    Raises OSError where it cannot be read.
    """
    if not path.is_file():
        return False
    with open_file(path) as file:
        if file.read(len(BEGINNING)) != BEGINNING:
            return False
        page = BEGINNING + file.read()
    return page[-LAST_LINE_BYTES:] == _last_line(page[:-LAST_LINE_BYTES])


def _last_line(page: bytes) -> bytes:
    return f"<!-- sha256 {hashlib.sha256(page).hexdigest()} -->\n".encode()


def write_run_report(run: Run, state: str | None = None) -> Path:
    """Write `report.html` into a run.

    `state` is its state, which the ranks may not have written yet. Returns its path; raises as
    `write_report` does.
    """
    return write_report([run], run.path / REPORT_FILE, state=state)


class ReportThread:
    """Writes the report of a run from time to time in a thread.

    Errors are ignored here, and reported at the end of the run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._next_at = time.monotonic() + FIRST_AFTER_SECONDS
        self._thread: threading.Thread | None = None

    def write_if_due(self) -> None:
        """Begin to write, unless the last report is recent or not finished. Returns at once."""
        if time.monotonic() >= self._next_at and (
            self._thread is None or not self._thread.is_alive()
        ):
            self._thread = threading.Thread(target=self._write, name="report", daemon=True)
            self._thread.start()

    def _write(self) -> None:
        began = time.monotonic()
        with suppress(Exception):
            self._run.check_lock()
            write_run_report(self._run)
        ended = time.monotonic()
        self._next_at = ended + max(FIRST_AFTER_SECONDS, (ended - began) / MAX_FRACTION)

    def close(self) -> None:
        """Wait for the report that is being written: it must not replace the last one."""
        if self._thread is not None:
            self._thread.join(timeout=CLOSE_SECONDS)


class RunReport:
    """The report of a run that trains: written from time to time, and at the end."""

    def __init__(self, run: Run, config: StageConfig, console: Console) -> None:
        self._run = run
        self._console = console
        self._thread = ReportThread(run)

    def on_record(self) -> None:
        self._thread.write_if_due()

    def close(self) -> None:
        self._thread.close()

    def end(self, state: str) -> None:
        """Nothing is printed for an interrupted run, whose last line says how to resume."""
        with suppress(OSError, ValueError):  # the log cannot be written either on a full disk
            try:
                path = write_run_report(self._run, state)
                if state == "done":
                    self._console.info(f"report: {path}")
            except Exception as problem:  # a failure here does not change how the run ended
                self._console.warn(f"no report: {describe_failure(problem)}")


def render(runs: Sequence[dict[str, Any]], title: str | None = None) -> str:
    """The page of some runs as `read_run` gives them."""
    web = files("lmforge.ops.report") / "web"
    html_text, style, charts, script = (
        (web / name).read_text("utf-8")
        for name in ("report.html", "report.css", "charts.js", "report.js")
    )
    data = {
        "title": title,
        "runs": [run | {"subject": subject(run), "verdict": verdict(run)} for run in runs],
    }
    # Inside a script element only "</" ends it, and "<!--" changes how it is read.
    values = json.dumps(without_non_finite(data), ensure_ascii=False, allow_nan=False).replace(
        "<", "\\u003c"
    )
    heading = title or ", ".join(run["name"] for run in runs)
    parts = {
        "TITLE": html.escape(heading),
        "STYLE": style,
        "SCRIPT": script.replace("// @CHARTS@\n", charts),
        "DATA": values,
    }
    return re.sub(f"@({'|'.join(parts)})@", lambda match: parts[match[1]], html_text)
