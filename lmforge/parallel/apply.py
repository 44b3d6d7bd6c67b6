"""One order for everything that is done to a model before it trains: compile its blocks, then spread it over ranks.

Model and objective are wrapped together (`Scored`), so that the head and its loss run inside the wrapped module's
forward, where sharding has gathered the head's weight and DDP sees the whole graph.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lmforge.cluster.ranks import Ranks
from lmforge.errors import Mistake
from lmforge.model.layers import LanguageModel
from lmforge.parallel import ddp, fsdp2

ENGINES = ("alone", "ddp", "fsdp2")


class Scored(nn.Module):
    """A model and what its batches are worth: `forward(batch) -> (sum, metrics)`.

    With `instead`, that is what the batch is given to: evaluation goes through the same hooks as training.
    """

    def __init__(self, model: LanguageModel, loss: Callable[[LanguageModel, Any], tuple[Tensor, Any]]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Any, instead: Callable[[LanguageModel, Any], Any] | None = None) -> Any:
        return (instead or self._loss)(self.model, batch)


@dataclass
class Spread:
    """A model ready to train on this rank.

    `scored` is called on a micro-batch; `model` is the same model for everything else, under its own names.
    """

    engine: str
    model: LanguageModel
    scored: nn.Module
    ranks: Ranks
    autocast_dtype: torch.dtype | None
    keep_gathered: bool

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def autocast(self) -> AbstractContextManager[Any]:
        """Mixed precision for the engines that do not bring their own."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.ranks.device.type, dtype=self.autocast_dtype)

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        """Around the forward and backward of one micro-batch: gradients are exchanged when its engine does so.

        DDP all-reduces with the last micro-batch only. FSDP2 reduce-scatters each, which is what keeps gradients sharded.
        """
        return self.scored.no_sync() if isinstance(self.scored, DistributedDataParallel) and not last else nullcontext()

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """L2 norm of the whole gradient, fp32, the same on every rank; the host does not wait for it."""
        gradients = [_local(parameter.grad) for parameter in self.parameters() if parameter.grad is not None]
        squares = torch.stack(torch._foreach_norm(gradients)).float().square().sum()
        if self.engine == "fsdp2":
            self.ranks.sum_(squares)
        return squares.sqrt()

    @torch.no_grad()
    def clip(self, longest: float) -> Tensor:
        """Shorten the gradient to norm `longest` where it is longer, and return its norm before that."""
        norm = self.gradient_norm()
        if longest:
            gradients = [_local(parameter.grad) for parameter in self.parameters() if parameter.grad is not None]
            # A multiplication by 1 costs less than asking the device whether it is needed.
            torch._foreach_mul_(gradients, (longest / (norm + 1e-6)).clamp(max=1.0))
        return norm

    @contextmanager
    def whole(self) -> Iterator[LanguageModel]:
        """The model with all its weights gathered, for decoding: every rank enters and leaves together, and in between
        forward passes may differ in number from rank to rank."""
        if self.engine == "fsdp2":
            with fsdp2.gathered(self.scored, self.keep_gathered):
                yield self.model
        else:
            yield self.model


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def compile_blocks(model: LanguageModel) -> None:
    """Compile each repeated block in place: one graph serves them all, and the names of tensors stay as they are."""
    for block in model.blocks:
        block.compile(dynamic=False)


def spread(
    model: LanguageModel,
    loss: Callable[[LanguageModel, Any], tuple[Tensor, Any]],
    *,
    engine: str,
    sharding: str = "full-shard",
    ranks: Ranks,
    dtype: torch.dtype,
    compiled: bool,
) -> Spread:
    """Compile and spread `model` (fp32 weights, on the ranks' device) as `engine` says; `auto` chooses by the number of ranks.

    Masters stay fp32. With `dtype` bf16, FSDP2 gathers and computes in bf16 and reduces gradients in fp32; the other
    engines use autocast, whose gradients are fp32 as well.
    """
    if engine == "auto":
        engine = "fsdp2" if ranks.count > 1 else "alone"
    if engine == "alone" and ranks.count > 1:
        raise Mistake(f"parallel.engine = alone: there are {ranks.count} ranks; use fsdp2 or ddp, or start one process")
    if compiled:
        compile_blocks(model)
    scored: nn.Module = Scored(model, loss)
    mixed = dtype if dtype != torch.float32 else None
    if engine == "fsdp2":
        if not dist.is_initialized():
            # Full sharding on one rank is one code path with many; it needs a group, if only of one.
            dist.init_process_group(
                "nccl" if ranks.device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
            )
        fsdp2.shard(scored, model, ranks, dtype, sharding == "grad-shard")
        mixed = None
    elif engine == "ddp":
        if ranks.count == 1:
            raise Mistake("parallel.engine = ddp: there is one rank only; start more with --launch.processes, or use alone")
        scored = ddp.replicate(scored, ranks)
    return Spread(engine, model, scored, ranks, mixed, sharding == "grad-shard")
