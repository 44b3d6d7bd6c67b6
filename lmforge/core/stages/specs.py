"""What each stage does in its own way.

A stage is registered by its name (core/options/builtin_names.py): the class of its config, and a
function that gives its `StageSpec`. That of pretraining is here, the others are in post/stages.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lmforge.core import registry
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.options.stage import PretrainConfig, StageConfig
from lmforge.core.stages.attempt import RunContext
from lmforge.core.stages.build_model import BuiltModel
from lmforge.core.stages.dataset_batches import DatasetBatches
from lmforge.core.stages.inputs import RunInputs, open_pretrain_inputs
from lmforge.core.stages.weight_source import download_weights
from lmforge.core.steps.callbacks import BatchSource


@dataclass(frozen=True)
class StageSpec:
    """What a stage does in its own way.

    prepare_data     downloads and converts what the recipe names; every rank calls it
    open_inputs      opens and checks data, tokenizer and model config for a number of ranks
    build_batches    where batches come from, once the model is built; every rank calls it
    """

    prepare_data: Callable[[Any, DistributedContext], None]
    open_inputs: Callable[[Any, int], RunInputs]
    build_batches: Callable[[RunContext, RunInputs, BuiltModel], BatchSource]


def spec_of(config: StageConfig) -> StageSpec:
    """The spec of the stage that a recipe is for."""
    spec: StageSpec = registry.get("stage", config.of_stage).build(config)
    return spec


def pretrain_stage(config: PretrainConfig) -> StageSpec:
    return StageSpec(download_weights, open_pretrain_inputs, DatasetBatches)
