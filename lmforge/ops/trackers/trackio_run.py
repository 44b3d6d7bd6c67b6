"""Trackio.

Its own variables say where runs go: TRACKIO_DIR, TRACKIO_SPACE_ID, TRACKIO_SERVER_URL, …
"""

import secrets
from collections.abc import Mapping
from pathlib import Path

from lmforge.ops.trackers.tracker import Table, TrackedRun, Tracker


class TrackioRun(Tracker):
    """A run of trackio, which identifies runs by name: two runs of one name in a project would be
    merged.
    """

    url: str | None = None

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._trackio = trackio
        self.run_id = run.run_id or f"{run.path.name}-{secrets.token_hex(3)}"
        self._run = trackio.init(
            project=run.project, name=self.run_id, config=dict(run.config), resume="allow", embed=False, auto_log_gpu=False
        )

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def log_table(self, table: Table) -> None:
        shown = self._trackio.Table(columns=list(table.columns), data=list(map(list, table.rows)))
        self._run.log({table.name: shown}, step=table.step)

    def attach(self, report: Path) -> None:
        self._trackio.log_artifact(report, name=f"{self.run_id}-report", type="report")

    def close(self, state: str) -> None:
        self._run.finish()
