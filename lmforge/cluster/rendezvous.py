"""Names the ranks that have not joined, while the others wait for them.

torch waits for all ranks in silence, and fails after minutes with a message that names none. Here each rank writes a key to
the store over a connection of its own (the other one is busy waiting), and the lowest rank that joined prints who has not.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import TCPStore

REPORT_MISSING_AFTER_SECONDS = 30.0


@contextmanager
def report_missing_ranks(
    rank: int, world_size: int, init_number: int, patience_seconds: float = REPORT_MISSING_AFTER_SECONDS
) -> Iterator[None]:
    """Around code that waits for all ranks. `init_number` tells several initializations of the same processes apart.

    Ranks that have not joined after `patience_seconds` are printed on stderr, and again each time the wait has doubled.
    """
    joined = threading.Event()

    def report() -> None:
        began, pause = time.monotonic(), patience_seconds
        keys = [f"lmforge/joining-{init_number}/{each}" for each in range(world_size)]
        try:
            # The rank that keeps the store may itself be late.
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(hours=1))
            store.set(keys[rank], "here")
            while not joined.wait(pause):
                missing = [each for each in range(world_size) if not store.check([keys[each]])]
                pause = time.monotonic() - began
                if missing and rank == min(set(range(world_size)) - set(missing)):
                    message = _missing_message(missing, world_size)
                    print(f"lmforge: {message} after {pause:.0f} s", file=sys.stderr, flush=True)
        except (RuntimeError, KeyError, ValueError):
            return  # no store answers: the rank that waits for it reports that

    threading.Thread(target=report, name="joining", daemon=True).start()
    try:
        yield
    finally:
        joined.set()


def _missing_message(missing: list[int], world_size: int) -> str:
    shown = ", ".join(map(str, missing[:16])) + (f" and {len(missing) - 16} more" if len(missing) > 16 else "")
    have = "has" if len(missing) == 1 else "have"
    return f"{len(missing)} of {world_size} ranks {have} not joined yet ({shown}): not started, still importing, or cut off"
