"""The process of one tracker: reads what a run appends to metrics.jsonl and events.jsonl, and sends it.

How far it has sent is in a file of the run, together with the tracker's id of the run, so that the next attempt goes on there.
It reports to the training process in lines of JSON on its standard output; what libraries print goes to a log.
"""

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from lmforge import registry
from lmforge.atomic_files import atomic_write_text
from lmforge.config.load import flat_options
from lmforge.config.options import read_recipe, validate_options
from lmforge.errors import UserError
from lmforge.locks import hold_lock
from lmforge.plugins import load_plugins
from lmforge.run_records import MetricsRecord, read_first_completions
from lmforge.runs import Run
from lmforge.trackers.tracker import Table, TrackedRun, Tracker
from lmforge.untrusted import cut, parse_json, read_json

POLL_SECONDS = 1.0
MAX_RETRY_SECONDS = 60.0  # after a failure it waits longer each time, up to this limit
MAX_CHUNK_BYTES = 2**22  # read at once; no line of the run is longer
MAX_TEXT_CHARACTERS = 10_000  # of a prompt, a sample or a completion
MAX_ROWS = 32  # of a table of completions
MAX_PROBLEM_CHARACTERS = 300


@dataclass(frozen=True)
class FollowerOptions:
    """What the training process passes to this process: `tracker` is a registered name, `plugins` the files that register it.

    `last_seconds`: this process ends by itself within this time after the training has ended or was killed.
    """

    tracker: str
    plugins: list[str]
    run: str
    folder: str
    project: str
    process: int
    last_seconds: float


# A line of JSON on the standard output of this process.
Report = dict[Literal["info", "problem"], str]


@dataclass
class Progress:
    """The content of NAME.json: the tracker's id of the run, and the bytes of each file that were sent."""

    run_id: str
    metrics_bytes: int = 0
    events_bytes: int = 0


class TextEvent(BaseModel):
    """A line of events.jsonl about a sample or a table of completions. Other lines do not match this type."""

    kind: Literal["sample", "completions"]
    step: int = Field(ge=0, le=2**53)
    prompt: str = ""
    text: str = ""
    table: str = Field("", pattern=r"^[\w-]*$")


class Follower:
    """Sends what a run writes to one tracker. `url` is the address of the run, if it has one."""

    def __init__(self, options: FollowerOptions) -> None:
        """Opens the tracker, and raises its exceptions."""
        self._run, folder = Run(Path(options.run)), Path(options.folder)
        self._path = folder / f"{options.tracker}.json"
        load_plugins(options.plugins)
        config = dict(flat_options(self._run.load_config()))
        entry, own = registry.get("tracker", options.tracker), None
        if entry.options is not None:  # the config above leaves out the options of plugins
            table = read_recipe(self._run.recipe_path).get("log", {})
            own = validate_options(entry.options, table.get(entry.option_name, {}), str(self._run.recipe_path))
        known = None
        with suppress(OSError, UserError):
            known = read_json(self._path, Progress)
        run_id = known.run_id if known else None
        described = TrackedRun(self._run.path, folder, options.project, run_id, config, options.process, own)
        self._tracker: Tracker = entry.load()(described)
        self._progress = known or Progress(self._tracker.run_id)
        self._progress.run_id = self._tracker.run_id
        self.url = self._tracker.url

    def send_new(self) -> None:
        """Send what was written since the last call."""
        for lines, end in _new_lines(self._run.metrics_path, self._progress.metrics_bytes):
            for line in lines:
                with suppress(UserError):
                    record = parse_json(line, MetricsRecord, "")
                    values = {name: value for name, value in (record.__pydantic_extra__ or {}).items() if value is not None}
                    self._tracker.log_metrics(record.step, values)
            self._progress.metrics_bytes = end
            self.store()
        for lines, end in _new_lines(self._run.events_path, self._progress.events_bytes):
            for table in _tables(lines, self._run.path):
                self._tracker.log_table(table)
            self._progress.events_bytes = end
            self.store()

    def finish(self, state: str) -> None:
        """Attach the report, and close the tracker."""
        report = self._run.path / "report.html"
        if report.exists():
            self._tracker.attach(report)
        self._tracker.close(state)

    def store(self) -> None:
        """Record how far it has sent."""
        atomic_write_text(self._path, json.dumps(asdict(self._progress)), sync=False)


