"""An output head that tensor parallel shards over ranks, and how the ranks' results become one
loss.

Hidden states come sharded by sequence: rank r of T holds the r-th of T equal parts of each
sequence. If T divides the vocabulary, the head's weight is sharded over it, and each rank scores
all tokens against its part of the vocabulary (Megatron-LM, arXiv 1909.08053, section 3): no rank
ever holds the full logits. Otherwise every rank has the full weight and scores its own tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from lmforge.core.model.layers import HeadOptions, Passes


@dataclass(frozen=True)
class VocabShard:
    """This rank's part of the vocabulary: from token `start` on.

    `group` holds the other parts; None if this is all.
    """

    start: int = 0
    group: dist.ProcessGroup | None = None

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """The maximum over all parts, in place."""
        if self.group is not None:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values

    def all_reduce_sum(self, *values: Tensor) -> tuple[Tensor, ...]:
        """The sums over all parts, of tensors of one shape."""
        if self.group is None:
            return values
        stacked = torch.stack(values)
        dist.all_reduce(stacked, group=self.group)
        return tuple(stacked.unbind())


@dataclass(frozen=True)
class Scoring:
    """How hidden states are scored: HeadOptions' `softcap` and `passes`; logits are divided by
    `temperature`.
    """

    vocab_shard: VocabShard = VocabShard()
    softcap: float | None = None
    passes: Passes = "operators"
    temperature: float = 1.0


@dataclass(frozen=True)
class ShardedHead:
    """A head's weight, and the hidden states and labels that this rank scores with it."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    head: HeadOptions
    vocab_shard: VocabShard = VocabShard()
    # The group of ranks that score the other tokens of the same sequences, if any.
    sequence_group: dist.ProcessGroup | None = None

    @classmethod
    def from_weight(
        cls, hidden: Tensor, weight: Tensor, labels: Tensor, head: HeadOptions
    ) -> "ShardedHead":
        """The head of this rank, from `hidden` [sequences, length, width] and `labels` [sequences,
        length].

        With a sharded `weight` (a DTensor), `hidden` is this rank's [sequences, length / T, width];
        `labels` are always full.
        """
        if not isinstance(weight, DTensor):
            return cls(hidden, weight, labels, head)
        assert head.bias is None, "no model that tensor parallelism splits has a head with a bias"
        mesh = weight.device_mesh
        group, (placement,) = mesh.get_group(), weight.placements
        if placement.is_replicate():
            local_labels = labels.chunk(group.size(), dim=1)[group.rank()]
            full_weight = weight.to_local(grad_placements=[Partial()])
            return cls(hidden, full_weight, local_labels, head, sequence_group=group)
        gathered = DTensor.from_local(hidden, mesh, [Shard(1)], run_check=False).redistribute(
            placements=[Replicate()]
        )
        local_weight = weight.to_local()
        # Each rank's part of the vocabulary contributes to the gradient of every token.
        full_hidden = gathered.to_local(grad_placements=[Partial()])
        return cls(
            full_hidden,
            local_weight,
            labels,
            head,
            VocabShard(group.rank() * len(local_weight), group),
        )

    def inputs(
        self, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Scoring]:
        """Hidden states [tokens, width], weight, bias, labels [tokens] and how they are scored, for
        a function that is called outside of autocast: under it, the hidden states are cast here,
        once.
        """
        hidden = self.hidden
        device_type = self.hidden.device.type
        if torch.is_autocast_enabled(device_type):
            hidden = hidden.to(torch.get_autocast_dtype(device_type))
        flat = hidden.reshape(-1, hidden.shape[-1])
        scoring = Scoring(self.vocab_shard, self.head.softcap, self.head.passes, temperature)
        return flat, self.weight, self.head.bias, self.labels.reshape(-1), scoring

    def local_tokens(self, values: Tensor) -> Tensor:
        """Values of this rank's tokens [tokens, …] from those of all tokens [sequences, length,
        …].
        """
        if self.sequence_group is not None:
            values = values.chunk(self.sequence_group.size(), dim=1)[self.sequence_group.rank()]
        return values.flatten(0, 1)

    def sum_over_tokens(self, local_sum: Tensor) -> Tensor:
        """The sum over all tokens, the same on every rank, from the sum over this rank's tokens."""
        return (
            local_sum
            if self.sequence_group is None
            else sum_over_ranks(local_sum, self.sequence_group)
        )

    def gather_tokens(self, values: Tensor) -> Tensor:
        """Values of all tokens [sequences, length], the same on every rank, from those of this
        rank's tokens [tokens].
        """
        values = values.view(self.labels.shape)
        return (
            values
            if self.sequence_group is None
            else _GatherTokens.apply(values, self.sequence_group)
        )


def sum_over_ranks(local_sum: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks, with which all must go on alike: its gradient is the same on all of them,
    and is not summed again.
    """
    total: Tensor = _SumOverRanks.apply(local_sum, group)
    return total


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local_sum: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = local_sum.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return upstream[0], None


def sum_gradients(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Values that are the same on all ranks, each of which uses them for a part of the loss: their
    gradients are summed.
    """
    same: Tensor = _SumGradients.apply(values, group)
    return same


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        total = upstream[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _GatherTokens(torch.autograd.Function):
    """All-gather along the sequence.

    Every rank continues with the same values, so each takes its part of the gradient.
    """

    @staticmethod
    def forward(ctx: Any, local_values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(local_values) for _ in range(group.size())]
        dist.all_gather(parts, local_values.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return upstream[0].chunk(ctx.group.size(), dim=1)[ctx.group.rank()], None
