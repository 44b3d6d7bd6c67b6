"""What the loop is fed with, and what a stage makes that from."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lmforge.data.batch import Batch
from lmforge.data.loader import Loader
from lmforge.objectives.objective import Objective
from lmforge.parallel.engine import Spread
from lmforge.runs import Run
from lmforge.train.loop import Batches
from lmforge.train.material import Material
from lmforge.train.watch import Watch


@dataclass(frozen=True)
class Built:
    """What a stage has when its model is there: `start` is the step it goes on from, and `folder` the checkpoint of it, if
    it does; `say` and `complain` tell people."""

    run: Run
    material: Material
    objective: Objective
    trained: Spread
    loader: Loader
    watch: Watch
    dtype: torch.dtype
    start: int
    folder: Path | None
    say: Callable[[str], None]
    complain: Callable[[str], None]


@dataclass(frozen=True)
class Feed:
    """Where batches come from, and what has to be added to those of validation.

    validate  in place of the objective's value on held-out rows: what is told of a step
    state     what a checkpoint has to keep of the batches: tensors, the same on all ranks
    close     called when training ends
    """

    batches: Batches
    add: Callable[[Batch], Batch] = lambda batch: batch
    validate: Callable[[int], dict[str, float]] | None = None
    state: Callable[[], dict[str, Tensor]] | None = None
    close: Callable[[], None] = lambda: None
