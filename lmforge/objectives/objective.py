"""What every objective offers to the loop."""

from typing import Any, Protocol

from torch import Tensor

from lmforge.data.batch import Batch, Metrics


class Objective(Protocol):
    """What a batch is worth, as a sum that the loop divides once by the weight of the whole global batch."""

    def num_items(self, batch: Batch) -> Tensor:
        """What the sum is divided by, before it is summed over micro-batches and ranks: a scalar on the batch's device."""

    def loss(self, model: Any, batch: Batch) -> tuple[Tensor, Metrics]:
        """(sum, metrics as (sum, count) pairs). A batch with nothing to score gives 0, not NaN, and stays differentiable."""
