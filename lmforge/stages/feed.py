"""What the loop is fed with, and what a stage makes that from."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lmforge.data.batch import Batch
from lmforge.data.loader import BatchLoader
from lmforge.monitor.watchdog import Watchdog
from lmforge.objectives.objective import Objective
from lmforge.parallel.parallel_model import ParallelModel
from lmforge.runs import Run
from lmforge.stages.inputs import RunInputs
from lmforge.train.loop import BatchSource


@dataclass(frozen=True)
class StageContext:
    """What a stage has when its model is there: `start` is the step it goes on from, and `folder` the checkpoint of it, if
    it does; `say` and `complain` tell people."""

    run: Run
    inputs: RunInputs
    objective: Objective
    parallel_model: ParallelModel
    loader: BatchLoader
    watch: Watchdog
    dtype: torch.dtype
    start_step: int
    checkpoint_folder: Path | None
    info: Callable[[str], None]
    warn: Callable[[str], None]


@dataclass(frozen=True)
class StageBatches:
    """Where batches come from, and what has to be added to those of validation.

    validate  in place of the objective's value on held-out rows: what is told of a step
    state     what a checkpoint has to keep of the batches: tensors, the same on all ranks
    close     called when training ends
    """

    batch_source: BatchSource
    add_extras: Callable[[Batch], Batch] = lambda batch: batch
    validate: Callable[[int], dict[str, float]] | None = None
    get_state: Callable[[], dict[str, Tensor]] | None = None
    close: Callable[[], None] = lambda: None
