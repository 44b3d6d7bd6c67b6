"""What happens in a run besides its metrics, for reports and trackers: `events.jsonl`, one JSON object an event, in time order.

Every object has `time` (ISO 8601, UTC), `kind` and `step` (steps done, None where that is not known). Kinds, and their fields:

  start        an attempt begins: ranks, hosts, device     checkpoint   a save is requested: kept
  model        model_type, parameters, trained             completions  sampled and scored: table, in `completions/`
  sample       generated text: prompt, text                bad step     a step that was not used: reason
  rollback     weights of an earlier step: to, reason      end          state (done, interrupted, failed), error
  stall        no rank makes progress: reason              stall over   they do again: reason
"""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO


def has_torn_end(file: BinaryIO) -> bool:
    """Whether the last line of an open file was not finished: its writer was killed, or the disk was full."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 1))
    return file.read(1) not in (b"", b"\n")


class RunEvents:
    """Appends events to the file of a run, and calls `observe` with each. Without a path, as on ranks other than 0, it does
    nothing."""

    def __init__(self, path: Path | None, observe: Callable[[dict[str, Any]], None] = lambda event: None) -> None:
        self._path, self._observe = path, observe

    def add(self, kind: str, step: int | None, **fields: Any) -> None:
        """Append an event. A file that cannot be written does not stop the training."""
        if self._path is None:
            return
        record = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "kind": kind, "step": step, **fields}
        line = json.dumps(record, ensure_ascii=False).encode(errors="replace")  # of a lone surrogate, which UTF-8 lacks
        with suppress(OSError), open(self._path, "a+b") as file:
            file.write((b"\n" if has_torn_end(file) else b"") + line + b"\n")
        self._observe(json.loads(line))
