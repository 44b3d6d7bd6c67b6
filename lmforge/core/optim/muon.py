"""Muon (orthogonalized momentum) for the hidden matrices and AdamW for all other parameters, in one
optimizer.

Where matrices are sharded by rows, each matrix is gathered on one rank of the shard group,
orthogonalized and scattered again. Ranks divide the work, and each holds only some full matrices at
a time. Momentum stays sharded.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lmforge.core.model.quantization.blocks import pack_rows, unpack_rows
from lmforge.core.optim.adamw import AdamW, assign_unless
from lmforge.core.optim.optimizer import STATE_DTYPES, common_numbers
from lmforge.core.optim.stored import StochasticBF16
from lmforge.core.options.sections import OptimizerOptions
from lmforge.core.parallel.parallel_model import local_tensor
from lmforge.core.parallel.precision import has_native_bf16

# x → a·x + b·x³ + c·x⁵ on the singular values, five times: chosen by Keller Jordan for its slope at
# zero. It does not converge to 1, but brings all values that are not tiny to between 0.7 and 1.2,
# which works as well.
NS_A = 3.4445
NS_B = -4.7750
NS_C = 2.0315
NS_STEPS = 5
# The number of elements of a rank's shards that are sent at once, but at least one matrix per rank.
# It limits the memory of copies.
MAX_BATCH_NUMEL = 2**25


class Muon(AdamW):
    """Muon for the groups that have `orthogonal` true, AdamW for the others.

    Parameters are fp32 or bf16, plain or DTensor.

    Momentum as in https://kellerjordan.github.io/posts/muon with Nesterov's look ahead. An update
    is scaled by 0.2·√max(rows, columns), so that its size matches AdamW's usual updates, and lr and
    weight_decay have the same meaning (arXiv 2502.16982). DTensors are sharded by rows on one
    dimension of their mesh, stacks of experts by expert too; replicas repeat the work.
    """

    def __init__(
        self, params: Iterable[dict[str, Any]], *, momentum: float = 0.95, **adamw_kwargs: Any
    ) -> None:
        super().__init__(params, momentum=momentum, orthogonal=False, **adamw_kwargs)

    def get_or_init_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        if not group["orthogonal"]:
            return super().get_or_init_state(parameter, group)
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = self.zero_state(parameter, group)
            if parameter in self.rounding_keys:
                state["step"] = torch.zeros((), device=parameter.device)
        return state

    def update_group(self, parameters: list[Tensor], group: dict[str, Any], skip: Tensor) -> None:
        if not group["orthogonal"]:
            super().update_group(parameters, group, skip)
            return
        for shard_group, matrices in _group_by_mesh(parameters):
            for batch in _batch_matrices(
                matrices, 1 if shard_group is None else shard_group.size()
            ):
                self._update_matrices(batch, group, shard_group, skip)

    def _update_matrices(
        self,
        matrices: list[Tensor],
        group: dict[str, Any],
        shard_group: dist.ProcessGroup | None,
        skip: Tensor,
    ) -> None:
        weights = [local_tensor(matrix) for matrix in matrices]
        gradients = [
            local_tensor(matrix.grad).float() for matrix in matrices if matrix.grad is not None
        ]
        states = [self.get_or_init_state(matrix, group) for matrix in matrices]
        stored = [local_tensor(state["momentum_buffer"]) for state in states]
        before = [momentum.float() for momentum in stored]
        if in_8bit := stored[0].dtype == torch.uint8:
            before = [
                unpack_rows(each, matrix.shape[-1], "int8")
                for each, matrix in zip(stored, matrices, strict=True)
            ]
        new_momenta = momenta = [*torch._foreach_lerp(before, gradients, 1 - group["momentum"])]
        sizes = [matrix.shape[-2:] for matrix in matrices]
        values = weights
        if shard_group is not None:  # of stacks of experts each matrix is exchanged by itself
            sizes = [
                size for size, value in zip(sizes, values, strict=True) for _ in _unstacked([value])
            ]
            values = _unstacked(values)
            gradients = _unstacked(gradients)
            momenta = _unstacked(momenta)
        dtype = _compute_dtype(values[0].device)
        ahead = [
            update.to(dtype)
            for update in torch._foreach_lerp(gradients, momenta, group["momentum"])
        ]
        if shard_group is None:
            updates = _orthogonalize_by_shape(ahead)
        else:
            updates = _orthogonalize_sharded(ahead, [rows for rows, _ in sizes], shard_group)
        if self.rounding_keys:
            values = [value.float() for value in values]
        decayed = torch._foreach_mul(values, 1 - group["lr"] * group["weight_decay"])
        for size, value, update in zip(sizes, decayed, updates, strict=True):
            value.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(size)))
        assign_unless(
            skip,
            stored,
            [pack_rows(each, "int8") for each in new_momenta] if in_8bit else new_momenta,
        )
        if not self.rounding_keys:
            assign_unless(skip, values, decayed)
            return
        several = iter(decayed)
        for matrix, weight, state in zip(matrices, weights, states, strict=True):
            is_parted = shard_group is not None and weight.ndim == 3
            new = torch.stack([next(several) for _ in weight]) if is_parted else next(several)
            new = torch.where(skip, weight.float(), new)
            StochasticBF16.of(matrix, self.rounding_keys[matrix], state["step"]).store(
                new.view(-1), skip
            )
            state["step"] += (~skip).float()


def orthogonalize(matrices: Tensor) -> Tensor:
    """Approximately the nearest orthogonal matrices, [count, rows, columns], computed in the
    input's dtype, which may be any float dtype.

    Newton–Schulz iteration: U·S·Vᵀ → U·S'·Vᵀ with S' near 1. Zero stays zero.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    # The smaller of the two possible products.
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(NS_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=NS_B, alpha=NS_C), x, beta=NS_A)
    return x.mT if tall else x


