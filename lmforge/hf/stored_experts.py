"""Experts on disk: a tensor for each, as models are published, where a model has them stacked.

See family.Family.stored_experts. Every other tensor has one name in memory and on disk.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from lmforge.core.model.config import ModelConfig
from lmforge.core.model.family import OUR_PREFIX


class Piece(NamedTuple):
    """A tensor on disk: `rows` of the matrix of an `expert` in the stack that a model has."""

    name: str
    expert: int
    rows: slice

    def cut(self, stack: Tensor) -> Tensor:
        return stack[self.expert, self.rows]

    def cut_part(
        self, local: Tensor, part: tuple[slice, ...]
    ) -> tuple[Tensor, tuple[slice, ...]] | None:
        """A view of a rank's `part` of the stack, `local`, and the part of the tensor for it.

        None where the tensor on disk has nothing of the rank's part.
        """
        experts, rows, columns = part
        begin = max(self.rows.start, rows.start)
        end = min(self.rows.stop, rows.stop)
        if not experts.start <= self.expert < experts.stop or begin >= end:
            return None
        view = local[self.expert - experts.start, begin - rows.start : end - rows.start]
        return view, (slice(begin - self.rows.start, end - self.rows.start), columns)


def stored_name(name: str, config: ModelConfig) -> str:
    """The name on disk of a tensor that is not a stack, or a stack there too."""
    for ours, theirs in config.family.stored_experts.items():
        if name.endswith(f".{ours}"):
            return name.removesuffix(ours) + theirs[0]
    return name


def with_stored_prefix(name: str, config: ModelConfig) -> str:
    """A name with the beginning that the family has on disk."""
    if name.startswith(OUR_PREFIX):
        return config.family.stored_prefix + name.removeprefix(OUR_PREFIX)
    return name


def pieces(name: str, shape: Sequence[int], config: ModelConfig) -> Iterator[Piece]:
    """The tensors on disk of the stack with this name and full shape; none for any other tensor."""
    for ours, theirs in config.family.stored_experts.items():
        if name.endswith(f".{ours}") and "{}" in theirs[0]:
            count = shape[1] // len(theirs)
            for expert in range(shape[0]):
                for number, each in enumerate(theirs):
                    rows = slice(number * count, (number + 1) * count)
                    yield Piece(name.removesuffix(ours) + each.format(expert), expert, rows)
