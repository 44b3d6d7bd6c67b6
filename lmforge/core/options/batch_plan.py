"""How the global batch is cut into micro-batches. Only this module derives batch sizes."""

import math
from dataclasses import dataclass

from lmforge.core.errors import UserError, nearest_multiples
from lmforge.core.options.sections import (
    COMFORTABLE_MICRO_BATCH_TOKENS,
    DEFAULT_GLOBAL_BATCH_SIZE,
    TrainOptions,
)


@dataclass(frozen=True)
class BatchPlan:
    """How one global batch is cut, in sequences: over `data_parallel_size × accumulation ×
    micro_batch_size` places.

    Where these are more than `global_batch_size`, the ranks' shares differ by a sequence, and the
    places left are padding.
    """

    global_batch_size: int
    sequence_length: int
    data_parallel_size: int
    micro_batch_size: int
    accumulation: int

    @property
    def tokens(self) -> int:
        return self.global_batch_size * self.sequence_length

    @property
    def local_batch_size(self) -> int:
        """Places for sequences on each data-parallel rank, padding included."""
        return self.accumulation * self.micro_batch_size

    def __str__(self) -> str:
        ranks = "rank" if self.data_parallel_size == 1 else "ranks"
        text = (
            f"{self.global_batch_size} sequences × {self.sequence_length} tokens = {self.tokens:,}"
            f" tokens per step = {self.data_parallel_size} data-parallel {ranks} ×"
            f" {self.accumulation} micro-batches × {self.micro_batch_size} sequences"
        )
        padding = self.data_parallel_size * self.local_batch_size - self.global_batch_size
        if not padding:
            return text
        return f"{text}, of which {padding} {'is' if padding == 1 else 'are'} padding"


def divisors(number: int) -> list[int]:
    """The divisors of a whole number, ascending."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return small + [number // each for each in reversed(small) if each * each != number]


def batch_plan(train: TrainOptions, length: int, ranks: int, group: int = 1) -> BatchPlan:
    """Cut the global batch for `ranks` data-parallel ranks, which it need not divide by: a run goes
    on when hosts are lost.

    `group` sequences stay together on a rank: the completions of a prompt. Raises UserError where a
    rank would have no sequence, or `micro_batch_size` or `group` does not divide the batch.
    """
    size = (
        train.global_batch_size
        or (train.global_batch_tokens or DEFAULT_GLOBAL_BATCH_SIZE * length) // length
    )
    if size % group:
        raise UserError(
            f"train.global_batch_size = {size}: groups of rollout.num_generations = {group}"
            f" completions need a multiple of {group}; nearest: {nearest_multiples(size, group)}"
        )
    if size // group < ranks and group > 1:
        raise UserError(
            f"{ranks} ranks for {size // group} groups of rollout.num_generations = {group}"
            f" completions: a rank would have none; use at most {size // group} ranks, or a larger"
            " train.global_batch_size"
        )
    if size < ranks:
        raise UserError(
            f"{ranks} ranks for a global batch of {size} sequences: a rank would have none; use at"
            f" most {size} ranks"
        )
    micro = train.micro_batch_size
    if micro and size % micro:
        raise UserError(
            f"a global batch of {size} sequences does not divide by micro-batches of {micro};"
            f" nearest global_batch_size: {nearest_multiples(size, micro)}"
        )
    per_rank = math.ceil(size / group / ranks) * group
    if micro is None:
        most = max(1, COMFORTABLE_MICRO_BATCH_TOKENS // length)
        micro = max(size for size in divisors(per_rank) if size <= most)
    micro = min(micro, per_rank)
    return BatchPlan(size, length, ranks, micro, math.ceil(per_rank / micro))