def _unstacked(tensors: list[Tensor]) -> list[Tensor]:
    """The matrices of stacks, as views, and the matrices that are none."""
    return [matrix for each in tensors for matrix in (each.unbind() if each.ndim == 3 else [each])]


def _orthogonalize_by_shape(matrices: list[Tensor]) -> list[Tensor]:
    """Matrices of one shape are processed together, since a small one does not fill a GPU."""
    updates = list(matrices)
    for shape in dict.fromkeys(matrix.shape for matrix in matrices):
        indices = [index for index, matrix in enumerate(matrices) if matrix.shape == shape]
        stacked = torch.stack([matrices[index] for index in indices])
        for index, update in zip(
            indices, orthogonalize(stacked.flatten(0, -3)).view_as(stacked), strict=True
        ):
            updates[index] = update
    return updates


def _orthogonalize_sharded(
    shards: list[Tensor], num_rows: list[int], group: dist.ProcessGroup
) -> list[Tensor]:
    """This rank's rows of the orthogonalized matrices, from its rows of the inputs; `num_rows` are
    those of each full matrix.

    Matrix i belongs to rank i modulo the size of `group`. All sizes follow from the shapes, so they
    are neither communicated between ranks nor copied from device to host.
    """
    ranks = range(group.size())
    rank = group.rank()
    sent_sizes = [[shard.numel() for shard in shards[each :: len(ranks)]] for each in ranks]
    shard_rows = [_shard_num_rows(rows, len(ranks)) for rows in num_rows[rank :: len(ranks)]]
    columns = [shard.shape[1] for shard in shards[rank :: len(ranks)]]
    received_sizes = [
        [rows[each] * width for rows, width in zip(shard_rows, columns, strict=True)]
        for each in ranks
    ]

    sent = torch.cat([shard.reshape(-1) for each in ranks for shard in shards[each :: len(ranks)]])
    received = _all_to_all(sent, sent_sizes, received_sizes, group)
    full = [
        torch.cat(parts).view(-1, width)
        for parts, width in zip(zip(*received, strict=True), columns, strict=True)
    ]
    updates = [
        matrix.split(rows)
        for matrix, rows in zip(_orthogonalize_by_shape(full), shard_rows, strict=True)
    ]
    returned = torch.cat(
        [sent.new_empty(0), *(parts[each].reshape(-1) for each in ranks for parts in updates)]
    )
    local = _all_to_all(returned, received_sizes, sent_sizes, group)

    ordered = list(shards)
    for each in ranks:
        ordered[each :: len(ranks)] = local[each]
    return [update.view_as(shard) for update, shard in zip(ordered, shards, strict=True)]


