"""A tracker that writes what it receives to a file of the run. LMFORGE_TEST_TRACKER can make it fail or hang."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmforge.trackers.tracker import Table, TrackedRun


class Recording:
    url = "http://example.org/run"

    def __init__(self, run: TrackedRun) -> None:
        self._path = run.folder / "recorded.jsonl"
        self.run_id = run.run_id or f"id-of-{run.path.name}"
        self._write("open", run.run_id)
        if run.options is not None:
            self._write("options", run.options.model_dump())

    def _write(self, *what: Any) -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps(what) + "\n")

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        fault(f"metrics {step}")
        self._write("metrics", step, dict(values))

    def log_table(self, table: Table) -> None:
        self._write("table", table.step, table.name, table.columns, table.rows)

    def attach(self, report: Path) -> None:
        self._write("attach", report.name)

    def close(self, state: str) -> None:
        self._write("close", state)


def fault(place: str) -> None:
    """What LMFORGE_TEST_TRACKER says is to happen here: `hang AT` or `fail AT`."""
    kind, _, at = os.environ.get("LMFORGE_TEST_TRACKER", "").partition(" ")
    if at == place and kind == "fail":
        raise ConnectionError("no route to the server")
    if at == place and kind == "die":
        os._exit(3)
    if at == place and kind == "hang":
        time.sleep(600)


def open_run(run: TrackedRun) -> Recording:
    fault("open")
    return Recording(run)
