"""User code that a run executes: its objective, callbacks and plugin files."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lmforge.config.stage import StageConfig
from lmforge.objectives.objective import Objective
from lmforge.plugins import freeze_plugins
from lmforge.stages.objectives import build_objective, check_objective
from lmforge.train.callbacks import Callbacks
from lmforge.train.inputs import RunContext


@dataclass(frozen=True)
class CustomCode:
    """Code that a program passes to a stage: an objective instead of the recipe's, and callbacks besides the recipe's."""

    objective: Objective | None = None
    callbacks: Sequence[Any] = ()

    def open(self, config: StageConfig) -> tuple[Objective, Callbacks]:
        """Build what the recipe names. Raises UserError; nothing of the run has been written."""
        objective = build_objective(config) if self.objective is None else check_objective(self.objective)
        return objective, Callbacks.of_run(config, self.callbacks)


NO_CUSTOM_CODE = CustomCode()


def copy_plugins(ctx: RunContext) -> None:
    """Copy plugin files into the run's directory. Every rank calls it."""
    ctx.dist_ctx.decide_on_rank0(partial(freeze_plugins, ctx.config.plugins, ctx.run.path))
