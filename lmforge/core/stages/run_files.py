"""What a run appends to its files while it trains: metrics and events."""

import json
import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from lmforge.core.files.atomic_files import without_non_finite
from lmforge.core.records.runs import Run


def has_torn_end(file: BinaryIO) -> bool:
    """Whether the last line of an open file was not finished: its writer was killed, or the disk
    was full.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 1))
    return file.read(1) not in (b"", b"\n")


class MetricsFile:
    """Appends JSON objects, a line each, to `metrics.jsonl` or `experts.jsonl`."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "a+b")  # noqa: SIM115
        if has_torn_end(self._file):
            self._file.write(b"\n")

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(without_non_finite(record)).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class RunEvents:
    """Appends events to `events.jsonl`, one object a line.

    Without a run, as on ranks other than 0, it does nothing.

    Every event has `time` (ISO 8601, UTC), `kind` and `step` (steps done, None where not known).
    Kinds, and their fields:

      start        an attempt begins: ranks, hosts, device     checkpoint   a save is requested: kept
      model        model_type, parameters, trained             completions  sampled and scored: table, in `completions/`
      sample       generated text: prompt, text                bad step     a step that was not used: reason
      rollback     weights of an earlier step: to, reason      end          state (done, interrupted, failed), error
      stall        no rank makes progress: reason              stall over   they do again: reason
      failed rewards  the first of each kind: reason
    """

    def __init__(self, run: Run | None) -> None:
        self._run = run

    def add(self, kind: str, step: int | None, **fields: Any) -> None:
        """Append an event. A file that cannot be written does not stop the training."""
        if self._run is None or not self._run.holds_lock():
            return
        record = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "kind": kind,
            "step": step,
            **fields,
        }
        # Of a lone surrogate, which UTF-8 lacks.
        line = json.dumps(record, ensure_ascii=False).encode(errors="replace")
        with suppress(OSError), open(self._run.events_path, "a+b") as file:
            file.write((b"\n" if has_torn_end(file) else b"") + line + b"\n")
