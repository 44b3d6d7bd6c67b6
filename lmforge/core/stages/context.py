"""What a stage is given of its attempt: the recipe, the run directory, the ranks, and where
progress is reported.
"""

from dataclasses import dataclass
from pathlib import Path

from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.options.stage import StageConfig
from lmforge.core.records.runs import Run
from lmforge.core.seams import (
    NO_CALLBACKS,
    AttemptLog,
    AttemptObserver,
    Console,
    Monitors,
    RunCallbacks,
    Watch,
)
from lmforge.core.stages.run_files import RunEvents


@dataclass(frozen=True)
class RunContext:
    """The recipe, the run directory, the ranks, and where progress is reported.

    Every rank has one, with its own log.
    """

    config: StageConfig
    run: Run
    dist_ctx: DistributedContext
    monitors: Monitors
    events: RunEvents
    observers: tuple[AttemptObserver, ...] = ()
    callbacks: RunCallbacks = NO_CALLBACKS

    @property
    def log(self) -> AttemptLog:
        return self.monitors.log

    @property
    def watch(self) -> Watch:
        return self.monitors.watch

    @property
    def console(self) -> Console:
        return self.monitors.console

    @property
    def memory_snapshot(self) -> Path:
        """The file with what a GPU's memory held, for `log.memory_snapshot` and where memory runs
        out.
        """
        return self.log.path.with_suffix(".memory.pickle")
