"""Context parallel: each rank has a share of every row, and attention gathers the keys and values of the others.

All-gather rather than a ring: with grouped heads keys and values are few, documents and windows need no special case,
and it is one collective a block (Llama 3, arXiv 2407.21783, section 3.3.2). A row is cut into twice as many pieces as
there are ranks, of which rank r gets the r-th from either end: under a causal mask that is equal work for all.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from lmforge.data.batch import Batch

# Differentiable, and can be compiled. Its name changed with torch 2.13.
_all_gather: Any = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that share rows out; an attention.ContextShare."""

    group: dist.ProcessGroup

    @property
    def degree(self) -> int:
        return self.group.size()

    def shard_batch(self, batch: Batch) -> Batch:
        """This rank's tokens of each row: [rows, length / ranks]. The length divides by twice the ranks."""
        piece = batch.sequence_length // (2 * self.degree)
        firsts = [first for first, _ in self.local_ranges(2 * piece)]
        return batch.map(lambda tensor: torch.cat([tensor[:, first : first + piece] for first in firsts], dim=1))

    def local_ranges(self, local_length: int) -> list[tuple[int, int]]:
        """(slot of its first token in the whole row, tokens) of the two pieces that are here, `length` tokens together."""
        piece, rank = local_length // 2, self.group.rank()
        return [(rank * piece, piece), ((2 * self.degree - 1 - rank) * piece, piece)]

    def all_gather_sequence(self, local: Tensor, dim: int) -> Tensor:
        """`part` of every rank along `dimension`, in the order of the row. Its gradient is summed over the ranks."""
        gathered = _all_gather(local.contiguous(), dim, self.group)
        pieces = gathered.unflatten(dim, (self.degree, 2, -1))
        from_start, from_end = pieces.unbind(dim + 1)
        ordered = torch.cat([from_start, from_end.flip(dim)], dim=dim)
        return ordered.flatten(dim, dim + 1)