def _all_to_all(
    sent: Tensor,
    sent_sizes: list[list[int]],
    received_sizes: list[list[int]],
    group: dist.ProcessGroup,
) -> list[tuple[Tensor, ...]]:
    """Send every rank its part of `sent`.

    Returns the tensors received from each rank. Sizes are by rank, then by tensor.
    """
    received = sent.new_empty(sum(map(sum, received_sizes)))
    totals = [sum(sizes) for sizes in received_sizes]
    dist.all_to_all_single(
        received, sent, totals, [sum(sizes) for sizes in sent_sizes], group=group
    )
    return [
        part.split(sizes)
        for part, sizes in zip(received.split(totals), received_sizes, strict=True)
    ]


def _shard_num_rows(num_rows: int, group_size: int) -> list[int]:
    """The number of rows of each rank, as DTensor shards them: equal parts except for the last
    ranks.
    """
    part = -(-num_rows // group_size)
    return [max(0, min(part, num_rows - rank * part)) for rank in range(group_size)]


def _group_by_mesh(parameters: list[Tensor]) -> list[tuple[dist.ProcessGroup | None, list[Tensor]]]:
    """Parameters with the group of ranks that each is sharded over, None for those that this rank
    holds in full.
    """
    groups: dict[str, tuple[dist.ProcessGroup | None, list[Tensor]]] = {}
    for parameter in parameters:
        group = _shard_group(parameter) if isinstance(parameter, DTensor) else None
        groups.setdefault("" if group is None else group.group_name, (group, []))[1].append(
            parameter
        )
    return list(groups.values())


def _shard_group(parameter: DTensor) -> dist.ProcessGroup | None:
    """The ranks that have rows of the same matrices.

    A stack that is sharded by expert has whole ones on each rank.
    """
    rows = parameter.ndim - 2
    for dim, placement in enumerate(parameter.placements):
        if placement.is_shard(rows) and parameter.device_mesh.size(dim) > 1:
            return parameter.device_mesh.get_group(dim)
        assert (
            placement.is_replicate()
            or placement.is_shard(rows)
            or getattr(placement, "dim", None) == 0
        ), placement
    return None


def _batch_matrices(matrices: list[Tensor], group_size: int) -> Iterator[list[Tensor]]:
    """Matrices to exchange at once.

    Adjacent ones have the same shape, so that ranks have equal work.
    """
    batch: list[Tensor] = []
    for matrix in sorted(matrices, key=lambda matrix: tuple(matrix.shape), reverse=True):
        if (
            len(batch) % group_size == 0
            and sum(each.numel() for each in batch) > MAX_BATCH_NUMEL * group_size
        ):
            yield batch
            batch = []
        batch.append(matrix)
    if batch:
        yield batch


def _compute_dtype(device: torch.device) -> torch.dtype:
    # Five iterations tolerate the rounding of bf16. On a CPU with bf16 support it gains little, and
    # without support it is much slower.
    return torch.bfloat16 if device.type == "cuda" and has_native_bf16(device) else torch.float32


def build_muon(
    groups: list[dict[str, Any]], options: OptimizerOptions, own: None = None
) -> torch.optim.Optimizer:
    dtype = STATE_DTYPES[options.state_dtype]
    return Muon(groups, state_dtype=dtype, **common_numbers(options))
