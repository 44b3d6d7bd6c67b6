"""What a wing attaches to the loop of a run: an `Observer`, registered by name (kind "observer")."""

from dataclasses import dataclass
from typing import Any

from lmforge.core import registry
from lmforge.core.model.config import ModelConfig
from lmforge.core.options.stage import StageConfig
from lmforge.core.stages.attempt import RunContext
from lmforge.core.stages.build_model import BuiltModel
from lmforge.core.stages.inputs import RunInputs
from lmforge.core.stages.run_memory import RunMemory
from lmforge.core.steps.callbacks import BatchSource, LoopCallbacks
from lmforge.core.steps.metrics import Throughput


@dataclass(frozen=True)
class ObservedRun:
    """A run whose model is built, as observers see it."""

    ctx: RunContext
    inputs: RunInputs
    built: BuiltModel
    batches: BatchSource
    throughput: Throughput
    # Made before the model was built.
    memory: RunMemory | None = None


class Observer(LoopCallbacks):
    """Observes the steps of a run. Every rank has one of each that the recipe chooses."""

    @classmethod
    def open(cls, config: StageConfig, inputs: RunInputs, resumes: bool) -> Any:
        """What it needs, opened and checked on rank 0 before anything of the run is written; all
        ranks get it, in `inputs.opened` under its name. Raises UserError.
        """
        return None

    def __init__(self, run: ObservedRun) -> None:
        """The model is built, and no step is done."""


def chosen_observers(config: StageConfig, model_config: ModelConfig) -> list[registry.Entry]:
    """The observers of a recipe, in the order in which they are called."""
    return registry.chosen("observer", config=config, model=model_config)
