"""A real terminal for tests: tmux, with a server of the test's own.

Import the fixture `terminal`.
"""

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Terminal = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """`terminal(words …)`: a command of tmux."""
    socket = str(tmp_path / "tmux")

    def tmux(*words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["tmux", "-S", socket, "-f", "/dev/null", *map(str, words)],
            capture_output=True,
            text=True,
            timeout=30,
        )

    yield tmux
    tmux("kill-server")


def wait_for_screen(terminal: Terminal, pattern: str) -> list[str]:
    """The lines of the screen, as soon as it matches."""
    deadline = time.monotonic() + 60
    while True:
        page = terminal("capture-pane", "-p").stdout
        if re.search(pattern, page):
            return [line.rstrip() for line in page.splitlines()]
        assert time.monotonic() < deadline, page
        time.sleep(0.1)
