"""The interface of every objective, and how an objective runs the model."""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from lmforge.core.data.batch import Batch, BatchView, Metrics, OptionalExtra
from lmforge.core.model.layers import LanguageModel


class Objective(Protocol):
    """The loss of a batch as a sum, which is divided once (parallel_model.py) by the number of
    items of the global batch.
    """

    def num_items(self, batch: Batch) -> Tensor:
        """The number of scored tokens, pairs or completions of a batch: an fp32 scalar on its
        device.

        The loop sums it over micro-batches and ranks; the loss of the global batch is divided by
        the result.
        """

    def loss(self, model: Any, batch: Batch) -> tuple[Tensor, Metrics]:
        """(sum, metrics as (sum, count) pairs).

        With nothing to score the sum is 0, not NaN, and differentiable.
        """


def apply_head(
    model: LanguageModel, batch: Batch, head_fn: Callable[..., Any] | None = None
) -> Any:
    """Run the model on a batch: what `head_fn(hidden, weight, head=…)` returns (LMHead), or the
    logits without one.
    """
    hidden = model(
        batch.tokens,
        batch.positions,
        batch.document_ids,
        rng_keys=batch.rng_keys,
        document_starts=batch.document_starts,
        **replayed_experts(batch),
    )
    return model.lm_head(hidden, head_fn)


class ReplayBatch(BatchView):
    """A batch of tokens whose experts are known.

    routed_experts: int32 [sequences, length, layers, experts of a token]: the experts that sampled,
        −1 for others.
    """

    routed_experts = OptionalExtra()


def replayed_experts(batch: Batch) -> dict[str, Tensor]:
    """The argument of a model by which it takes the experts that sampled a batch, where the batch
    has them.
    """
    experts = ReplayBatch(batch).routed_experts
    return {} if experts is None else {"routed_experts": experts}
