"""MLflow.

Its own variables say where runs go: MLFLOW_TRACKING_URI, …; without it, a database beside the run's
directory.
"""

import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from lmforge.ops.trackers.tracker import Table, TrackedRun, Tracker

STATES = {"done": "FINISHED", "interrupted": "KILLED"}
MAX_PARAMS = 100  # of one request


class MlflowRun(Tracker):
    """A run of mlflow, in the experiment that is named like the project."""

    def __init__(self, run: TrackedRun) -> None:
        # They would print each retry among the lines of the run.
        for name in ("mlflow", "alembic", "urllib3.connectionpool"):
            logging.getLogger(name).setLevel(logging.ERROR)
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(uri or f"sqlite:///{run.path.parent.absolute() / 'mlflow.db'}")
        if run.run_id is None:
            files = None if uri else str(run.path.parent.absolute() / "mlartifacts")
            created = self._client.create_run(
                self._experiment(run.project, files), run_name=run.path.name
            )
            self.run_id = created.info.run_id
        else:
            self.run_id = run.run_id
            self._client.update_run(self.run_id, "RUNNING")
        known = self._client.get_run(self.run_id).data.params
        # A value that was given once cannot be changed.
        params = [
            Param(name, str(value)) for name, value in run.config.items() if name not in known
        ]
        for begin in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self.run_id, params=params[begin : begin + MAX_PARAMS])
        self.url: str | None = None
        if uri and uri.startswith("http"):
            self.url = f"{uri.rstrip('/')}/#/runs/{self.run_id}"

    def _experiment(self, name: str, files: str | None) -> str:
        experiment = self._client.get_experiment_by_name(name)
        if experiment:
            return experiment.experiment_id
        return self._client.create_experiment(name, artifact_location=files)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        # Names with other characters are refused, such as pass@1.
        metrics = [
            self._metric(re.sub(r"[^\w\-./ ]", "_", name), value, now, step)
            for name, value in values.items()
        ]
        self._client.log_batch(self.run_id, metrics=metrics)

    def log_table(self, table: Table) -> None:
        content = {"columns": list(table.columns), "data": list(map(list, table.rows))}
        self._client.log_dict(self.run_id, content, f"{table.name}/step-{table.step:08d}.json")

    def attach(self, report: Path) -> None:
        self._client.log_artifact(self.run_id, str(report))

    def close(self, state: str) -> None:
        self._client.set_terminated(self.run_id, STATES.get(state, "FAILED"))
