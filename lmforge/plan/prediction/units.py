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
    """A unit that FSDP gathers and reduces: the rank's parameters before sharding, the same with the rows that FSDP2 pads so
    that tensors divide by the ranks, and the trained ones of both."""

    name: str
    parameters: int
    padded: int
    trained: int
    padded_trained: int


def make_unit(
    name: str, shapes: Sequence[tuple[int, int]], shards: int, *, flat: bool, frozen: Sequence[tuple[int, int]] = ()
) -> Unit:
    """A unit of trained and `frozen` tensors with these (rows, columns). FSDP1 puts them into one `flat` tensor, which needs no
    rows."""

    def counts(shapes: Sequence[tuple[int, int]]) -> tuple[int, int]:
        count = sum(rows * columns for rows, columns in shapes)
        return count, count if flat else sum(-(-rows // shards) * shards * columns for rows, columns in shapes)

    (trained, padded_trained), (others, padded_others) = counts(shapes), counts(frozen)
    return Unit(name, trained + others, padded_trained + padded_others, trained, padded_trained)
