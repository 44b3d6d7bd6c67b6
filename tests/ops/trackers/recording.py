"""A tracker that writes what it receives to a file of the run.

LMFORGE_TEST_TRACKER can make it fail or hang.
"""

import atexit
import json
import os
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lmforge.ops.trackers.tracker import Table, TrackedRun


class Recording:
    url = "http://example.org/run"

    def __init__(self, run: TrackedRun) -> None:
        self._path, self._calls = run.folder / "recorded.jsonl", 0
        self.run_id = run.run_id or f"id-of-{run.path.name}"
        self._write("open", run.run_id)
        if run.options is not None:
            self._write("options", run.options.model_dump())

    def _write(self, *what: Any) -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps(what) + "\n")

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._calls += 1
        fault(f"metrics {step}", self._calls)
        self._write("metrics", step, dict(values))

    def log_table(self, table: Table) -> None:
        self._write("table", table.step, table.name, table.columns, table.rows)

    def attach(self, report: Path) -> None:
        self._write("attach", report.name)

    def close(self, state: str) -> None:
        fault("close")
        self._write("close", state)


def fault(place: str, call: int = 0) -> None:
    """What LMFORGE_TEST_TRACKER says is to happen here, such as `hang AT`; AT may be the beginning
    of a place.
    """
    kind, _, at = os.environ.get("LMFORGE_TEST_TRACKER", "").partition(" ")
    if not at or not f"{place} ".startswith(f"{at} "):
        return
    if kind == "fail" or (kind == "outage" and call in (2, 3)):
        raise ConnectionError("no route to the server")
    if kind == "exit":
        sys.exit(3)
    if kind == "slow":
        time.sleep(0.3)
    if kind == "exit-hang":
        atexit.register(time.sleep, 600)
    if kind in ("hang", "exit-hang"):
        time.sleep(600)
    if kind == "pool-hang":
        ThreadPoolExecutor(1).submit(time.sleep, 600).result()


def open_run(run: TrackedRun) -> Recording:
    fault("open")
    return Recording(run)
