"""How the global batch is cut into micro-batches: the one place where batch sizes are derived."""

import math
from dataclasses import dataclass

from lmforge.config.sections import COMFORTABLE_MICRO_BATCH_TOKENS, DEFAULT_GLOBAL_BATCH_SIZE, TrainOptions
from lmforge.errors import UserError


@dataclass(frozen=True)
class BatchPlan:
    """How one global batch is cut: `global_batch_size = data_parallel_size × accumulation × micro_batch_size`, in sequences."""

    global_batch_size: int
    sequence_length: int
    data_parallel_size: int
    micro_batch_size: int
    accumulation: int

    @property
    def tokens(self) -> int:
        return self.global_batch_size * self.sequence_length

    def __str__(self) -> str:
        ranks = f"{self.data_parallel_size} data-parallel {'rank' if self.data_parallel_size == 1 else 'ranks'}"
        return (
            f"{self.global_batch_size} sequences × {self.sequence_length} tokens = {self.tokens:,} tokens a step"
            f" = {ranks} × {self.accumulation} micro-batches × {self.micro_batch_size} sequences"
        )


def divisors(number: int) -> list[int]:
    """The divisors of a whole number, ascending."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return small + [number // each for each in reversed(small) if each * each != number]


def batch_plan(train: TrainOptions, length: int, ranks: int) -> BatchPlan:
    """Cut the global batch for `ranks` data-parallel ranks. Raises UserError with the nearest sizes that divide."""
    size = train.global_batch_size or (train.global_batch_tokens or DEFAULT_GLOBAL_BATCH_SIZE * length) // length
    if size < ranks:
        raise UserError(
            f"{ranks} ranks for a global batch of {size} sequences: a rank would have none; use at most {size} ranks"
        )
    micro = train.micro_batch_size
    unit = ranks * (micro or 1)
    if size % unit:
        below = size // unit * unit
        near = f"{below} or {below + unit}" if below else str(unit)
        divisor = f"{ranks} ranks" + (f" × micro-batches of {micro}" if micro else "")
        raise UserError(f"a global batch of {size} sequences does not divide by {divisor}; nearest global_batch_size: {near}")
    per_rank = size // ranks
    if micro is None:
        most = max(1, COMFORTABLE_MICRO_BATCH_TOKENS // length)
        micro = max(size for size in divisors(per_rank) if size <= most)
    return BatchPlan(size, length, ranks, micro, per_rank // micro)
