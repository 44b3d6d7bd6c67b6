"""Lines at the bottom of a terminal that are drawn again and again, while other lines are printed
above them: rich's Live, with the cursor left visible, which a killed process could not show again.
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TextIO

from rich.console import Console, Group
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.text import Text

# Redrawing more often would not be noticed, and would be too much for a terminal behind ssh.
REDRAWS_PER_SECOND = 2
# A terminal that becomes narrower wraps longer lines, which are then not erased.
MAX_COLUMNS = 79


def can_redraw(console: Console) -> bool:
    """Whether it is a terminal that moves its cursor, and shows bars."""
    return (
        console.is_terminal
        and not console.is_dumb_terminal
        and console.encoding.lower().startswith("utf")
    )


class LiveArea(Live):
    """Shows the lines that `draw(columns, lines)` returns, which must fit in that many columns and
    lines, from `start` to `stop`. What Python prints meanwhile, and what is written to a `writer`,
    appears above them line by line.
    """

    def __init__(self, console: Console, draw: Callable[[int, int], Sequence[Text]]) -> None:
        self._draw = draw
        self._writers = list[Any]()
        super().__init__(
            console=console,
            refresh_per_second=REDRAWS_PER_SECOND,
            transient=True,
            redirect_stderr=False,
        )

    def get_renderable(self) -> Group:
        width, height = self.console.size
        # The present size, whatever COLUMNS was at the start; zeros where it is unknown.
        with suppress(OSError, ValueError):
            size = os.get_terminal_size(self.console.file.fileno())
            width = size.columns or width
            height = size.lines or height
        columns = min(width - 1, MAX_COLUMNS)
        lines = height - 1
        drawn = [line.copy() for line in self._draw(columns, lines)[:lines]]
        for line in drawn:
            line.truncate(columns, overflow="ellipsis")
        return Group(*drawn, "")  # the cursor is on the line below

    def start(self, refresh: bool = True) -> None:
        with suppress(OSError, ValueError):  # the terminal was closed; the run goes on
            super().start()
            self.console.show_cursor(True)
        if refresh:
            self.refresh()

    def stop(self) -> None:
        """Erase the lines. Prints go to the terminal again."""
        with suppress(OSError, ValueError):
            for writer in (*self._writers, sys.stdout):
                writer.flush()  # what has not been ended by a newline
        with suppress(OSError, ValueError):
            super().stop()

    def refresh(self) -> None:
        with suppress(OSError, ValueError):
            super().refresh()

    def print(self, text: str) -> None:
        """Write lines above."""
        with suppress(OSError, ValueError):
            self.console.print(Text(text), soft_wrap=True)

    def writer(self, stream: TextIO) -> TextIO:
        """Replaces `stream`, which writes to the same terminal: what is written to it is printed
        above the area.
        """
        writer: Any = FileProxy(self.console, stream)
        self._writers.append(writer)
        return writer
