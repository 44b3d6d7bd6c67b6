"""The ranks that share a preparation, and the units that each of them reads.

Ranks share one file system, and write to one folder.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeVar, Union

from lmforge.core.distributed.rank_info import RankInfo

T = TypeVar("T")


if TYPE_CHECKING:  # it imports torch
    from lmforge.core.distributed.distributed import DistributedContext

# As texts: the first is not there at run time.
DistContext = Union["DistributedContext", "SingleProcessContext"]


class SingleProcessContext:
    """A process that was not launched: the only rank."""

    rank_info = RankInfo()

    def all_gather(self, value: T) -> list[T]:
        return [value]

    def gather(self, value: T) -> list[T] | None:
        return [value]

    def scatter(self, values: list[T] | None) -> T:
        assert values is not None
        return values[0]

    def broadcast(self, value: T) -> T:
        return value

    def raise_on_all(self) -> AbstractContextManager[None]:
        return nullcontext()

    def decide_on_rank0(self, fn: Callable[[], T]) -> T:
        return fn()


def divide_units(files: Sequence[str], sizes: Sequence[int], world_size: int) -> list[list[int]]:
    """The units of each rank, by their numbers.

    files, sizes: [units], the file that each is of, and its bytes.

    A rank gets whole files, except for files larger than an equal share, which are divided. The
    largest files are assigned first, each to the rank with the fewest bytes, so no rank has more
    than an equal share plus one file.
    """
    of_file: dict[str, list[int]] = {}
    for number, file in enumerate(files):
        of_file.setdefault(file, []).append(number)
    target_size = sum(sizes) / world_size
    groups = []
    for numbers in of_file.values():
        if sum(sizes[number] for number in numbers) <= target_size:
            groups.append(numbers)
        else:
            groups += [[number] for number in numbers]
    loads = [0] * world_size
    units = [list[int]() for _ in range(world_size)]
    for numbers in sorted(groups, key=lambda numbers: -sum(sizes[number] for number in numbers)):
        rank = loads.index(min(loads))
        # Empty files are distributed too.
        loads[rank] += 1 + sum(sizes[number] for number in numbers)
        units[rank] += numbers
    return [sorted(numbers) for numbers in units]
