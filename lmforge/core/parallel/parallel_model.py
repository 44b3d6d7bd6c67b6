"""`train_step`, one optimizer step on this rank; and `ParallelModel`, what it steps: a model with
the same interface for every engine. The class itself is the engine `single`. Each other engine, in
a file of its own, overrides what it does differently.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lmforge.core.data.batch import Batch, Metrics
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.model.init_weights import named_tensors
from lmforge.core.model.layers import LanguageModel
from lmforge.core.parallel.compiled import uncompiled_blocks
from lmforge.core.parallel.dims import ParallelDims
from lmforge.core.parallel.working_weights import working_weights

# An objective's loss: (model, batch) → (sum, metrics). A score function of evaluation may return
# anything.
LossFn = Callable[[Any, Batch], Any]
# (model, optimizer) → the optimizer's state tensors by the name of their parameter.
NamedState = Callable[[nn.Module, Optimizer], dict[str, dict[str, Tensor]]]
NORM_ROW = 1024  # numbers


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: the tensor itself where it is not a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor, gathered from all ranks that hold a part: all of them must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train_step(
    parallel_model: "ParallelModel",
    optimizer: Optimizer,
    micro_batches: Sequence[Batch],
    count_items: Callable[[Batch], Tensor],
    *,
    lr: float,
    max_grad_norm: float,
    set_phase: Callable[[str], None] = lambda phase: None,
    before_update: Callable[[], None] = lambda: None,
    is_bad_step: Callable[[list[Metrics], Tensor], Tensor] | None = None,
) -> tuple[Tensor, list[Metrics]]:
    """One optimizer step on this rank's micro-batches of a global batch.

    The gradient is that of the sum of losses over the global batch, divided once by its
    `num_items`, which are counted over micro-batches and ranks before the first backward.
    `is_bad_step(metrics, gradient norm)` says on the device whether to skip the update. `set_phase`
    is called as each phase begins, and `before_update` before weights change.

    Returns the gradient norm before clipping and the metrics of each micro-batch, on the device:
    the host does not wait.
    """
    set_phase("reduce")
    num_items = parallel_model.begin_step(micro_batches, count_items)
    metrics = parallel_model.forward_backward(micro_batches, num_items, set_phase)
    set_phase("reduce")
    grad_norm = parallel_model.clip_grad_norm(max_grad_norm)
    set_phase("optimizer")
    before_update()
    set_learning_rate(optimizer, lr)
    is_bad = None if is_bad_step is None else is_bad_step(metrics, grad_norm)
    if is_bad is None:
        optimizer.step()
    else:
        step_unless(optimizer, is_bad)
    parallel_model.end_step(optimizer, is_bad)
    return grad_norm, metrics


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_ratio", 1.0)


def step_unless(optimizer: Optimizer, skip: Tensor) -> None:
    """Take one step, unless `skip` (bool, on the device, the same on all ranks) is true: then
    parameters and state do not change.

    The host does not wait for its value, unless the parameters are on the host (with cpu_offload),
    or the optimizer is one of a plugin that `ignores_found_inf` (build_optimizer).
    """
    if getattr(optimizer, "ignores_found_inf", False):
        if not skip:
            optimizer.step()
        return
    # torch's fused optimizers read this, and so do ours.
    optimizer.found_inf = skip.to(optimizer.param_groups[0]["params"][0].device).float()  # type: ignore[attr-defined]
    optimizer.step()
    del optimizer.found_inf  # type: ignore[attr-defined]


class ModelWithLoss(nn.Module):
    """A model and its loss in one module: `forward(batch) -> (sum, metrics)`.

    Head and loss run inside the wrapped module's forward pass, where FSDP has gathered the head's
    weight and DDP sees the whole graph. Evaluation passes `score_fn` in place of the loss, and so
    goes through the same hooks as training.
    """

    def __init__(self, model: LanguageModel, loss_fn: LossFn) -> None:
        super().__init__()
        self.model = model
        self._loss_fn = loss_fn

    def forward(self, batch: Batch, score_fn: LossFn | None = None) -> Any:
        return (score_fn or self._loss_fn)(self.model, self.model.local_batch(batch))


class ParallelModel:
    """A model distributed by one engine.

    A training step calls `begin_step`, `forward_backward`, `clip_grad_norm` and `end_step`;
    validation calls `score`. `model_with_loss` is called on micro-batches; `model` is the same
    model under its own names, for everything else.
    """

    engine = "single"
    # Whether FSDP, which has a mixed precision of its own, shards the model.
    is_sharded = False
    # The divisor that the engine applies when it sums gradients over ranks; the loss is multiplied
    # by it before.
    gradient_divide_factor = 1.0
    # The ranks of one pipeline rank have the same work to do, so that their times compare.
    pipeline_rank = 0

    def __init__(
        self,
        model: LanguageModel,
        loss_fn: LossFn,
        dist_ctx: DistributedContext,
        dims: ParallelDims,
        dtype: torch.dtype | None,
        mesh: DeviceMesh | None,
    ) -> None:
        """Wrap or shard `model` in place.

        `dtype` is None for fp32, `mesh` for engines other than fsdp2.
        """
        self.model = model
        self.dist_ctx = dist_ctx
        self._loss_fn = loss_fn
        # by which it is distributed
        self._dims = dims
        self.options = dims.options
        # Whether FSDP reduces gradients with the last micro-batch only.
        self._reduces_once = not self.options.reduce_every_micro_batch
        self._dtype = dtype
        self._mesh = mesh
        # Number of ranks that work on the same sequences.
        self.model_parallel_size = dims.options.model_parallel_size
        # The full shape of each parameter by its name in `model.named_parameters()`, even where
        # this rank holds only a part.
        self.parameter_shapes = {
            name: parameter.shape for name, parameter in model.named_parameters()
        }
        self._set_phase: Callable[[str], None] = lambda phase: None
        if model.balance is not None:
            model.balance.count_on(dist_ctx.device)
        self.model_with_loss = self._wrap(ModelWithLoss(model, loss_fn))

    def _wrap(self, model_with_loss: nn.Module) -> nn.Module:
        """The module that is called on micro-batches, in the engine's wrapper, if it has one."""
        return model_with_loss

    @property
    def description(self) -> str:
        """A description of the engine and its sharding."""
        if not self.is_sharded:
            return self.engine
        once = ", gradients reduced with the last micro-batch" if self._reduces_once else ""
        return f"{self.engine} {self._dims}{once}" + (
            ", offloaded to the CPU" if self.options.cpu_offload else ""
        )

    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def autocast(self) -> AbstractContextManager[Any]:
        """Mixed precision, around forward passes."""
        if self._dtype is None or self.is_sharded:
            return nullcontext()
        return torch.autocast(self.dist_ctx.device.type, dtype=self._dtype)

    def _step_context(self) -> AbstractContextManager[Any]:
        """Context for all micro-batches of a step: weights that are cast once for all of them."""
        if self._dtype is None or self.is_sharded:
            return nullcontext()
        return working_weights(self.model, self._dtype)

    def micro_batch_context(self, is_last: bool) -> AbstractContextManager[Any]:
        """Context for forward and backward of one micro-batch: decides which gradients are reduced
        with it, and which later.
        """
        return nullcontext()

    def begin_step(
        self, micro_batches: Sequence[Batch], count_items: Callable[[Batch], Tensor]
    ) -> Tensor:
        """The items of the global batch, at least 1, by which its loss is divided: fp32, on the
        device.
        """
        counts = torch.stack([count_items(batch) for batch in micro_batches]).sum()[None]
        balance = self.model.balance
        if balance is not None:
            counts = torch.cat([counts, balance.count(micro_batches)])
        counts = self.dist_ctx.all_reduce_sum(counts) / self.model_parallel_size
        if balance is not None:
            num_rows, num_tokens = counts[1:]
            balance.begin_step(num_rows, num_tokens, self.gradient_divide_factor)
        return counts[0].clamp(min=1.0)

    def end_step(self, optimizer: Optimizer, is_bad: Tensor | None) -> None:
        """End a step, whose update was skipped where `is_bad`, a bool on the device."""
        if self.model.balance is not None:
            self.model.balance.end_step(self.dist_ctx, is_bad)
        self.zero_grad(optimizer)

    def forward_backward(
        self, micro_batches: Sequence[Batch], num_items: Tensor, set_phase: Callable[[str], None]
    ) -> list[Metrics]:
        """Accumulate the gradient of these micro-batches' summed loss, divided by `num_items`.

        Returns the loss's metrics of each micro-batch. `set_phase` is called with the phase that
        begins.
        """
        self._set_phase = set_phase
        all_metrics = []
        with self._step_context():
            for number, batch in enumerate(micro_batches, start=1):
                with self.micro_batch_context(is_last=number == len(micro_batches)):
                    set_phase("forward")
                    with self.autocast():
                        total, metrics = self.model_with_loss(batch)
                    set_phase("backward")
                    (total * (self.gradient_divide_factor / num_items)).backward()
                all_metrics.append(metrics)
        return all_metrics

    def score(self, batch: Batch, score_fn: LossFn) -> Any:
        """The result of `score_fn` for a batch, without gradients.

        Every rank calls it, with its own sequences.
        """
        with self.autocast():
            return self.model_with_loss(batch, score_fn=score_fn)

    def score_tokens(self, batch: Batch, score_fn: LossFn) -> Tensor:
        """The result of a `score_fn` that returns fp32 [sequences, length] of full sequences, on
        every rank.
        """
        values: Tensor = self.score(batch, score_fn)
        return values

    def score_loss(self, batch: Batch, loss_fn: LossFn) -> Metrics:
        """The metrics of a loss, without gradients: the same names on every rank, and sums over
        ranks are correct.
        """
        _, metrics = self.score(batch, loss_fn)
        return metrics

    def zero_grad(self, optimizer: Optimizer) -> None:
        # Gradients in host memory are kept: host memory is not scarce, and allocating them again
        # costs time.
        optimizer.zero_grad(set_to_none=not self.options.cpu_offload)

    def _local_grads(self) -> list[Tensor]:
        return [
            local_tensor(parameter.grad)
            for parameter in self.parameters()
            if parameter.grad is not None
        ]

    def _sum_over_ranks(self, squares: Tensor) -> Tensor:
        """The sum of squared gradient norms [gradients], over the ranks that share one copy of the
        model.
        """
        return squares.sum()

    def _grad_norm(self, gradients: list[Tensor]) -> Tensor:
        """L2 norm of the whole gradient, given this rank's parts: fp32, where they are (with
        cpu_offload on the CPU).
        """
        if not gradients:  # with many ranks one may hold no part of any tensor
            device = torch.device("cpu") if self.options.cpu_offload else self.dist_ctx.device
            return self._sum_over_ranks(torch.zeros(1, device=device)).sqrt()
        on_cpu = gradients[0].device.type == "cpu"
        norms = (
            [*map(_norm_by_rows, gradients)]
            if on_cpu
            else torch._foreach_norm(gradients, 2, dtype=torch.float32)
        )
        return self._sum_over_ranks(torch.stack(norms).square()).sqrt()

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradient down to norm `max_norm` where it is longer (0: never).

        Returns its norm before that.

        The norm is fp32 on the rank's device, the same on every rank. The host does not wait for
        it.
        """
        gradients = self._local_grads()
        norm = self._grad_norm(gradients)
        if max_norm and gradients:
            # Multiplying by 1 costs less than a synchronization with the device to find out whether
            # it is needed.
            torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm.to(self.dist_ctx.device)

    @contextmanager
    def unsharded(self) -> Iterator[LanguageModel]:
        """The model with all its weights on this rank, for decoding.

        Every rank enters and leaves together. In between, ranks may run different numbers of
        forward passes.
        """
        yield self.model

    def state_dict(self, optimizer: Optimizer, named_state: NamedState) -> dict[str, Any]:
        """The content of a checkpoint: {"model": tensors, "optimizer": tensors}, under the model's
        own names; of a mixture that needs the choices of the batch before also {"balance":
        tensors}.

        `named_state(model, optimizer)` returns the optimizer's. To load, fill the tensors in place
        and call `load_state_dict`.
        """
        tensors = {
            "model": dict(named_tensors(self.model)),
            "optimizer": named_state(self.model, optimizer),
        }
        return tensors | self._balance_state()

    def _balance_state(self) -> dict[str, dict[str, Tensor]]:
        balance = self.model.balance
        return (
            {"balance": {"previous": balance.previous}}
            if balance is not None and balance.is_global
            else {}
        )

    def load_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Load a state dict whose tensors were filled."""


def _norm_by_rows(tensor: Tensor) -> Tensor:
    """The L2 norm in fp32: of rows, and then of these.

    On a CPU torch adds up the squares of a whole tensor in few sums, whose rounding (2e-5 of the
    norm of 100,000 numbers) would depend on how the tensor is split over ranks.
    """
    flat = tensor.flatten()
    norm = torch.linalg.vector_norm
    whole = flat.numel() // NORM_ROW * NORM_ROW
    rows = norm(flat[:whole].view(-1, NORM_ROW), dim=1, dtype=torch.float32)
    rest = norm(flat[whole:], dtype=torch.float32)
    return norm(torch.cat([rows, rest[None]]), dtype=torch.float64).float()


@contextmanager
def unsharded_for_decoding(parallel_model: ParallelModel) -> Iterator[LanguageModel]:
    """The model with all its weights on this rank, in its compute dtype.

    All ranks enter and leave together.

    Its blocks are not compiled, since each sequence length would need another graph. Attention is
    compiled where required.
    """
    with parallel_model.unsharded() as model, parallel_model.autocast(), uncompiled_blocks(model):
        yield model
