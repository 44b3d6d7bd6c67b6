"""Passes the records of a run to its trackers: each has a daemon thread, a bounded queue, and a bounded time at the end.

The training only puts records into queues. So a tracker that raises, hangs or is slow delays no step; records that do not fit
into its queue are dropped and counted. The thread calls the tracker's own client, which retries as it does elsewhere. A client
that crashes the interpreter ends the run.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from lmforge import registry
from lmforge.atomic_files import atomic_write_text, without_non_finite
from lmforge.config.extend import entry_options
from lmforge.config.load import flat_options
from lmforge.config.stage import StageConfig
from lmforge.errors import UserError
from lmforge.run_records import read_first_completions
from lmforge.runs import Run
from lmforge.trackers.tracker import Table, TrackedRun, Tracker
from lmforge.untrusted import cut, read_json

QUEUE_RECORDS = 1000  # that wait for a tracker; later ones are dropped
FINISH_SECONDS = 30.0  # for all trackers to send the end of a run
REOPEN_SECONDS = 60.0  # between attempts to open a tracker
FIRST_CALL_SECONDS = 5.0  # that a tracker waits for the first calls of another
MAX_TEXT_CHARACTERS = 10_000  # of a prompt, a sample or a completion
MAX_ROWS = 32  # of a table of completions
MAX_PROBLEM_CHARACTERS = 300


class TrackerThreads:
    """The trackers of a run; none before `start`, which only rank 0 calls.

    `info` and `warn` are called with lines for people, in the thread that calls `report` or `finish`. `warn` is called for the
    first problem of a tracker, the first record that is dropped, and at the end with what was not sent.
    """

    def __init__(self, info: Callable[[str], None], warn: Callable[[str], None]) -> None:
        self._info, self._warn = info, warn
        self._threads: list[_TrackerThread] = []

    def start(self, run: Run, config: StageConfig) -> None:
        """Open `log.trackers`, each in a thread. Does not wait."""
        # Clients import packages when they first need them. Two threads that import packages with circular imports at the same
        # time can see a module that is not complete.
        first_calls = threading.Lock()
        self._threads = [_TrackerThread(run, config, name, first_calls) for name in dict.fromkeys(config.log.trackers)]
        for thread in self._threads:
            thread.start()

    def report(self, record: dict[str, Any]) -> None:
        """Pass on a record of metrics.jsonl or an event of events.jsonl. Does not wait."""
        for thread in self._threads:
            thread.put(record)
            self._print_messages(thread)

    def finish(self, state: str) -> None:
        """Let trackers send what waits, the report and `state` (done, interrupted, failed), for FINISH_SECONDS in all."""
        deadline = time.monotonic() + FINISH_SECONDS
        for thread in self._threads:
            thread.end(state)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            self._print_messages(thread)
            if unsent := thread.describe_unsent():
                late = f" within {FINISH_SECONDS:.0f} s" if thread.is_alive() else ""
                self._warn(f"{thread.tracker_name}: not sent{late}: {unsent}; the run's own files have everything")
        self._threads = []

    def _print_messages(self, thread: "_TrackerThread") -> None:
        while thread.messages:
            is_problem, text = thread.messages.popleft()
            (self._warn if is_problem else self._info)(text)


@dataclass
class _SavedId:
    run_id: str


class _TrackerThread(threading.Thread):
    """Opens one tracker and sends it records. `messages` are (whether it is a problem, line)."""

    def __init__(self, run: Run, config: StageConfig, name: str, first_calls: threading.Lock) -> None:
        super().__init__(name=f"tracker-{name}", daemon=True)
        self.tracker_name, self._run, self._config = name, run, config
        self.messages: deque[tuple[bool, str]] = deque()
        self._queue = SimpleQueue[dict[str, Any] | None]()
        self._ending, self._state = threading.Event(), ""
        self._num_put = self._num_sent = 0
        self._has_dropped = self._has_failed = False
        self._unsent_end = ["the report", "the end of the run"]
        self._samples: list[dict[str, Any]] = []
        self._first_calls, self._called, self._wait_seconds = first_calls, set[Callable[..., Any]](), FIRST_CALL_SECONDS

    def put(self, record: dict[str, Any]) -> None:
        if record.get("kind") in (None, "sample", "completions"):
            self._num_put += 1
            if self._queue.qsize() < QUEUE_RECORDS:
                self._queue.put(record)
            elif not self._has_dropped:
                self._has_dropped = True
                problem = f"{QUEUE_RECORDS} records wait to be sent, and more are dropped; the run continues"
                self.messages.append((True, f"{self.tracker_name}: {problem}"))

    def end(self, state: str) -> None:
        """Send what waits, then `state`."""
        self._state = state
        self._ending.set()
        self._queue.put(None)

    def describe_unsent(self) -> str:
        """What has not been sent, empty if everything was."""
        count = self._num_put - self._num_sent
        return ", ".join([f"{count:,} of {self._num_put:,} records"] * (count > 0) + self._unsent_end)

    def run(self) -> None:
        while (tracker := self._call(self._open)) is None:
            if self._ending.wait(REOPEN_SECONDS):
                return
        while (record := self._queue.get()) is not None:
            if self._samples and (record.get("kind"), record["step"]) != ("sample", self._samples[0]["step"]):
                self._call(self._send_samples, tracker)
            if record.get("kind") == "sample":
                self._samples.append(record)
            elif record.get("kind") == "completions":
                self._call(self._send_completions, tracker, record)
            else:
                self._call(self._send_metrics, tracker, record)
        if self._samples:
            self._call(self._send_samples, tracker)
        self._call(self._attach_report, tracker)
        self._call(self._close, tracker)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a call of a client; None where it raises, of which the first is reported."""
        is_first, has_lock = function not in self._called, False
        if is_first:
            self._called.add(function)
            has_lock = self._first_calls.acquire(timeout=self._wait_seconds)
            self._wait_seconds *= has_lock  # one that hangs is waited for once
        try:
            return function(*arguments)
        except (Exception, SystemExit) as problem:
            if not self._has_failed:
                self._has_failed = True
                words = cut(" ".join(f"{type(problem).__name__}: {problem}".split()), MAX_PROBLEM_CHARACTERS)
                self.messages.append((True, f"{self.tracker_name}: {words}; the run continues"))
        finally:
            if has_lock:
                self._first_calls.release()
        return None

    def _open(self) -> Tracker:
        entry, folder = registry.get("tracker", self.tracker_name), self._run.path.absolute() / "trackers"
        folder.mkdir(exist_ok=True)
        path, run_id = folder / f"{self.tracker_name}.json", None
        with suppress(OSError, UserError):
            run_id = read_json(path, _SavedId).run_id
        config, own = dict(flat_options(self._config)), entry_options(self._config.log, entry)
        described = TrackedRun(self._run.path.absolute(), folder, self._config.log.project, run_id, config, own)
        tracker: Tracker = entry.load()(described)
        atomic_write_text(path, json.dumps({"run_id": tracker.run_id}), sync=False)
        if tracker.url:
            self.messages.append((False, f"{self.tracker_name:10} {tracker.url}"))
        return tracker

    def _send_metrics(self, tracker: Tracker, record: dict[str, Any]) -> None:
        values = {name: value for name, value in without_non_finite(record).items() if value is not None}
        tracker.log_metrics(values.pop("step"), values)
        self._num_sent += 1

    def _send_samples(self, tracker: Tracker) -> None:
        events, self._samples = self._samples, []
        step = events[0]["step"]
        rows = [(step, event["prompt"][:MAX_TEXT_CHARACTERS], event["text"][:MAX_TEXT_CHARACTERS]) for event in events]
        tracker.log_table(Table("samples", step, ("step", "prompt", "text"), rows))
        self._num_sent += len(events)

    def _send_completions(self, tracker: Tracker, event: dict[str, Any]) -> None:
        """The rows of rank 0, which writes the table before the event; none where the folder was cleared."""
        step, table = event["step"], event["table"]
        rows: list[tuple[Any, ...]] = []
        for row in read_first_completions(self._run.path, table, MAX_ROWS):
            texts = row.prompt_text[:MAX_TEXT_CHARACTERS], row.completion[:MAX_TEXT_CHARACTERS]
            rows.append((step, *texts, row.reward, row.tokens, row.ended))
        if rows:
            name = "val/completions" if table.endswith("-validation") else "completions"
            tracker.log_table(Table(name, step, ("step", "prompt", "text", "reward", "tokens", "ended"), rows))
        self._num_sent += 1

    def _attach_report(self, tracker: Tracker) -> None:
        report: Path = self._run.path / "report.html"
        if report.exists():
            tracker.attach(report)
        self._unsent_end.remove("the report")

    def _close(self, tracker: Tracker) -> None:
        tracker.close(self._state)
        self._unsent_end.remove("the end of the run")
