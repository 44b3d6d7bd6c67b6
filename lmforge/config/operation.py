"""The sections of a recipe that say how a run is watched, logged and started; none changes what is trained."""

import re
from collections.abc import Iterator

from lmforge.config.options import Options, option
from lmforge.config.ranges import COUNT, COUNT_OR_0, DURATION, RANKS
from lmforge.untrusted import quoted


class LogOptions(Options):
    """What is logged."""

    every_steps: int = option(10, "steps between lines of metrics (transformers: logging_steps)", **COUNT)
    tensorboard: bool = option(False, "write TensorBoard events too (extra: tensorboard)")
    profile_steps: str | None = option(
        None, "trace these steps with torch's profiler, a file a rank: FIRST:LAST, such as 10:13"
    )
    memory_snapshot: bool = option(False, "on a GPU: record allocations, and write them at the end or when memory runs out")

    @property
    def profile_window(self) -> tuple[int, int] | None:
        """The first and the last step to trace; None for none."""
        found = re.fullmatch(r"([0-9]{1,12}):([0-9]{1,12})", self.profile_steps or "")
        return (int(found[1]), int(found[2])) if found else None

    def problems(self) -> Iterator[str]:
        window = self.profile_window
        if self.profile_steps is not None and (window is None or not 1 <= window[0] <= window[1]):
            yield f"log.profile_steps = {quoted(self.profile_steps)}: expected FIRST:LAST, two steps from 1 on, such as 10:13"


class WatchOptions(Options):
    """The watchdog: what is reported when ranks make no progress, and when a rank that cannot continue ends itself."""

    stall_seconds: float = option(
        30.0, "report which rank is where after so long without progress (or 3 times what the phase takes)", ge=0.5, le=1e6
    )
    timeout_seconds: float | None = option(
        1800.0, "end with status 75, for a launcher to restart, after so long without progress; none for never", **DURATION
    )

    def problems(self) -> Iterator[str]:
        if self.timeout_seconds is not None and self.timeout_seconds < 2 * self.stall_seconds:
            yield (
                f"watch.timeout_seconds = {self.timeout_seconds:g}: at least twice watch.stall_seconds"
                f" = {self.stall_seconds:g}, so that stacks are reported before the end; raise it or lower the other"
            )


class LaunchOptions(Options):
    """How processes are started."""

    processes: int = option(1, "ranks to start on this machine (torchrun: --nproc-per-node); not under torchrun", **RANKS)
    max_restarts: int = option(3, "restarts of all ranks, from the last checkpoint, after one of them was lost", **COUNT_OR_0)
