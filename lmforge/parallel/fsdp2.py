"""Fully sharded data parallel through `fully_shard`: each rank keeps a part of parameters, gradients and optimizer states.

Units: the embedding, each block, the head, and a root with what is left (the last norm). An embedding tied to the head
is used at both ends of the forward pass, so it stays in the root, which is gathered once.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lmforge.cluster.distributed import DistributedContext
from lmforge.model.layers import LanguageModel, LMHead
from lmforge.parallel.dims import ParallelDims
from lmforge.parallel.parallel_model import ParallelModel


class FSDP2Model(ParallelModel):
    """FSDP2. Gradients are sums over ranks: the loss is already divided by the weight of the global batch."""

    engine = "fsdp2"

    def __init__(
        self,
        model_with_loss: nn.Module,
        model: LanguageModel,
        dist_ctx: DistributedContext,
        dims: ParallelDims,
        mesh: DeviceMesh,
        *,
        dtype: torch.dtype,
        cpu_offload: bool = False,
        wrap_embedding: bool = True,
        prefetch_blocks: int = 0,
        reduce_every_micro_batch: bool = True,
    ) -> None:
        """Shard `model` in place, on any device (meta too); `scored` becomes the root.

        offload: parameters, gradients and optimizer states at rest in host memory
        prefetch: how many units are gathered ahead of the one that computes, forward and backward; 0 leaves it to torch
        reduce_every_micro_batch: reduce-scatter each micro-batch's gradients, which keeps them sharded, or only the last's
        """
        super().__init__(model_with_loss, model, dist_ctx, None)
        self._dims = dims
        self._cpu_offload = cpu_offload
        self._reduce_every_micro_batch = reduce_every_micro_batch
        self._mesh = dims.fsdp_mesh(mesh)
        # Nothing is cast where everything is computed in fp32, so masters in bf16 are computed with as they are.
        self._hidden_dtype = next(model.parameters()).dtype if dtype == torch.float32 else dtype
        self._replication: Tensor | None = None
        self._splits_model = dims.tensor_parallel_degree * dims.pipeline_parallel_degree > 1
        self.batch_copies = dims.tensor_parallel_degree * dims.context_parallel_degree
        on_gpu = dist_ctx.device.type == "cuda"
        about: dict[str, Any] = {
            "mesh": self._mesh,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
            ),
            "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu) if cpu_offload else OffloadPolicy(),
        }
        self._apply_fsdp(model_with_loss, model, wrap_embedding, about)
        for unit in self._fsdp_modules():
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        if prefetch_blocks:
            self._set_prefetch(prefetch_blocks)

    @property
    def description(self) -> str:
        return f"{self.engine} {self._dims}" + (", offloaded" if self._cpu_offload else "")

    def _apply_fsdp(
        self, model_with_loss: nn.Module, model: LanguageModel, wrap_embedding: bool, fsdp_kwargs: dict[str, Any]
    ) -> None:
        tied = model.lm_head.weight is model.embeddings[0].weight
        embeddings = model.embeddings if wrap_embedding and not tied else []
        self._shard_modules(model_with_loss, model.blocks, embeddings, [] if tied else [model.lm_head], fsdp_kwargs)

    def _shard_modules(
        self,
        root: nn.Module,
        blocks: Iterable[nn.Module],
        embeddings: Iterable[nn.Module],
        heads: Iterable[nn.Module],
        fsdp_kwargs: dict[str, Any],
    ) -> None:
        keep = self._dims.keep_unsharded
        for block in (*blocks, *embeddings):
            fully_shard(block, reshard_after_forward=not keep, **fsdp_kwargs)
        for head in heads:
            # The head is needed again as soon as the backward pass begins.
            fully_shard(head, reshard_after_forward=False, **fsdp_kwargs)
        fully_shard(root, **fsdp_kwargs)

    def _fsdp_modules(self) -> list[FSDPModule]:
        return [module for module in self.model_with_loss.modules() if isinstance(module, FSDPModule)]

    def _root(self) -> FSDPModule:
        assert isinstance(self.model_with_loss, FSDPModule)
        return self.model_with_loss

    def _set_prefetch(self, num_blocks: int) -> None:
        blocks = [block for block in self.model.blocks if isinstance(block, FSDPModule)]
        for number, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(list(blocks[number + 1 : number + 1 + num_blocks]))
            block.set_modules_to_backward_prefetch(list(reversed(blocks[max(0, number - num_blocks) : number])))

    def micro_batch_context(self, is_last: bool) -> AbstractContextManager[Any]:
        # Copies of the model sum their gradients once a step, whatever is exchanged within a copy.
        self._root().set_requires_all_reduce(is_last)
        if not self._reduce_every_micro_batch:
            self._root().set_requires_gradient_sync(is_last)
        return nullcontext()

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        # In host memory gradients cost nothing that is scarce, and allocating them anew costs time.
        optimizer.zero_grad(set_to_none=not self._cpu_offload)

    def _divide_by_replication(self, squares: Tensor) -> Tensor:
        if not self._splits_model:
            return squares
        # A tensor may be split over fewer ranks than another: each part counts once, however many ranks have it.
        if self._replication is None:
            copies = [_replication_count(parameter) for parameter in self.parameters() if parameter.grad is not None]
            self._replication = torch.tensor(
                copies, device=squares.device
            )  # in host memory, where gradients are offloaded to it
        return squares / self._replication

    def _all_reduce_over_shards(self, squares: Tensor) -> None:
        if self._splits_model:
            dist.all_reduce(squares)
        elif self._dims.fsdp_degree > 1:
            dist.all_reduce(squares, group=self._mesh.get_group(-1))

    def state_dict(
        self, optimizer: torch.optim.Optimizer, named_state: Callable[..., dict[str, dict[str, Tensor]]]
    ) -> dict[str, Any]:
        # A forward pass without a backward, as in validation, leaves units gathered: their tensors are not the masters then.
        for unit in self._fsdp_modules():
            unit.reshard()
        return super().state_dict(optimizer, named_state)

    @contextmanager
    def unsharded(self) -> Iterator[LanguageModel]:
        units, context = self._fsdp_modules(), self.model.context_parallel
        self.model.context_parallel = None  # each decodes whole rows
        # Before its first forward the root does not know its units, and one that ran by itself would take itself for a root.
        self._root()._get_fsdp_state()._lazy_init()
        for unit in units:
            unit.unshard()
            unit.set_reshard_after_forward(False, recurse=False)
        try:
            yield self.model
        finally:
            self.model.context_parallel = context
            # Torch remembers which units ran, for the next backward pass to gather ahead; a rank that ran none here would
            # gather another one than its peers, and all would wait for ever.
            ran = self._root()._get_fsdp_state()._comm_ctx.post_forward_order
            for unit_that_ran in ran:
                unit_that_ran._post_forward_indices.clear()
            ran.clear()
            for unit in units:
                unit.reshard()
                # The root and the head are never freed between forward and backward.
                always = unit is self.model_with_loss or isinstance(unit, LMHead)
                unit.set_reshard_after_forward(not (always or self._dims.keep_unsharded), recurse=False)


def _replication_count(parameter: Tensor) -> int:
    """How many ranks have the same part of a parameter."""
    assert isinstance(parameter, DTensor)
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement.is_replicate())
