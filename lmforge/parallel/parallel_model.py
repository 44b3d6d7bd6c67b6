"""A model ready to train on this rank, whatever spreads it: what the loop asks of every engine.

This class is the engine `alone`; the others, each in its file, say only what they do otherwise.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lmforge.cluster.distributed import DistributedContext
from lmforge.data.batch import Batch, Metrics
from lmforge.model.layers import LanguageModel

# An objective's loss: (model, batch) → (sum, metrics). What evaluation puts in its place returns what it likes.
LossFn = Callable[[Any, Batch], Any]


class ModelWithLoss(nn.Module):
    """A model and what its batches are worth: `forward(batch) -> (sum, metrics)`.

    Wrapped together, so that the head and its loss run inside the wrapped module's forward, where sharding has gathered
    the head's weight and DDP sees the whole graph. With `instead`, that is what the batch is given to: evaluation goes
    through the same hooks as training.
    """

    def __init__(self, model: LanguageModel, loss_fn: LossFn) -> None:
        super().__init__()
        self.model = model
        self._loss_fn = loss_fn

    def forward(self, batch: Batch, score_fn: LossFn | None = None) -> Any:
        return (score_fn or self._loss_fn)(self.model, self.model.local_batch(batch))


class ParallelModel:
    """`scored` is called on a micro-batch; `model` is the same model for everything else, under its own names.

    What the loop asks for is `accumulate`, then `clip`, then `zero_gradients`; validation asks for `score`.
    """

    engine = "single"
    # What a loss is multiplied by before its backward pass, where an engine divides gradients by the number of ranks.
    loss_scale = 1.0
    # How many ranks are given the same rows, because they share out the work on them.
    model_parallel_size = 1
    # Ranks of the same part of the model have the same work to do.
    pipeline_rank = 0

    def __init__(
        self, model_with_loss: nn.Module, model: LanguageModel, dist_ctx: DistributedContext, autocast_dtype: torch.dtype | None
    ) -> None:
        """`autocast_dtype` for the engines that do not bring mixed precision of their own, else None."""
        self.model_with_loss = model_with_loss
        self.model = model
        self.dist_ctx = dist_ctx
        self._autocast_dtype = autocast_dtype

    @property
    def description(self) -> str:
        """The engine and how it shards, for people to read."""
        return self.engine

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def parameter_shapes(self) -> dict[str, torch.Size]:
        """The whole shape of each parameter by its name in `model.named_parameters()`, however little of it is here."""
        return {name: parameter.shape for name, parameter in self.model.named_parameters()}

    def autocast(self) -> AbstractContextManager[Any]:
        """Mixed precision, around forward passes."""
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.dist_ctx.device.type, dtype=self._autocast_dtype)

    def micro_batch_context(self, is_last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of one micro-batch: says which gradients are exchanged with it, and which later."""
        return nullcontext()

    def forward_backward(
        self, micro_batches: Sequence[Batch], num_items: Tensor, set_phase: Callable[[str], None]
    ) -> list[Metrics]:
        """Add to the gradient that of these micro-batches' summed loss, divided by `weight`. What the loss tells of each.

        `mark` hears which phase begins.
        """
        metrics = []
        for number, batch in enumerate(micro_batches, start=1):
            with self.micro_batch_context(is_last=number == len(micro_batches)):
                set_phase("forward")
                with self.autocast():
                    total, told = self.model_with_loss(batch)
                set_phase("backward")
                (total * (self.loss_scale / num_items)).backward()
            metrics.append(told)
        return metrics

    def score(self, batch: Batch, score_fn: LossFn) -> Any:
        """What `instead` of the loss gives for a batch, without gradients: every rank calls it with rows of its own."""
        with self.autocast():
            return self.model_with_loss(batch, score_fn=score_fn)

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)

    def _local_grads(self) -> list[Tensor]:
        present = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in present]

    def _divide_by_replication(self, squares: Tensor) -> Tensor:
        """The square of each gradient's norm [gradients], less what other ranks count of the same."""
        return squares

    def _all_reduce_over_shards(self, squares: Tensor) -> None:
        """Add up, in place, what the ranks that share one copy of the model found in their parts of it."""

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """L2 norm of the whole gradient, fp32, the same on every rank; the host does not wait for it."""
        gradients = self._local_grads()
        # A rank of many may hold no part of any tensor.
        zero = torch.zeros((), device=self.dist_ctx.device)
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32) if gradients else [zero]
        squares = self._divide_by_replication(torch.stack(norms).square()).sum()
        self._all_reduce_over_shards(squares)
        return squares.sqrt()

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Shorten the gradient to norm `longest` where it is longer, and return its norm before that."""
        norm = self.grad_norm()
        gradients = self._local_grads()
        if max_norm and gradients:
            # A multiplication by 1 costs less than asking the device whether it is needed.
            torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    @contextmanager
    def unsharded(self) -> Iterator[LanguageModel]:
        """The model with all its weights at hand, for decoding: every rank enters and leaves together, and in between
        forward passes may differ in number from rank to rank."""
        yield self.model

    def state_dict(
        self, optimizer: torch.optim.Optimizer, named_state: Callable[..., dict[str, dict[str, Tensor]]]
    ) -> dict[str, Any]:
        """What a checkpoint holds: {"model": tensors, "optimizer": tensors}, under the model's own names.

        `by_name(model, optimizer)` gives the optimizer's. Filling the tensors in place and calling `loaded` is loading.
        """
        return {"model": dict(self.model.named_parameters()), "optimizer": named_state(self.model, optimizer)}

    def load_state_dict(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Take over a `state` whose tensors were filled."""
