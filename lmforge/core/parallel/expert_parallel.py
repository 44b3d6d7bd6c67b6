"""Expert parallelism: the experts of a mixture are split over ranks, and tokens travel to the ranks
of their experts and back.

The ranks are borrowed from those that shard a copy of the model or split its sequences. FSDP2
shards each expert over the ranks that are left, and sums its gradient over these: with the tokens
that came from the others, those are all tokens of the batch. Nothing
is divided here: each loss was divided by the items of the global batch before its backward pass
(`forward_backward` in parallel_model.py). Two all-to-alls carry the tokens of
each mixture in the forward pass, and two in the backward pass.

How many tokens go where is known to the devices only, and an all-to-all wants it of the host: the
one place in a step where the host waits, once for each mixture and micro-batch. Recomputation and
backward pass use what the forward pass learned.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.distributed.tensor import Shard, distribute_tensor

from lmforge.core.model.layers import LanguageModel
from lmforge.core.model.mixture.experts import Experts, inverse_permutation, permute_rows
from lmforge.core.parallel.parallel_model import full_tensor


def apply_expert_parallel(model: LanguageModel, mesh: DeviceMesh, fsdp_mesh: DeviceMesh) -> None:
    """Split the experts of `model` (on any device, meta too) over the one-dimensional `mesh`, in
    place.
    """
    dispatch = Dispatch(mesh.get_group(), fsdp_mesh)
    for experts in _experts(model):
        experts.dispatch = dispatch
        for module in experts.modules():  # adapters are stacks, too
            for name, parameter in list(module.named_parameters(recurse=False)):
                part = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
                module.register_parameter(
                    name, nn.Parameter(part, requires_grad=parameter.requires_grad)
                )


@contextmanager
def whole_experts(model: LanguageModel) -> Iterator[None]:
    """A context in which every rank has all experts, given that FSDP has gathered its own; ranks may run
    different numbers of forward passes. All ranks enter together.
    """
    dispatched = {experts: experts.dispatch for experts in _experts(model) if experts.dispatch}
    split = {
        module: dict(module.named_parameters(recurse=False))
        for experts in dispatched
        for module in experts.modules()
    }
    for experts in dispatched:
        experts.dispatch = None
    for module, parameters in split.items():
        for name, parameter in parameters.items():
            module._parameters[name] = nn.Parameter(
                full_tensor(parameter.detach()), requires_grad=False
            )
    try:
        yield
    finally:
        for experts, dispatch in dispatched.items():
            experts.dispatch = dispatch
        for module, parameters in split.items():
            module._parameters.update(parameters)


def _experts(model: nn.Module) -> list[Experts]:
    return [module for module in model.modules() if isinstance(module, Experts)]


class Dispatch:
    """Sends rows of tokens to the ranks that have their experts, and what these computed back.

    fsdp_mesh: the ranks that FSDP shards and replicates each rank's experts over.
    """

    def __init__(self, group: dist.ProcessGroup, fsdp_mesh: DeviceMesh) -> None:
        self._group = group
        self.fsdp_mesh = fsdp_mesh

    def __call__(
        self, rows: Tensor, counts: Tensor, compute: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """rows [rows, width], sorted by expert; counts int64 [experts]: how many each of them has,
        of all ranks' experts.

        compute: (rows of this rank's experts, sorted by these; int32 [this rank's experts], where
        those of each end) → as many rows. Returns those for the rows that were given. All ranks of
        the group call it together.
        """
        num_ranks = self._group.size()
        received = exchange_counts(counts, self._group.group_name)
        sent_sizes, received_sizes = sizes_by_rank(counts, received, num_ranks).tolist()
        rows = wait_tensor(all_to_all_single(rows, received_sizes, sent_sizes, self._group))
        # From rank after rank, expert after expert, they are sorted by expert.
        by_rank = received.view(num_ranks, -1)
        experts = torch.arange(by_rank.shape[1], device=rows.device).repeat(num_ranks)
        order = experts.repeat_interleave(received, output_size=len(rows)).argsort(stable=True)
        inverse = inverse_permutation(order)
        out = compute(permute_rows(rows, order, inverse), by_rank.sum(0).cumsum(0).int())
        out = permute_rows(out, inverse, order)
        return wait_tensor(all_to_all_single(out, sent_sizes, received_sizes, self._group))


@torch.library.custom_op("lmforge::exchange_counts", mutates_args=())
def exchange_counts(counts: Tensor, group_name: str) -> Tensor:
    """How many rows this rank gets, by the rank that sends them: int64 [ranks · experts of a rank],
    from what it sends itself.

    An operator, as is `sizes_by_rank`, so that activation checkpointing keeps what it returned.
    """
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=_resolve_process_group(GroupName(group_name)))
    return received


@torch.library.custom_op("lmforge::sizes_by_rank", mutates_args=())
def sizes_by_rank(sent: Tensor, received: Tensor, num_ranks: int) -> Tensor:
    """int64 [2, ranks] on the host: the rows that go to each rank, and those that come from it.

    The host waits for it.
    """
    return torch.stack([sent, received]).view(2, num_ranks, -1).sum(2).cpu()
