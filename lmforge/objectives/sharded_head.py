"""A head that tensor parallel has spread over ranks, and how a loss is put together from what each of them has.

Hidden states come in shared out by sequence: rank r of T has the r-th of T equal parts of each row. A head whose vocabulary
divides is shared out by rows, and each rank scores all tokens against its own part of the vocabulary (Megatron-LM, arXiv
1909.08053, section 3): no rank ever has whole logits. A vocabulary that does not divide leaves the head whole on every
rank, and each scores its own tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


@dataclass(frozen=True)
class VocabShard:
    """Which part of the vocabulary is here: from token `first` on; `group` has the other parts, None if that is all."""

    start: int = 0
    group: dist.ProcessGroup | None = None

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """The highest of all parts' values, in place."""
        if self.group is not None:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values

    def all_reduce_sum(self, *values: Tensor) -> tuple[Tensor, ...]:
        """The sums over all parts, of tensors of one shape."""
        if self.group is None:
            return values
        together = torch.stack(values)
        dist.all_reduce(together, group=self.group)
        return tuple(together.unbind())


UNSHARDED_VOCAB = VocabShard()


@dataclass(frozen=True)
class ShardedHead:
    """A head's weight, the hidden states and targets that this rank scores, and what is done with the sum of losses."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    vocab_shard: VocabShard
    # Where ranks score different tokens of one row.
    sequence_group: dist.ProcessGroup | None = None

    @classmethod
    def from_weight(cls, hidden: Tensor, weight: Tensor, labels: Tensor) -> "ShardedHead":
        """`hidden` [rows, length, width] or, under a spread head, this rank's [rows, length / T, width]; whole targets."""
        if not isinstance(weight, DTensor):
            return cls(hidden, weight, labels, UNSHARDED_VOCAB)
        mesh = weight.device_mesh
        group, (placement,) = mesh.get_group(), weight.placements
        if placement.is_replicate():
            mine = labels.chunk(group.size(), dim=1)[group.rank()]
            return cls(hidden, weight.to_local(grad_placements=[Partial()]), mine, UNSHARDED_VOCAB, group)
        gathered = DTensor.from_local(hidden, mesh, [Shard(1)], run_check=False).redistribute(placements=[Replicate()])
        local = weight.to_local()
        # Each rank's part of the vocabulary contributes to the gradient of every token.
        whole = gathered.to_local(grad_placements=[Partial()])
        return cls(whole, local, labels, VocabShard(group.rank() * local.shape[0], group))

    def sum_over_tokens(self, local_sum: Tensor) -> Tensor:
        """The sum over all tokens of the rows, the same on every rank, from this rank's sum."""
        return local_sum if self.sequence_group is None else _SumOverTokens.apply(local_sum, self.sequence_group)

    def gather_tokens(self, losses: Tensor) -> Tensor:
        """The losses [rows, length] of all tokens, the same on every rank, from those of this rank's."""
        return losses if self.sequence_group is None else _GatherTokens.apply(losses, self.sequence_group)


class _SumOverTokens(torch.autograd.Function):
    """A sum over ranks each of which goes on with the same sum: so its gradient belongs whole to each rank's own part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return upstream[0], None


class _GatherTokens(torch.autograd.Function):
    """What all ranks have, side by side; each goes on with the same, so the gradient of its own part belongs to it whole."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return upstream[0].chunk(ctx.group.size(), dim=1)[ctx.group.rank()], None
