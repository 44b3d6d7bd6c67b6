"""FSDP2, `fully_shard`: each rank keeps a part of parameters, gradients and optimizer states.

Units: the embedding, each block, the head, the routers of mixtures in bf16, and a root with the
rest (the last norm). An embedding that is tied to the head is used at both ends of the forward
pass, so it stays in the root, which is gathered once.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from lmforge.core.distributed.memory import check_fits
from lmforge.core.model.layers import LanguageModel, LMHead
from lmforge.core.model.mixture.experts import Experts, Router
from lmforge.core.model.quantization.formats import quantized_matrices
from lmforge.core.parallel.expert_parallel import Dispatch, whole_experts
from lmforge.core.parallel.parallel_model import NamedState, ParallelModel, local_tensor


class FSDP2Model(ParallelModel):
    """FSDP2.

    Gradients are summed over ranks: the loss is already divided by the items of the global batch.
    """

    engine = "fsdp2"
    is_sharded = True

    def _wrap(self, model_with_loss: nn.Module) -> nn.Module:
        """Shard the model in place, on any device (meta too); `model_with_loss` becomes the
        root.
        """
        assert self._mesh is not None
        self._fsdp_mesh = self._dims.fsdp_mesh(self._mesh)
        # Without a dtype nothing is cast, so that bf16 master weights compute in bf16. Quantized
        # matrices are bytes.
        dtypes = (
            parameter.dtype
            for parameter in self.model.parameters()
            if parameter.is_floating_point()
        )
        self._hidden_dtype = self._dtype or next(dtypes)
        self._replication: Tensor | None = None
        pin_memory = self.dist_ctx.device.type == "cuda"
        self._fully_shard = partial(
            fully_shard,
            mesh=self._fsdp_mesh,
            mp_policy=MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=torch.float32),
            offload_policy=CPUOffloadPolicy(pin_memory=pin_memory)
            if self.options.cpu_offload
            else OffloadPolicy(),
        )
        self._apply_fsdp(model_with_loss)
        self._root = cast(FSDPModule, model_with_loss)
        self._units = [
            module for module in model_with_loss.modules() if isinstance(module, FSDPModule)
        ]
        for unit in self._units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        if self.options.prefetch_blocks:
            self._set_prefetch(self.options.prefetch_blocks)
        return model_with_loss

    def _apply_fsdp(self, root: nn.Module) -> None:
        model = self.model
        is_tied = model.lm_head.weight is model.embeddings[0].weight
        embeddings, heads = ([], []) if is_tied else (model.embeddings, [model.lm_head])
        self._shard_modules(root, model.blocks, embeddings, heads)

    def _shard_modules(
        self,
        root: nn.Module,
        blocks: nn.ModuleList,
        embeddings: Iterable[nn.Module],
        heads: Iterable[nn.Module],
    ) -> None:
        self._in_fp32 = self._shard_routers(root, blocks)
        # What stays gathered between a forward and its backward pass would stay for good in a model
        # that is only scored with.
        self._is_frozen = not any(parameter.requires_grad for parameter in root.parameters())
        for block in blocks:
            experts = [
                each
                for each in block.modules()
                if isinstance(each, Experts) and isinstance(each.dispatch, Dispatch)
            ]
            # With expert parallelism they are sharded over fewer ranks than the block.
            for each in experts:
                self._shard_block(each, cast(Dispatch, each.dispatch).fsdp_mesh)
            self._shard_block(block, self._fsdp_mesh)
            for each in experts:
                block.register_forward_hook(partial(_gather_before_recomputation, each))
        for embedding in embeddings if self.options.wrap_embedding else ():
            self._shard_block(embedding, self._fsdp_mesh)
        for head in heads:
            # The backward pass begins with the head.
            self._fully_shard(head, reshard_after_forward=self._is_frozen)
        self._fully_shard(root, reshard_after_forward=self._is_frozen)
        if self._in_fp32:
            root.register_forward_pre_hook(lambda *_: cast(nn.Module, root.routers)())

    def _shard_routers(self, root: nn.Module, blocks: nn.ModuleList) -> set[nn.Parameter]:
        """Shard the routers of mixtures, which compute in fp32, where other units gather in another
        dtype. Returns what they have.

        As a unit in each block their hooks would break its graph. So all are one without hooks in
        blocks: it is gathered before the forward pass, and reduced at the end of the backward pass
        with what is left.
        """
        routers = _Routers(
            each for block in blocks for each in block.modules() if isinstance(each, Router)
        )
        if all(self._dtype in (None, parameter.dtype) for parameter in routers.parameters()):
            return set()
        root.add_module("routers", routers)
        self._fully_shard(routers, mp_policy=MixedPrecisionPolicy(), reshard_after_forward=False)
        return set(routers.parameters())

    def _shard_block(self, module: nn.Module, mesh: DeviceMesh) -> None:
        placement = partial(_placement, num_ranks=mesh.size(-1))
        reshard = self._dims.reshard_after_forward or self._is_frozen
        self._fully_shard(
            module,
            mesh=mesh,
            shard_placement_fn=placement,
            reshard_after_forward=reshard,
            ignored_params=self._in_fp32,
        )

    def _set_prefetch(self, num_blocks: int) -> None:
        blocks: list[FSDPModule] = [
            block for block in self.model.blocks if isinstance(block, FSDPModule)
        ]
        for number, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 1 + num_blocks])
            block.set_modules_to_backward_prefetch(
                blocks[max(0, number - num_blocks) : number][::-1]
            )

    def micro_batch_context(self, is_last: bool) -> AbstractContextManager[Any]:
        # Replicas of the model reduce gradients once per step, even if they are reduced more often
        # within a replica.
        self._root.set_requires_all_reduce(is_last)
        if self._reduces_once:
            self._root.set_requires_gradient_sync(is_last)
        if not self._dims.reshard_after_forward:
            # Weights that stay gathered between forward and backward stay so until the last
            # backward pass: one gather and one cast per step.
            self._root.set_reshard_after_backward(is_last)
        return nullcontext()

    def _sum_over_ranks(self, squares: Tensor) -> Tensor:
        if self.options.splits_model or self.options.expert_parallel_degree > 1:
            # Tensors may be split over different numbers of ranks. Each part counts once, even if
            # several ranks hold it.
            if self._replication is None:
                counts = [
                    _replication_count(parameter)
                    for parameter in self.parameters()
                    if parameter.grad is not None
                ]
                # On the CPU with cpu_offload.
                self._replication = torch.tensor(counts, device=squares.device)
            total = (squares / self._replication).sum()
            dist.all_reduce(total)
            return total
        total = squares.sum()
        if self._dims.fsdp_degree > 1:
            dist.all_reduce(total, group=self._fsdp_mesh.get_group(-1))
        return total

    def state_dict(self, optimizer: Optimizer, named_state: NamedState) -> dict[str, Any]:
        # A forward pass without a backward pass, as in validation, leaves units gathered: then
        # their tensors are not the master weights.
        for unit in self._units:
            unit.reshard()
        return super().state_dict(optimizer, named_state)

    @contextmanager
    def unsharded(self) -> Iterator[LanguageModel]:
        with self.dist_ctx.raise_on_all():
            self._check_unsharded_fits()
        setup = self.model.setup
        # Each rank decodes whole sequences.
        self.model.setup = replace(setup, context_parallel=None)
        # Initializes the root, as its first forward pass would: before that, a unit that ran alone
        # would become a root.
        self._root._get_fsdp_state()._lazy_init()  # private to torch; checked with 2.13.0
        # Gathered once here, instead of for each token.
        for unit in self._units:
            unit.unshard()
            unit.set_reshard_after_forward(False, recurse=False)
        try:
            with whole_experts(self.model):
                yield self.model
        finally:
            self.model.setup = setup
            _forget_forward_order(self._root)
            for unit in self._units:
                unit.reshard()
                # The root and the head always stay gathered between forward and backward.
                stays = unit is self.model_with_loss or isinstance(unit, LMHead)
                unit.set_reshard_after_forward(
                    self._dims.reshard_after_forward and not stays, recurse=False
                )

    def _check_unsharded_fits(self) -> None:
        for unit in self._units:
            unit.reshard()  # a forward pass without a backward pass leaves units gathered
        quantized = quantized_matrices(self.model)
        size = self._hidden_dtype.itemsize
        required = sum(
            math.prod(shape) * (name in quantized or size)
            for name, shape in self.parameter_shapes.items()
        )
        what = "the whole model on each rank, to generate with it"
        way = "generate from its checkpoints, or train a smaller one"
        check_fits(
            required,
            self.dist_ctx.device,
            what,
            way,
            num_ranks=self.dist_ctx.rank_info.local_world_size,
        )


class _Routers(nn.ModuleList):
    """The routers of all blocks as one unit of FSDP; a call only runs its hooks, which gather."""

    def forward(self) -> None: ...


def _forget_forward_order(root: FSDPModule) -> None:
    """Forget which units ran, which torch records to prefetch in the next backward pass.

    Ranks that ran different numbers of forward passes would prefetch different units, and deadlock.
    Private to torch; checked with 2.13.0.
    """
    order = root._get_fsdp_state()._comm_ctx.post_forward_order
    for param_group in order:
        param_group._post_forward_indices.clear()
    order.clear()


@torch.compiler.disable
def _gather_before_recomputation(
    experts: Experts, block: nn.Module, args: Any, output: Tensor
) -> None:
    """Let the experts' unit begin its backward pass with that of their block.

    Else that may begin inside of a recomputation, which then gathers the weights, frees them, and
    has operators that the forward pass had not.

    Private to torch; checked with 2.13.0.
    """
    if output.requires_grad:
        output.register_hook(cast(FSDPModule, experts)._get_fsdp_state()._pre_backward)


def _placement(parameter: nn.Parameter, num_ranks: int) -> Shard | None:
    """How stacked experts are sharded: where the ranks do not divide their number, as with more
    ranks than experts, by the rows of each one, if those divide. None for any other parameter.
    """
    if parameter.ndim != 3:
        return None
    experts, rows, _ = local_tensor(parameter).shape
    return Shard(1 if experts % num_ranks and rows % num_ranks == 0 else 0)


def _replication_count(parameter: Tensor) -> int:
    """How many ranks hold the same part of a parameter."""
    assert isinstance(parameter, DTensor)
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement.is_replicate())
