"""TensorBoard: events in the folder `tensorboard` of the run, without TensorFlow and without torch."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lmforge.trackers.tracker import Sample, TrackedRun, Tracker


class TensorBoardRun:
    """An event file of this attempt; TensorBoard shows all files of the folder as one run."""

    url: str | None = None

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.run_id = folder.name
        self._writer = EventFileWriter(str(folder))

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._add(Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()]), step)

    def log_samples(self, samples: Sequence[Sample]) -> None:
        rows = "".join(f"| {_cell(sample.prompt)} | {_cell(sample.text)} |\n" for sample in samples)
        self.log_text("samples", f"| prompt | text |\n|---|---|\n{rows}", samples[0].step)

    def log_text(self, name: str, markdown: str, step: int) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._add(text_pb(name, markdown), step)

    def _add(self, summary: object, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def attach(self, report: Path) -> None:
        """TensorBoard keeps no files; the report is beside its folder."""

    def close(self, state: str) -> None:
        self._writer.close()


def _cell(text: str) -> str:
    """Text in a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", "<br>")


def open_run(run: TrackedRun) -> Tracker:
    tracker = TensorBoardRun(run.path / "tensorboard")
    if run.run_id is None:
        rows = "".join(f"| {name} | {_cell(json.dumps(value))} |\n" for name, value in run.config.items())
        tracker.log_text("config", f"| option | value |\n|---|---|\n{rows}", 0)
    return tracker
