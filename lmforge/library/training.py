"""Training stages for programs, with a custom objective and callbacks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmforge.core.errors import RunFailed
from lmforge.core.losses.objective import Objective
from lmforge.core.options.load import build_config
from lmforge.core.records.runs import Run
from lmforge.core.run import run_stage
from lmforge.core.stages.custom_code import CustomCode


def train_model(
    options: Mapping[str, Any] | None = None,
    *,
    recipe: str | Path | None = None,
    stage: str = "pretrain",
    objective: Objective | None = None,
    callbacks: Sequence[Any] = (),
) -> Path:
    """Train as `lmforge pretrain`, `sft` or `align` does, with checkpoints, logs and resume.

    Returns the run's directory.

    options    by their names in a recipe, such as {"train.steps": 100}
    recipe     a TOML file that they override
    stage      "pretrain", "sft", "distill" or "align"
    objective  used instead of the one that the recipe names; see docs/library.md
    callbacks  objects with methods at named points of the run, after those that the recipe names;
               see docs/extending.md

    Under torchrun every rank calls it. Raises UserError before anything of the run is written, and
    RunFailed after that, also where a signal stopped it (it has saved then, and the same call goes
    on).
    """
    config = build_config(stage, options or {}, Path(recipe) if recipe else None)
    path = Run.from_config(config).path
    if status := run_stage(config, CustomCode(objective, callbacks)):
        raise RunFailed(f"{path}: stopped by signal {status - 128}, after it saved; the same call continues from there")
    return path
