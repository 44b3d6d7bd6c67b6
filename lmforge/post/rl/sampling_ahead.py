"""Sets of completions are sampled while earlier ones are learned from: when each begins, and who
waits for it.

Set k serves the steps from k × num_iterations on, always: sets are neither reordered nor left out.
It may begin once weights of the version of its first step less `max_staleness` have been published,
so no token is older than that. How sets are sampled is not known here.
"""

import threading
from collections.abc import Callable, Container
from concurrent.futures import Future, wait
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from lmforge.core.distributed.waiting import start_in_thread
from lmforge.core.errors import RunFailed

HEARTBEAT_SECONDS = 1.0
# How long the end of a run waits for threads, which notice it when they next look.
CLOSE_SECONDS = 5.0
T = TypeVar("T")


class _Begun(NamedTuple, Generic[T]):
    """A set that is being sampled; `ended` asks its thread to end."""

    result: Future[T]
    ended: threading.Event


class SamplingAhead(Generic[T]):
    """Begins sets, each in a thread.

    Every rank has one, and calls its methods for the same batches in the same order.
    """

    def __init__(
        self,
        sample: Callable[[int, int, Callable[[], None]], T],
        publish: Callable[[int], None],
        max_staleness: int,
        num_iterations: int = 1,
    ) -> None:
        """`sample(set, first_version, on_step)` is called in a thread: tokens of versions from
        `first_version` on may be used. It calls `on_step` often, which raises once nobody waits for
        it. `publish(version)` gives weights to what samples.
        """
        self._sample, self._publish = sample, publish
        self._max_staleness, self._num_iterations = max_staleness, num_iterations
        self._begun: dict[int, _Begun[T]] = {}
        self._next_set = 0

    @property
    def most_at_once(self) -> int:
        """The largest number of sets that are sampled at a time."""
        return (self._max_staleness + self._num_iterations - 1) // self._num_iterations + 1

    def advance(self, batch_index: int, num_batches: int, known: Container[int] = ()) -> None:
        """Before the step of a batch: publish the weights if a later set needs them, and begin the
        sets that may begin.

        `num_batches` ends the run, and sets that are `known` are not sampled.
        """
        first, last = batch_index // self._num_iterations, (num_batches - 1) // self._num_iterations
        newest = min((batch_index + self._max_staleness) // self._num_iterations, last)
        sets = range(max(first, self._next_set), newest + 1)
        new = [each for each in sets if each not in self._begun and each not in known]
        if new or any(each > first for each in self._begun):
            self._publish(batch_index)
        for each in new:
            self._begin(each)

    def _begin(self, set_index: int) -> None:
        ended = threading.Event()

        def on_step() -> None:
            if ended.is_set():
                raise RunFailed(f"set {set_index}: nobody waits for it any more")

        first_version = set_index * self._num_iterations - self._max_staleness
        sample = partial(self._sample, set_index, first_version, on_step)
        self._begun[set_index] = _Begun(start_in_thread(sample, f"set {set_index}"), ended)

    def take(self, set_index: int, on_wait: Callable[[], None]) -> T:
        """The set, once it is sampled, or what its thread raised.

        `on_wait` is called every second.
        """
        self._next_set = set_index + 1
        result = self._begun.pop(set_index).result
        while not wait([result], HEARTBEAT_SECONDS).done:
            on_wait()
        return result.result()

    def abandon(self) -> list[Future[T]]:
        """End what is being sampled.

        Sets begin anew at the next `advance`, also the one that was taken last.
        """
        abandoned, self._next_set = [*self._begun.values()], 0
        self._begun.clear()
        for each in abandoned:
            each.ended.set()
        return [each.result for each in abandoned]

    def close(self) -> None:
        wait(self.abandon(), CLOSE_SECONDS)
