"""Tensors that are in pieces on disk, as models are published, where a model has them as one: a tensor
for each expert, or for the convolution of each of queries, keys and values.

See family.Family.stored_experts and blocks.Vector.stored. Every other tensor has one name in memory
and on disk.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from lmforge.core.model.config import ModelConfig
from lmforge.core.model.family import OUR_PREFIX


class Piece(NamedTuple):
    """A tensor on disk: `rows` of the one that a model has, or of the matrix of an `expert` in a
    stack.
    """

    name: str
    expert: int | None
    rows: slice

    def cut(self, whole: Tensor) -> Tensor:
        return whole[self.rows] if self.expert is None else whole[self.expert, self.rows]

    def cut_part(
        self, local: Tensor, part: tuple[slice, ...]
    ) -> tuple[Tensor, tuple[slice, ...]] | None:
        """A view of a rank's `part` of the tensor, `local`, and the part of the one on disk for it.

        None where that has nothing of the rank's part.
        """
        if self.expert is not None:
            experts, *part_of_expert = part
            if not experts.start <= self.expert < experts.stop:
                return None
            local = local[self.expert - experts.start]
            part = tuple(part_of_expert)
        rows, *others = part
        begin = max(self.rows.start, rows.start)
        end = min(self.rows.stop, rows.stop)
        if begin >= end:
            return None
        view = local[begin - rows.start : end - rows.start]
        return view, (slice(begin - self.rows.start, end - self.rows.start), *others)


def stored_name(name: str, config: ModelConfig) -> str:
    """The name on disk of a tensor that is stored whole."""
    for ours, theirs in config.family.stored_experts.items():
        if name.endswith(f".{ours}"):
            return name.removesuffix(ours) + theirs[0]
    return name


def with_stored_prefix(name: str, config: ModelConfig) -> str:
    """A name with the beginning that the family has on disk."""
    if name.startswith(OUR_PREFIX):
        return config.family.stored_prefix + name.removeprefix(OUR_PREFIX)
    return name


def pieces(
    name: str, shape: Sequence[int], config: ModelConfig, rows_of: Mapping[str, int] | None = None
) -> Iterator[Piece]:
    """The tensors on disk of the one with this name and full shape; none for one that is stored
    whole.

    rows_of: how many rows tensors on disk have, by name: transformers cuts a convolution into equal
    parts, whatever they are of. The last has what the others leave.
    """
    for ours, theirs in config.family.stored_experts.items():
        if name.endswith(f".{ours}") and "{}" in theirs[0]:
            count = shape[1] // len(theirs)
            for expert in range(shape[0]):
                for number, each in enumerate(theirs):
                    rows = slice(number * count, (number + 1) * count)
                    yield Piece(name.removesuffix(ours) + each.format(expert), expert, rows)
    vector = config.vector(name)
    if vector is None or not vector.stored:
        return
    start = 0
    for number, (each, count) in enumerate(vector.stored, start=1):
        stored = name.removesuffix(vector.name) + each
        stop = start + (rows_of or {}).get(stored, count)
        if number == len(vector.stored):
            stop = shape[0]
        yield Piece(stored, None, slice(start, stop))
        start = stop
