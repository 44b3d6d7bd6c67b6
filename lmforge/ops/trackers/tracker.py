"""What a tracker does (`Tracker`), what it is given (`TrackedRun`), and whether those that a run
names are installed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from lmforge.core import registry
from lmforge.core.errors import UserError, how_to_install
from lmforge.core.options.stage import StageConfig
from lmforge.core.records.runs import Run


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is given when a run is opened.

    path      the run's directory
    folder    for files of the tracker's own, in the run's directory
    project   what groups runs: a project, or an experiment of mlflow
    run_id    what `Tracker.run_id` was in an earlier attempt, None in the first
    config    every option as `section.name`, with values that JSON has
    options   the tracker's own options, of the class that it was registered with; None where it has
              none
    """

    path: Path
    folder: Path
    project: str
    run_id: str | None
    config: Mapping[str, Any]
    options: Any = None


@dataclass(frozen=True)
class Table:
    """What the model wrote once `step` steps were done, as rows of a table.

    name      samples; completions, of a policy that is trained; or val/completions
    columns   the names of the columns: step, prompt, text; of completions also reward, tokens and
              ended
    rows      values that JSON has, in the order of the columns
    """

    name: str
    step: int
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Any]]


class Tracker(Protocol):
    """An open run of a tracker.

    Its methods are called in one thread, not the main one, and may wait for the network. What a
    call that raises was to send is not sent again.
    """

    run_id: str
    """By which the tracker continues this run."""

    url: str | None
    """Where people see the run, if it is somewhere."""

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Finite values, by the names that they have in metrics.jsonl.

        A step may come again, after a resume or a rollback.
        """

    def log_table(self, table: Table) -> None:
        """All samples of one step, or completions that were sampled at it."""

    def attach(self, report: Path) -> None:
        """Attach the report, an HTML file, at the end of an attempt."""

    def close(self, state: str) -> None:
        """Send what is left. `state`: done, interrupted or failed."""


def check_trackers_of(config: StageConfig, run: Run) -> None:
    """Raise UserError where a tracker of a recipe cannot be used."""
    check_trackers(config.log.trackers)


def check_trackers(names: Sequence[str]) -> None:
    """Raise UserError for a tracker that does not exist, or whose package (of that name, as is its
    extra) is not installed.
    """
    for name in names:
        if registry.get("tracker", name).origin == registry.BUILT_IN and find_spec(name) is None:
            raise UserError(
                f"log.trackers: {name} is not installed; {how_to_install(name)}, or leave it out"
            )
