"""Context parallelism: each rank has a part of every sequence, and attention gathers keys and values of the other ranks.

All-gather rather than a ring: with grouped heads keys and values are few, documents and windows need no special case,
and it is one collective a block (Llama 3, arXiv 2407.21783, section 3.3.2). A sequence is cut into twice as many pieces as
there are ranks; rank r gets the r-th from either end. Under a causal mask that is equal work for all ranks.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from lmforge.data.batch import Batch

# Differentiable, and works when compiled. Its name changed with torch 2.13.
_all_gather: Any = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that split sequences; an attention.SequenceSharder."""

    group: dist.ProcessGroup

    @property
    def degree(self) -> int:
        return self.group.size()

    def shard_batch(self, batch: Batch) -> Batch:
        """This rank's tokens of each sequence: [sequences, length / degree]. The length divides by twice the degree."""
        ranges = self.local_ranges(batch.sequence_length // self.degree)
        return batch.map(lambda tensor: torch.cat([tensor[:, first : first + count] for first, count in ranges], dim=1))

    def local_ranges(self, local_length: int) -> list[tuple[int, int]]:
        """(index of the first token in the full sequence, number of tokens) of this rank's two pieces."""
        piece, rank = local_length // 2, self.group.rank()
        return [(rank * piece, piece), ((2 * self.degree - 1 - rank) * piece, piece)]

    def all_gather_sequence(self, local: Tensor, dim: int) -> Tensor:
        """The `local` tensors of all ranks along `dim`, in the order of the full sequence. Gradients are summed over ranks."""
        gathered = _all_gather(local.contiguous(), dim, self.group)
        pieces = gathered.unflatten(dim, (self.degree, 2, -1))
        from_start, from_end = pieces.unbind(dim + 1)
        ordered = torch.cat([from_start, from_end.flip(dim)], dim=dim)
        return ordered.flatten(dim, dim + 1)
