"""TensorBoard: events in the folder `tensorboard` of the run, without TensorFlow and without torch."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmforge.ops.trackers.tracker import Table, TrackedRun, Tracker


class TensorBoardRun(Tracker):
    """An event file of this attempt; TensorBoard shows all files of the folder as one run."""

    url: str | None = None

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.run_id = "tensorboard"
        self._writer = EventFileWriter(str(run.path / self.run_id))
        if run.run_id is None:
            rows = [(name, json.dumps(value)) for name, value in run.config.items()]
            self.log_text("config", _markdown(("option", "value"), rows), 0)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._add(Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()]), step)

    def log_table(self, table: Table) -> None:
        self.log_text(table.name, _markdown(table.columns, table.rows), table.step)

    def log_text(self, name: str, markdown: str, step: int) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._add(text_pb(name, markdown), step)

    def _add(self, summary: object, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def attach(self, report: Path) -> None:
        """The path of the report, as text: TensorBoard stores no files, and would show the page's
        source.
        """
        self.log_text("report", f"`{report.absolute()}`", 0)

    def close(self, state: str) -> None:
        self._writer.close()


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *([_cell(value) for value in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text.replace("|", "\\|").replace("\n", "<br>")
