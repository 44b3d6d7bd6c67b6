"""`lmforge`, whose ranks begin a step only when the file PACE allows it: it holds the number of the
last step that may begin.

Ranks that a launcher starts are forked from it (tests/support/preloaded.py), and wait too. So a run does
not end before the test has acted on it.
"""

import os
import time
from pathlib import Path
from typing import Any

from lmforge.cli import main
from lmforge.core.data.loader import BatchLoader

PACE = Path(os.environ["PACE"])


def wait_for_permission() -> None:
    before = BatchLoader.batches

    def batches(self: Any, step: int) -> Any:
        # Steps are counted from 0 here; a file that is being written is empty.
        while step >= int(PACE.read_text() or 0):
            time.sleep(0.005)
        return before(self, step)

    BatchLoader.batches = batches  # type: ignore[method-assign]


if __name__ == "__main__":
    wait_for_permission()
    main()
