"""Weights & Biases.

Its own variables say where runs go: WANDB_API_KEY, WANDB_ENTITY, WANDB_MODE=offline, …
"""

import secrets
from collections.abc import Mapping
from pathlib import Path

from lmforge.ops.trackers.tracker import Table, TrackedRun, Tracker


class WandbRun(Tracker):
    """A run of wandb.

    Its charts use our step: wandb's own counter must not decrease, and ours does after a rollback.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._wandb = wandb
        settings = wandb.Settings(silent=True, console="off")
        self._run = wandb.init(
            project=run.project,
            name=run.path.name,
            id=run.run_id or secrets.token_hex(8),
            resume="allow",
            dir=run.folder,
            config=dict(run.config),
            settings=settings,
        )
        self.run_id = self._run.id
        self.url = self._run.url
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def log_table(self, table: Table) -> None:
        shown = self._wandb.Table(columns=list(table.columns), data=list(map(list, table.rows)))
        self._run.log({"step": table.step, table.name: shown})

    def attach(self, report: Path) -> None:
        self._run.log({"report": self._wandb.Html(report.read_text("utf-8"), inject=False)})

    def close(self, state: str) -> None:
        self._run.finish(exit_code=0 if state == "done" else 1)
