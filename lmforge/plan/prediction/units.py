"""The parts of a model on a rank: a stage of a pipeline, and the units that FSDP gathers and reduces."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """The part of the model on a rank: all of it, or a pipeline's. `in_flight` micro-batches wait for their backward pass."""

    blocks: int
    has_embedding: bool = True
    has_head: bool = True
    in_flight: int = 1


@dataclass(frozen=True)
class Unit:
    """What FSDP gathers and reduces as one: parameters of the rank before they are sharded, and with the rows that FSDP2 adds
    so that each tensor divides by the ranks."""

    name: str
    parameters: int
    padded: int


def make_unit(name: str, shapes: Sequence[tuple[int, int]], shards: int, *, flat: bool) -> Unit:
    """A unit of tensors with these (rows, columns). FSDP1 puts them into one `flat` tensor, which needs no rows."""
    count = sum(rows * columns for rows, columns in shapes)
    padded = count if flat else sum(-(-rows // shards) * shards * columns for rows, columns in shapes)
    return Unit(name, count, padded)
