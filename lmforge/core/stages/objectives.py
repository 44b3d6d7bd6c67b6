"""Which objective a run has: `build_objective`, and how that of pretraining is built from a config.

Each is called as `(config, options)`: the config of the stage, and the objective's own options, of
which these have none. The losses themselves are in core/losses/ and post/objectives/.
"""

from typing import Any

from lmforge.core import registry
from lmforge.core.errors import UserError
from lmforge.core.losses.language import NextTokenObjective
from lmforge.core.losses.objective import Objective
from lmforge.core.options.extend import entry_options
from lmforge.core.options.stage import StageConfig


def build_objective(config: StageConfig) -> Objective:
    """The objective that a recipe chooses.

    Raises UserError for one that its stage has no data for.
    """
    default = config.default_objective
    name = config.objective.name or default
    entry = registry.get("objective", name)
    if entry.facts.get("method") and name != default:
        raise UserError(f"objective.name = {name}: it is a method of alignment; choose it with align.method")
    if name == "next-token" and name != default:
        raise UserError(f"objective.name = {name}: it reads texts alone, and this is {config.of_stage}; use pretrain or sft")
    if name == "distillation" and name != default:
        raise UserError(f"objective.name = {name}: it needs a teacher; use lmforge distill")
    objective = entry.build(config, entry_options(config.objective, entry))
    return check_objective(objective, f"{entry.origin}: objective {name}")


def check_objective(objective: Any, what: str = "objective") -> Objective:
    """The objective itself. Raises UserError if it is not an objective."""
    if missing := [method for method in ("num_items", "loss") if not callable(getattr(objective, method, None))]:
        raise UserError(f"{what}: {type(objective).__name__} has no method {missing[0]}")
    return objective


def build_next_token_objective(config: StageConfig, options: None = None) -> NextTokenObjective:
    """The objective of pretraining and fine-tuning."""
    return NextTokenObjective(z_loss=config.train.z_loss, source_names=config.source_names)
