"""The console of a run: lines for the reader, which rank 0 also logs, and on a terminal a panel (progress_panel.py)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from lmforge.cluster.distributed import DistributedContext
from lmforge.errors import format_duration
from lmforge.monitor.captured_output import CapturedOutput
from lmforge.monitor.progress_panel import ProgressPanel
from lmforge.monitor.rank_log import redirect_terminal, stamp_lines, terminal_stderr
from lmforge.terminal.cells import format_metrics
from lmforge.terminal.live_area import LiveArea, can_redraw


class ConsoleLogger:
    """Writes lines on the first rank, and all of them to the log. A terminal shows a panel while the run trains, and log
    steps only there; elsewhere each log step is a line."""

    def __init__(self, dist_ctx: DistributedContext, steps: int, log_path: Path | None, *, panel: bool = True) -> None:
        self._is_rank0, self._steps = dist_ctx.is_rank0, steps
        self._log_path = log_path
        self._log_file = open(log_path, "a", encoding="utf-8") if log_path and dist_ctx.is_rank0 else None  # noqa: SIM115
        self._console = Console(highlight=False)
        self._has_panel = panel and self._is_rank0 and can_redraw(self._console)
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
        """One line that must not be overlooked: also printed on standard error, if that is another stream."""
        self.info(line)
        if self._is_rank0 and not self._console.is_terminal:
            print(f"lmforge: {line}", file=terminal_stderr(), flush=True)

    def start_progress(self, step: int) -> None:
        """Show the panel, on a terminal."""
        if self._has_panel:
            redirects_stderr = terminal_stderr().isatty()
            if self._log_path is not None:
                self._captured = CapturedOutput(self._log_path)
            self._panel = ProgressPanel(step, self._steps)
            self._area = LiveArea(self._console, self._draw)
            self._area.start()
            if redirects_stderr:
                redirect_terminal(self._area.writer)

    def _draw(self, columns: int, lines: int) -> Sequence[Text]:
        assert self._panel is not None
        if self._captured is not None and self._area is not None and (written := self._captured.take_lines()):
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
        self._last_line = "  ".join([f"step {record['step']:>{len(str(self._steps))}}/{self._steps}", *parts.values()])
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
        redirect_terminal(None)
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
