"""Passes the records of a run to its trackers: each has a daemon thread, which reads them from the
run's own files.

The training only says that there are more. So a tracker that raises, hangs or is slow delays no
step and takes no memory: it is sent later what it missed, in the next attempt too. The thread calls
the tracker's own client, which retries as it does elsewhere. A client that crashes the interpreter
ends the run.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from lmforge.core import registry
from lmforge.core.errors import UserError, format_count
from lmforge.core.files.atomic_files import atomic_write_text
from lmforge.core.files.untrusted import cut, open_file, parse_json, read_json
from lmforge.core.options.extend import entry_options
from lmforge.core.options.load import flat_options
from lmforge.core.options.stage import StageConfig
from lmforge.core.records.run_records import Count, read_first_completions
from lmforge.core.records.runs import Run
from lmforge.core.seams import Console
from lmforge.ops.trackers.tracker import Table, TrackedRun, Tracker

MAX_LINE_BYTES = 2**22  # longer records are left out
MAX_AGAIN = 1000  # calls that raised, and are made once more
FINISH_SECONDS = 30.0  # for all trackers to send the end of a run
REOPEN_SECONDS = 60.0  # between attempts to open a tracker
FIRST_CALL_SECONDS = 5.0  # that a tracker waits for the first calls of another
MAX_TEXT_CHARACTERS = 10_000  # of a prompt, a sample or a completion
MAX_ROWS = 32  # of a table of completions
MAX_PROBLEM_CHARACTERS = 300
Records = Sequence[dict[str, Any]]


class TrackerThreads:
    """The trackers of a run; none before `start`, which only rank 0 calls.

    `info` and `warn` are called with lines for people, in the thread that calls `wake` or `finish`.
    `warn` is called for the first problem of a tracker, and at the end with what was not sent.
    """

    def __init__(self, info: Callable[[str], None], warn: Callable[[str], None]) -> None:
        self._info, self._warn = info, warn
        self._threads: list[_TrackerThread] = []

    def start(self, run: Run, config: StageConfig) -> None:
        """Open `log.trackers`, each in a thread, and send what an earlier attempt did not.

        Does not wait.
        """
        # Clients import packages when they first need them. Two threads that import packages with
        # circular imports at the same time can see a module that is not complete.
        first_calls = threading.Lock()
        self._threads = [_TrackerThread(run, config, name, first_calls) for name in dict.fromkeys(config.log.trackers)]
        for thread in self._threads:
            thread.wake()
            thread.start()

    def wake(self) -> None:
        """There are new records in metrics.jsonl or events.jsonl; of samples and completions, all
        of a step. Does not wait.
        """
        for thread in self._threads:
            thread.wake()
            self._print_messages(thread)

    def finish(self, state: str) -> None:
        """Let trackers send what is left, the report and `state` (done, interrupted, failed), for
        FINISH_SECONDS in all.
        """
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
class _SentPosition:
    """What `trackers/NAME.json` keeps: the tracker's id of the run, and how many bytes of each of
    the run's files were sent.
    """

    run_id: str | None = None
    sent_bytes: dict[str, Count] = field(default_factory=dict)


class _TrackerThread(threading.Thread):
    """Opens one tracker and sends it records. `messages` are (whether it is a problem, line)."""

    def __init__(self, run: Run, config: StageConfig, name: str, first_calls: threading.Lock) -> None:
        super().__init__(name=f"tracker-{name}", daemon=True)
        self.tracker_name, self._run, self._config = name, run, config
        self.messages: deque[tuple[bool, str]] = deque()
        self._folder = run.path.absolute() / "trackers"
        self._path, self._progress = self._folder / f"{name}.json", _SentPosition()
        with suppress(OSError, UserError):
            self._progress = read_json(self._path, _SentPosition)
        self._sizes = {run.metrics_path: 0, run.events_path: 0}
        self._news, self._ending, self._state = threading.Event(), threading.Event(), ""
        self._num_unsent = 0  # of those that were read
        self._again: deque[tuple[Callable[[Records], None], Records]] = deque(maxlen=MAX_AGAIN)
        self._has_failed = False
        self._unsent_end = ["the report", "the end of the run"]
        self._first_calls, self._called, self._wait_seconds = first_calls, set[Callable[..., Any]](), FIRST_CALL_SECONDS

    def wake(self) -> None:
        """Send what is in the files by now."""
        for path in self._sizes:
            with suppress(OSError):
                self._sizes[path] = path.stat().st_size
        self._news.set()

    def end(self, state: str) -> None:
        """Send what is left, then `state`."""
        self._state = state
        self._ending.set()
        self.wake()

    def describe_unsent(self) -> str:
        """What has not been sent, empty if everything was."""
        left = (record for path in self._sizes for record, _ in self._new_records(path))
        count = self._num_unsent + sum(self._sender(record) is not None for record in left)
        return ", ".join([format_count(count, "record")] * (count > 0) + self._unsent_end)

    def run(self) -> None:
        while not self._call(self._open):
            if self._ending.wait(REOPEN_SECONDS):
                return
        is_last = False
        while not is_last:
            self._news.wait()
            self._news.clear()
            is_last = self._ending.is_set()
            for path in self._sizes:
                self._send_new_records(path)
        self._call(self._attach_report)
        self._call(self._close)

    def _new_records(self, path: Path) -> Iterator[tuple[dict[str, Any], int]]:
        """The records of a file that are not read yet, and where each ends.

        A line that is none is left out.
        """
        position = self._progress.sent_bytes.get(path.name, 0)
        with suppress(OSError), open_file(path) as file:
            file.seek(position)
            while position < self._sizes[path] and (line := file.readline(MAX_LINE_BYTES)):
                position += len(line)
                with suppress(UserError):
                    yield parse_json(line, dict[str, Any], ""), position

    def _sender(self, record: dict[str, Any]) -> Callable[[Records], None] | None:
        """What sends records such as this one; None where trackers are not told."""
        senders = {None: self._send_metrics, "sample": self._send_samples, "completions": self._send_completions}
        return senders.get(record.get("kind"))

    def _send_new_records(self, path: Path) -> None:
        """Those of a step together.

        What raises is sent once more after the next call that does not.
        """
        steps = groupby(self._new_records(path), lambda each: (self._sender(each[0]), each[0].get("step")))
        for (sender, _), group in steps:
            records, ends = zip(*group, strict=True)
            self._progress.sent_bytes[path.name] = ends[-1]
            if sender is None:
                continue
            self._num_unsent += len(records)
            if self._call(sender, records):
                self._num_unsent -= len(records)
                while self._again:
                    again = self._again.popleft()
                    self._num_unsent -= len(again[1]) if self._call(*again) else 0
            else:
                self._again.append((sender, records))
            if not self._again:  # else the next attempt sends them
                self._call(self._save)

    def _save(self) -> None:
        self._run.check_lock()
        atomic_write_text(self._path, json.dumps(asdict(self._progress)), sync=False)

    def _call(self, function: Callable[..., None], *arguments: Any) -> bool:
        """Call a client. Returns whether it did not raise; the first problem is reported."""
        is_first, has_lock = function not in self._called, False
        if is_first:
            self._called.add(function)
            has_lock = self._first_calls.acquire(timeout=self._wait_seconds)
            self._wait_seconds *= has_lock  # one that hangs is waited for once
        try:
            function(*arguments)
            return True
        except (Exception, SystemExit) as problem:
            if not self._has_failed:
                self._has_failed = True
                words = cut(" ".join(f"{type(problem).__name__}: {problem}".split()), MAX_PROBLEM_CHARACTERS)
                self.messages.append((True, f"{self.tracker_name}: {words}; the run continues"))
        finally:
            if has_lock:
                self._first_calls.release()
        return False

    def _open(self) -> None:
        entry = registry.get("tracker", self.tracker_name)
        self._folder.mkdir(exist_ok=True)
        config, own = dict(flat_options(self._config)), entry_options(self._config.log, entry)
        run_id, project = self._progress.run_id, self._config.log.project
        described = TrackedRun(self._run.path.absolute(), self._folder, project, run_id, config, own)
        self._tracker: Tracker = entry.load()(described)
        self._progress.run_id = self._tracker.run_id
        self._save()
        if self._tracker.url:
            self.messages.append((False, f"{self.tracker_name:10} {self._tracker.url}"))

    def _send_metrics(self, records: Records) -> None:
        for record in records:
            values = {name: value for name, value in record.items() if name != "step" and value is not None}
            self._tracker.log_metrics(record["step"], values)

    def _send_samples(self, events: Records) -> None:
        step = events[0]["step"]
        rows = [(step, event["prompt"][:MAX_TEXT_CHARACTERS], event["text"][:MAX_TEXT_CHARACTERS]) for event in events]
        self._tracker.log_table(Table("samples", step, ("step", "prompt", "text"), rows))

    def _send_completions(self, events: Records) -> None:
        """The rows of rank 0, which writes a table before its event; none where the folder was
        cleared.
        """
        for event in events:
            step, table = event["step"], event["table"]
            rows: list[tuple[Any, ...]] = []
            for row in read_first_completions(self._run.path, table, MAX_ROWS):
                texts = row.prompt_text[:MAX_TEXT_CHARACTERS], row.completion[:MAX_TEXT_CHARACTERS]
                rows.append((step, *texts, row.reward, row.tokens, row.ended))
            if rows:
                name = "val/completions" if table.endswith("-validation") else "completions"
                self._tracker.log_table(Table(name, step, ("step", "prompt", "text", "reward", "tokens", "ended"), rows))

    def _attach_report(self) -> None:
        report: Path = self._run.path / "report.html"
        if report.exists():
            self._tracker.attach(report)
        self._unsent_end.remove("the report")

    def _close(self) -> None:
        self._tracker.close(self._state)
        self._unsent_end.remove("the end of the run")


class RunTrackers:
    """The trackers of a run that trains."""

    def __init__(self, run: Run, config: StageConfig, console: Console) -> None:
        self._threads = TrackerThreads(console.info, console.warn)
        self._threads.start(run, config)

    def on_record(self) -> None:
        self._threads.wake()

    def close(self) -> None:
        """Their threads end with `end`, or with the process."""

    def end(self, state: str) -> None:
        self._threads.finish(state)
