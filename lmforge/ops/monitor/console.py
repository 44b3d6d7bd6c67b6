"""The console of a run: lines for the reader, which rank 0 also logs, and on a terminal a panel
below them.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.errors import format_duration
from lmforge.ops.monitor.log_files import STAMP, printable
from lmforge.ops.monitor.rank_log import print_past_log, redirect_terminal, stamp_lines
from lmforge.ops.terminal.cells import (
    METRIC_WORDS,
    QUIET,
    clean,
    fit_words,
    format_metrics,
    progress_line,
    sparkline,
)
from lmforge.ops.terminal.live_area import LiveArea, can_redraw

MAX_TEXT_LINES = 3
MAX_POINTS = 1000  # of the curve; a terminal shows fewer
# The curve is of the first of these that the run measures, and the others are on the line of
# numbers.
CURVES = ("reward", "rewards/accuracy", "loss")


class ConsoleLogger:
    """Writes lines on the first rank, and all of them to the log.

    A terminal shows a panel while the run trains, and log steps only there; elsewhere each log step
    is a line.
    """

    def __init__(self, dist_ctx: DistributedContext, steps: int, log_path: Path | None) -> None:
        self._is_rank0 = dist_ctx.is_rank0
        self._steps = steps
        self._log_path = log_path
        self._log_file: TextIO | None = None
        if log_path and dist_ctx.is_rank0:
            self._log_file = open(log_path, "a", encoding="utf-8")  # noqa: SIM115
        self._console = Console(highlight=False)
        self._has_panel = self._is_rank0 and can_redraw(self._console)
        self._panel: ProgressPanel | None = None
        self._area: LiveArea | None = None
        self._captured: CapturedOutput | None = None
        self._last_line = ""

    def info(self, line: str) -> None:
        """One line for the reader."""
        if not self._is_rank0:
            return
        self._write_log(line)
        if self._area is not None:
            self._area.print(line)
        else:
            print(line, flush=True)

    def _write_log(self, line: str) -> None:
        if self._log_file is not None:
            self._log_file.write(stamp_lines(line))
            self._log_file.flush()

    def warn(self, line: str) -> None:
        """One line that must not be overlooked: also printed on standard error, if that is another
        stream.
        """
        self.info(line)
        if self._is_rank0 and not self._console.is_terminal:
            print_past_log(f"lmforge: {line}")

    def start_progress(self, step: int) -> None:
        """Show the panel, on a terminal."""
        if self._has_panel:
            redirects_stderr = sys.stderr.isatty()
            if self._log_path is not None:
                self._captured = CapturedOutput(self._log_path)
            self._panel = ProgressPanel(step, self._steps)
            self._area = LiveArea(self._console, self._draw)
            self._area.start()
            if redirects_stderr:
                redirect_terminal(sys.stderr, self._area.writer)

    def _draw(self, columns: int, lines: int) -> Sequence[Text]:
        assert self._panel is not None
        if (
            self._captured is not None
            and self._area is not None
            and (written := self._captured.take_lines())
        ):
            self._area.print("\n".join(written))
        return self._panel.draw(columns, lines)

    def update_progress(self, step: int) -> None:
        if self._panel is not None:
            self._panel.step = step

    def log_metrics(self, record: dict[str, Any]) -> None:
        """One readable line of a metrics record, or the panel."""
        parts = format_metrics(record)
        left = record.get("seconds_left")
        if left is not None:
            parts["seconds_left"] = f"{format_duration(left)} left"
        self._last_line = "  ".join(
            [f"step {record['step']:>{len(str(self._steps))}}/{self._steps}", *parts.values()]
        )
        if self._panel is None:
            self.info(self._last_line)
        else:
            self._write_log(self._last_line)
            self._panel.add_record(record)

    def log_sample(self, step: int, text: str) -> None:
        """Samples of the model after `step` steps, a line each; the panel shows the last one."""
        line = f"  sample: {text!r}"
        if self._panel is None:
            self.info(line)
        else:
            self._write_log(line)
            self._panel.add_sample(step, repr(text))

    def stop_progress(self) -> None:
        """Remove the panel; the line of the last log step remains."""
        if self._area is None:
            return
        self._area.stop()
        redirect_terminal(sys.stderr, None)
        for line in self._captured.close() if self._captured is not None else []:
            print(line, flush=True)
        self._area = self._panel = self._captured = None
        if self._last_line:
            print(self._last_line, flush=True)

    def close(self) -> None:
        self.stop_progress()
        if self._log_file is not None:
            self._log_file.close()
            self._log_file = None


class ProgressPanel:
    """The panel of a run: progress, the curve of the loss, speed, validation and the last sample.

    Values are set by the training, and drawn by another thread: only numbers that were logged
    anyway.
    """

    def __init__(self, step: int, steps: int) -> None:
        self.step = step
        self._steps = steps
        self._record: dict[str, Any] = {}
        self._logged_at = time.monotonic()
        self._validation: tuple[int, str] | None = None
        self._sample: tuple[int, str] | None = None
        self._curves: dict[str, list[float | None]] = {name: [] for name in CURVES}

    def add_record(self, record: dict[str, Any]) -> None:
        """A record of metrics.jsonl."""
        words = format_metrics(
            {name: value for name, value in record.items() if name.startswith("val/")}
        )
        if words:
            self._validation = record["step"], "  ".join(words.values())
        if "step_seconds" not in record:
            return  # a validation alone
        self._record = record
        self._logged_at = time.monotonic()
        for name, points in self._curves.items():
            if name in record:
                points.append(record[name])
                if len(points) > MAX_POINTS:
                    del points[: MAX_POINTS // 10]

    def add_sample(self, step: int, text: str) -> None:
        self._sample = step, clean(text)

    def draw(self, columns: int, lines: int) -> Sequence[Text]:
        """The panel, the most important lines first."""
        record = self._record
        left = record.get("seconds_left")
        if left is not None:
            left = max(0.0, left - (time.monotonic() - self._logged_at))
        drawn = [progress_line(self.step, self._steps, left, columns)]
        curve = next(
            (name for name in CURVES if any(value is not None for value in self._curves[name])),
            None,
        )
        if curve:
            if record.get(curve) is not None:
                words = METRIC_WORDS[curve].format(record[curve])
            else:
                words = f"{curve} not finite"
            label = f"{words}  "
            drawn.append(
                Text.assemble(label, (sparkline(self._curves[curve], columns - len(label)), "cyan"))
            )
        numbers = {
            name: word
            for name, word in format_metrics(record).items()
            if name != curve and not name.startswith("val/")
        }
        drawn += map(Text, fit_words(list(numbers.values()), columns))
        for what, shown in (("validation", self._validation), ("sample", self._sample)):
            if shown is not None:
                text = Text.assemble((f"{what} at step {shown[0]:,}: ", QUIET), shown[1])
                drawn += text.divide(range(columns, len(text), columns))[:MAX_TEXT_LINES]
        return drawn[:lines]


class CapturedOutput:
    """Standard output and error, where they are terminals, go to the log at `path` until `close`.

    C libraries and child processes write to descriptors 1 and 2 directly, and the panel would
    overwrite it. So they are redirected to the log, from which the lines to show are read. A pipe
    would lose the last words of a process that crashes, and block a library that writes more than
    it holds, where the reader waits for the interpreter lock that the library has.

    `sys.stdout` of a `RankLog` writes to the terminal all the same. `sys.stderr` is for the caller
    to redirect.
    """

    def __init__(self, path: Path) -> None:
        self._log = open(path, "rb")  # noqa: SIM115 - closed by `close`
        self._log.seek(0, os.SEEK_END)
        self._unfinished = b""
        self._stdout: TextIO = sys.stdout
        self._terminal: TextIO | None = None
        self._originals: dict[int, int] = {}
        log = os.open(path, os.O_WRONLY | os.O_APPEND)
        for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
            if _is_terminal(stream, descriptor):
                stream.flush()
                self._originals[descriptor] = os.dup(descriptor)
                os.dup2(log, descriptor)
        os.close(log)
        if 1 in self._originals:
            encoding = self._stdout.encoding
            errors = self._stdout.errors
            terminal = open(  # noqa: SIM115
                os.dup(self._originals[1]), "w", encoding=encoding, errors=errors, buffering=1
            )
            self._terminal = terminal
            redirect_terminal(self._stdout, lambda _: terminal)

    def take_lines(self) -> list[str]:
        """The complete lines since the last call that have no time stamp yet, as text that is safe
        to print on a terminal.
        """
        *lines, self._unfinished = (self._unfinished + self._log.read()).split(b"\n")
        return [printable(line) for line in lines if not STAMP.match(line)]

    def close(self) -> list[str]:
        """Restore the descriptors and `sys.stdout`.

        Returns the lines that have not been taken yet, complete or not.
        """
        for descriptor, original in self._originals.items():
            os.dup2(original, descriptor)
            os.close(original)
        redirect_terminal(self._stdout, None)
        if self._terminal is not None:
            self._terminal.close()
        lines = self.take_lines()
        self._log.close()
        return lines + ([printable(self._unfinished)] if self._unfinished else [])


def _is_terminal(stream: TextIO, descriptor: int) -> bool:
    try:
        return stream.fileno() == descriptor and os.isatty(descriptor)
    except (OSError, ValueError, AttributeError):  # a stream in memory, or none
        return False
