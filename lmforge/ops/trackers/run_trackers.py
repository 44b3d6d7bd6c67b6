"""Passes the records of a run to its trackers, in one thread of rank 0 that reads the run's files.

The training only says that there are more records. So a tracker that raises, hangs or is slow
delays no step and takes no memory; at the end of a run it is waited for FINISH_SECONDS at most. The
thread calls each tracker's own client, which retries as it does elsewhere. A client that hangs
holds up the other trackers of the run; what they missed is sent in the next attempt. One that
crashes the interpreter ends the run.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
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
FINISH_SECONDS = 30.0  # for all trackers to send the end of a run
REOPEN_SECONDS = 60.0  # between attempts to open a tracker
MAX_TEXT_CHARACTERS = 10_000  # of a prompt, a sample or a completion
MAX_ROWS = 32  # of a table of completions
MAX_PROBLEM_CHARACTERS = 300
Records = Sequence[dict[str, Any]]


class RunTrackers:
    """The trackers of a run that trains.

    The first problem of each is reported, and at the end what was not sent.
    """

    def __init__(self, run: Run, config: StageConfig, console: Console) -> None:
        self._console = console
        self._trackers = [
            _GuardedTracker(run, config, name) for name in dict.fromkeys(config.log.trackers)
        ]
        self._sizes = {run.metrics_path: 0, run.events_path: 0}
        self._news = threading.Event()
        self._final_state = ""
        self._thread = threading.Thread(target=self._send, name="trackers", daemon=True)
        if self._trackers:
            self.on_record()
            self._thread.start()

    def on_record(self) -> None:
        """There are new records in the run's files; of samples and completions, all of a step.

        Does not wait.
        """
        for path in self._sizes:
            with suppress(OSError):
                self._sizes[path] = path.stat().st_size
        self._news.set()
        self._print_messages()

    def close(self) -> None:
        """The thread ends with `end`, or with the process."""

    def end(self, state: str) -> None:
        """Send what is left, the report and `state` (done, interrupted, failed), for FINISH_SECONDS
        at most.
        """
        if not self._trackers:
            return
        self.on_record()
        self._final_state = state
        self._news.set()
        self._thread.join(FINISH_SECONDS)
        self._print_messages()
        late = ""
        if self._thread.is_alive():
            late = f" within {FINISH_SECONDS:.0f} s"
        for tracker in self._trackers:
            if unsent := tracker.describe_unsent(self._sizes):
                self._console.warn(
                    f"{tracker.name}: not sent{late}: {unsent}; the run's own files have everything"
                )

    def _send(self) -> None:
        state = ""
        while not state:
            self._news.wait()
            self._news.clear()
            state = self._final_state
            for tracker in self._trackers:
                tracker.send(self._sizes)
        for tracker in self._trackers:
            tracker.end(state)

    def _print_messages(self) -> None:
        for tracker in self._trackers:
            while tracker.messages:
                is_problem, text = tracker.messages.popleft()
                print_line = self._console.warn if is_problem else self._console.info
                print_line(text)


@dataclass
class _SentPosition:
    """What `trackers/NAME.json` keeps: the tracker's id of the run, and how many bytes of each of
    the run's files were sent.
    """

    run_id: str | None = None
    sent_bytes: dict[str, Count] = field(default_factory=dict)


class _GuardedTracker:
    """One tracker behind a guard against what its client raises.

    `messages` are (whether it is a problem, line).
    """

    def __init__(self, run: Run, config: StageConfig, name: str) -> None:
        self.name = name
        self.messages: deque[tuple[bool, str]] = deque()
        self._run = run
        self._config = config
        self._folder = run.path.absolute() / "trackers"
        self._path = self._folder / f"{name}.json"
        self._sent = _SentPosition()
        with suppress(OSError, UserError):
            self._sent = read_json(self._path, _SentPosition)
        self._client: Tracker | None = None
        self._open_at = 0.0
        self._has_failed = False
        self._num_unsent = 0  # of those that were read
        self._unsent_end = ["the report", "the end of the run"]

    def send(self, sizes: Mapping[Path, int]) -> None:
        """Send the records that the run's files have up to these sizes, those of a step together.

        What the client refuses is counted, and not sent again.
        """
        if self._client is None and time.monotonic() >= self._open_at:
            self._open_at = time.monotonic() + REOPEN_SECONDS
            self._call(self._open)
        if self._client is None:
            return
        for path, size in sizes.items():
            steps = groupby(
                self._new_records(path, size),
                lambda each: (self._sender(each[0]), each[0].get("step")),
            )
            for (sender, _), group in steps:
                records, ends = zip(*group, strict=True)
                self._sent.sent_bytes[path.name] = ends[-1]
                if sender is None:
                    continue
                self._num_unsent += len(records)
                if self._call(sender, self._client, records):
                    self._num_unsent -= len(records)
                self._call(self._save)

    def end(self, state: str) -> None:
        """Send the report and how the run ended."""
        if self._client is None:
            return
        report: Path = self._run.path / "report.html"
        if not report.exists() or self._call(self._client.attach, report):
            self._unsent_end.remove("the report")
        if self._call(self._client.close, state):
            self._unsent_end.remove("the end of the run")

    def describe_unsent(self, sizes: Mapping[Path, int]) -> str:
        """What has not been sent, empty if everything was."""
        left = (
            record for path, size in sizes.items() for record, _ in self._new_records(path, size)
        )
        count = self._num_unsent + sum(self._sender(record) is not None for record in left)
        records = []
        if count:
            records = [format_count(count, "record")]
        return ", ".join([*records, *self._unsent_end])

    def _call(self, function: Callable[..., None], *arguments: Any) -> bool:
        """Call a client. Returns whether it did not raise; the first problem is reported."""
        try:
            function(*arguments)
        except (Exception, SystemExit) as problem:
            if not self._has_failed:
                self._has_failed = True
                words = cut(
                    " ".join(f"{type(problem).__name__}: {problem}".split()), MAX_PROBLEM_CHARACTERS
                )
                self.messages.append((True, f"{self.name}: {words}; the run continues"))
            return False
        return True

    def _open(self) -> None:
        entry = registry.get("tracker", self.name)
        self._folder.mkdir(exist_ok=True)
        client: Tracker = entry.load()(
            TrackedRun(
                self._run.path.absolute(),
                self._folder,
                self._config.log.project,
                self._sent.run_id,
                dict(flat_options(self._config)),
                entry_options(self._config.log, entry),
            )
        )
        self._sent.run_id = client.run_id
        self._save()
        self._client = client
        if client.url:
            self.messages.append((False, f"{self.name:10} {client.url}"))

    def _save(self) -> None:
        self._run.check_lock()
        atomic_write_text(self._path, json.dumps(asdict(self._sent)), sync=False)

    def _new_records(self, path: Path, size: int) -> Iterator[tuple[dict[str, Any], int]]:
        """The records of a file that are not read yet, and where each ends.

        A line that is none is left out.
        """
        position = self._sent.sent_bytes.get(path.name, 0)
        with suppress(OSError), open_file(path) as file:
            file.seek(position)
            while position < size and (line := file.readline(MAX_LINE_BYTES)):
                position += len(line)
                with suppress(UserError):
                    yield parse_json(line, dict[str, Any], ""), position

    def _sender(self, record: dict[str, Any]) -> Callable[[Tracker, Records], None] | None:
        """What sends records such as this one; None where trackers are not told."""
        senders = {
            None: _send_metrics,
            "sample": _send_samples,
            "completions": self._send_completions,
        }
        return senders.get(record.get("kind"))

    def _send_completions(self, client: Tracker, events: Records) -> None:
        """The rows of rank 0, which writes a table before its event; none where the folder was
        cleared.
        """
        for event in events:
            step = event["step"]
            rows = [
                (
                    step,
                    row.prompt_text[:MAX_TEXT_CHARACTERS],
                    row.completion[:MAX_TEXT_CHARACTERS],
                    row.reward,
                    row.tokens,
                    row.ended,
                )
                for row in read_first_completions(self._run.path, event["table"], MAX_ROWS)
            ]
            if rows:
                is_validation = event["table"].endswith("-validation")
                name = "completions"
                if is_validation:
                    name = "val/completions"
                columns = ("step", "prompt", "text", "reward", "tokens", "ended")
                client.log_table(Table(name, step, columns, rows))


def _send_metrics(client: Tracker, records: Records) -> None:
    for record in records:
        values = {
            name: value for name, value in record.items() if name != "step" and value is not None
        }
        client.log_metrics(record["step"], values)


def _send_samples(client: Tracker, events: Records) -> None:
    step = events[0]["step"]
    rows = [
        (step, event["prompt"][:MAX_TEXT_CHARACTERS], event["text"][:MAX_TEXT_CHARACTERS])
        for event in events
    ]
    client.log_table(Table("samples", step, ("step", "prompt", "text"), rows))
