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

from lmforge.cluster.ranks import Ranks
from lmforge.model.layers import Head, LanguageModel
from lmforge.parallel.engine import Spread
from lmforge.parallel.mesh import Sharding


class FullySharded(Spread):
    """FSDP2. Gradients are sums over ranks: the loss is already divided by the weight of the global batch."""

    engine = "fsdp2"

    def __init__(
        self,
        scored: nn.Module,
        model: LanguageModel,
        ranks: Ranks,
        sharding: Sharding,
        mesh: DeviceMesh,
        *,
        dtype: torch.dtype,
        offload: bool = False,
        embedding_unit: bool = True,
        prefetch: int = 0,
        reduce_every_micro_batch: bool = True,
    ) -> None:
        """Shard `model` in place, on any device (meta too); `scored` becomes the root.

        offload: parameters, gradients and optimizer states at rest in host memory
        prefetch: how many units are gathered ahead of the one that computes, forward and backward; 0 leaves it to torch
        reduce_every_micro_batch: reduce-scatter each micro-batch's gradients, which keeps them sharded, or only the last's
        """
        super().__init__(scored, model, ranks, None)
        self._sharding = sharding
        self._offload = offload
        self._reduce_every_micro_batch = reduce_every_micro_batch
        self._mesh = sharding.fsdp_mesh(mesh)
        # Nothing is cast where everything is computed in fp32, so masters in bf16 are computed with as they are.
        self._hidden_dtype = next(model.parameters()).dtype if dtype == torch.float32 else dtype
        self._copies: Tensor | None = None
        self._splits_model = sharding.tensor * sharding.pipeline > 1
        self.batch_copies = sharding.tensor * sharding.context
        on_gpu = ranks.device.type == "cuda"
        about: dict[str, Any] = {
            "mesh": self._mesh,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
            ),
            "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu) if offload else OffloadPolicy(),
        }
        self._wrap(scored, model, embedding_unit, about)
        for unit in self._units():
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        if prefetch:
            self._prefetch(prefetch)

    @property
    def name(self) -> str:
        return f"{self.engine} {self._sharding}" + (", offloaded" if self._offload else "")

    def _wrap(self, scored: nn.Module, model: LanguageModel, embedding_unit: bool, about: dict[str, Any]) -> None:
        tied = model.lm_head.weight is model.embeddings[0].weight
        embeddings = model.embeddings if embedding_unit and not tied else []
        self._wrap_units(scored, model.blocks, embeddings, [] if tied else [model.lm_head], about)

    def _wrap_units(
        self,
        root: nn.Module,
        blocks: Iterable[nn.Module],
        embeddings: Iterable[nn.Module],
        heads: Iterable[nn.Module],
        about: dict[str, Any],
    ) -> None:
        keep = self._sharding.keep_gathered
        for block in (*blocks, *embeddings):
            fully_shard(block, reshard_after_forward=not keep, **about)
        for head in heads:
            # The head is needed again as soon as the backward pass begins.
            fully_shard(head, reshard_after_forward=False, **about)
        fully_shard(root, **about)

    def _units(self) -> list[FSDPModule]:
        return [module for module in self.scored.modules() if isinstance(module, FSDPModule)]

    def _root(self) -> FSDPModule:
        assert isinstance(self.scored, FSDPModule)
        return self.scored

    def _prefetch(self, units: int) -> None:
        blocks = [block for block in self.model.blocks if isinstance(block, FSDPModule)]
        for number, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(list(blocks[number + 1 : number + 1 + units]))
            block.set_modules_to_backward_prefetch(list(reversed(blocks[max(0, number - units) : number])))

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        # Copies of the model sum their gradients once a step, whatever is exchanged within a copy.
        self._root().set_requires_all_reduce(last)
        if not self._reduce_every_micro_batch:
            self._root().set_requires_gradient_sync(last)
        return nullcontext()

    def zero_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        # In host memory gradients cost nothing that is scarce, and allocating them anew costs time.
        optimizer.zero_grad(set_to_none=not self._offload)

    def _counted_once(self, squares: Tensor) -> Tensor:
        if not self._splits_model:
            return squares
        # A tensor may be split over fewer ranks than another: each part counts once, however many ranks have it.
        if self._copies is None:
            copies = [_copies(parameter) for parameter in self.parameters() if parameter.grad is not None]
            self._copies = torch.tensor(copies, device=squares.device)  # in host memory, where gradients are offloaded to it
        return squares / self._copies

    def _sum_over_shards(self, squares: Tensor) -> None:
        if self._splits_model:
            dist.all_reduce(squares)
        elif self._sharding.shards > 1:
            dist.all_reduce(squares, group=self._mesh.get_group(-1))

    def state(self, optimizer: torch.optim.Optimizer, by_name: Callable[..., dict[str, dict[str, Tensor]]]) -> dict[str, Any]:
        # A forward pass without a backward, as in validation, leaves units gathered: their tensors are not the masters then.
        for unit in self._units():
            unit.reshard()
        return super().state(optimizer, by_name)

    @contextmanager
    def whole(self) -> Iterator[LanguageModel]:
        units, context = self._units(), self.model.context
        self.model.context = None  # each decodes whole rows
        # Before its first forward the root does not know its units, and one that ran by itself would take itself for a root.
        self._root()._get_fsdp_state()._lazy_init()
        for unit in units:
            unit.unshard()
            unit.set_reshard_after_forward(False, recurse=False)
        try:
            yield self.model
        finally:
            self.model.context = context
            # Torch remembers which units ran, for the next backward pass to gather ahead; a rank that ran none here would
            # gather another one than its peers, and all would wait for ever.
            ran = self._root()._get_fsdp_state()._comm_ctx.post_forward_order
            for unit_that_ran in ran:
                unit_that_ran._post_forward_indices.clear()
            ran.clear()
            for unit in units:
                unit.reshard()
                # The root and the head are never freed between forward and backward.
                always = unit is self.scored or isinstance(unit, Head)
                unit.set_reshard_after_forward(not (always or self._sharding.keep_gathered), recurse=False)


def _copies(parameter: Tensor) -> int:
    """How many ranks have the same part of a parameter."""
    assert isinstance(parameter, DTensor)
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement.is_replicate())