def _new_lines(path: Path, begin: int) -> Iterator[tuple[list[bytes], int]]:
    """The finished lines of a file from byte `begin` on, in chunks, each with the byte after it."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        if begin > file.seek(0, os.SEEK_END):
            begin = 0  # the file was replaced since it was read
        file.seek(begin)
        while chunk := file.read(MAX_CHUNK_BYTES):
            finished = chunk.rfind(b"\n") + 1
            if not finished:
                return
            begin += finished
            yield chunk[:finished].splitlines(), begin
            file.seek(begin)


def _tables(lines: list[bytes], run_folder: Path) -> Iterator[Table]:
    """The samples of each step, and the tables of completions that lines of events.jsonl announce."""
    events = []
    for line in lines:
        with suppress(UserError):
            events.append(parse_json(line, TextEvent, ""))
    for (kind, step), group in groupby(events, key=lambda event: (event.kind, event.step)):
        if kind == "sample":
            rows = [(step, event.prompt[:MAX_TEXT_CHARACTERS], event.text[:MAX_TEXT_CHARACTERS]) for event in group]
            yield Table("samples", step, ("step", "prompt", "text"), rows)
            continue
        for event in group:
            name = "val/completions" if event.table.endswith("-validation") else "completions"
            # The rows of rank 0, which writes the table before the event; none where the folder was cleared.
            if rows := list(_completions(run_folder, event.table, step)):
                yield Table(name, step, ("step", "prompt", "text", "reward", "tokens", "ended"), rows)


def _completions(run_folder: Path, table: str, step: int) -> Iterator[tuple[Any, ...]]:
    for row in read_first_completions(run_folder, table, MAX_ROWS):
        texts = row.prompt_text[:MAX_TEXT_CHARACTERS], row.completion[:MAX_TEXT_CHARACTERS]
        yield step, *texts, row.reward, row.tokens, row.ended


def _final_state(training_process: int, wait_seconds: float) -> str | None:
    """The state in which the training process ended, which it writes to our standard input; None while it continues. Waits at
    most this long.
    """
    deadline = time.monotonic() + wait_seconds
    while True:
        left = max(0.0, deadline - time.monotonic())
        if select.select([0], [], [], min(left, POLL_SECONDS))[0]:
            words = os.read(0, 64).decode(errors="replace").split()
            return words[0] if words else "failed"
        # Its end of the pipe may be open in a process that it started.
        if os.getppid() != training_process:
            return "failed"
        if left == 0.0:
            return None


def follow(options: FollowerOptions, output: int) -> None:
    """Send until the training has ended. The address of the run and the first problem are written to `output`, a file
    descriptor."""
    follower, wait_seconds, state, has_complained = None, POLL_SECONDS, None, False
    while state is None:
        state = _final_state(options.process, wait_seconds)
        if state is not None:
            _end_this_process_after(options.last_seconds)
        try:
            if follower is None:
                follower = Follower(options)
                if follower.url:
                    _say(output, "info", follower.url)
                follower.store()
            follower.send_new()
            if state is not None:
                follower.finish(state)
            wait_seconds = POLL_SECONDS
        except Exception as problem:
            sys.stderr.write(f"{type(problem).__name__}: {problem}\n")
            if not has_complained:
                has_complained = True
                lines = f"{type(problem).__name__}: {problem}".split()
                _say(output, "problem", cut(" ".join(lines), MAX_PROBLEM_CHARACTERS))
            wait_seconds = min(2 * wait_seconds, MAX_RETRY_SECONDS)


def _say(output: int, kind: Literal["info", "problem"], text: str) -> None:
    with suppress(OSError):  # nobody listens any more
        os.write(output, b"\n" + json.dumps({kind: text}).encode() + b"\n")  # others may have printed half a line


def _end_this_process_after(seconds: float) -> None:
    """End this process and all that it started: libraries would wait for the network at Python's exit."""
    timer = threading.Timer(seconds, os.killpg, (0, signal.SIGKILL))
    timer.daemon = True
    timer.start()


def main() -> None:
    """The process: `FollowerOptions` as JSON in sys.argv."""
    options = FollowerOptions(**json.loads(sys.argv[1]))
    output = os.dup(1)
    os.dup2(2, 1)
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # a launcher signals all processes of a job; the training says when it ends
    # An earlier attempt whose training was killed may still be sending.
    with hold_lock(Path(options.folder) / f"{options.tracker}.lock", lambda: False):
        follow(options, output)
