"""Simulates a list of operations on streams, and tracks the memory of each kind.

Time and memory follow different orders. A stream runs its operations one after another, and waits
for those of other streams. Memory is allocated and freed in the order in which the host issues
operations, which runs ahead of the device. torch's allocator keeps what one stream has freed for
that stream, so that what a GPU holds is the sum of the largest that each stream's pool ever was.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

COMPUTE = "compute"
NETWORK = "network"
HOST_COPIES = "host copies"
# The pools of kinds of memory whose buffers are allocated on streams of their own.
POOLS = {"gather buffers": "gather", "reduce buffers": "reduce", "gradients": "reduce"}


# What most operations allocate and free: a search makes millions of them.
NOTHING: Mapping[str, float] = {}


@dataclass(slots=True)
class Operation:
    """One operation.

    after: numbers of operations that must have ended. allocate, free: bytes by kind, before and
    after it.
    transient: bytes that it holds only while it runs. host_seconds: what issuing it costs the host.
    """

    name: str
    stream: str
    seconds: float = 0.0
    kind: str = ""
    after: Sequence[int] = ()
    allocate: Mapping[str, float] = field(default_factory=lambda: NOTHING)
    free: Mapping[str, float] = field(default_factory=lambda: NOTHING)
    transient: Mapping[str, float] = field(default_factory=lambda: NOTHING)
    host_seconds: float = 0.0


@dataclass(frozen=True)
class Simulation:
    """The result of a list of operations.

    live_peak: bytes by kind when most was live, and `peak_at` the operation. reserved: the sum of
    the pools' peaks.
    timeline: (operation, live bytes while it runs), in order of issue.
    busy: seconds by stream and by kind of operation. exposed: seconds in which only the network is
    busy.
    host_bound: seconds in which the device waits for the host.
    """

    seconds: float
    live_peak: dict[str, float]
    peak_at: str
    reserved: float
    timeline: list[tuple[str, float]]
    busy: dict[str, float]
    exposed: float
    host_bound: float


class _Memory:
    """Live bytes of each kind, and the peak of each stream's pool."""

    def __init__(self, held: Mapping[str, float]) -> None:
        self.now: dict[str, float] = {}
        self.pools: dict[str, float] = {}
        self.pool_peaks: dict[str, float] = {}
        self.live = 0.0
        self.peak = dict[str, float]()
        self.peak_at = ""
        self.most = -1.0
        self.timeline: list[tuple[str, float]] = []
        self._change(held, 1)

    def issue(self, operation: Operation) -> None:
        if operation.allocate:
            self._change(operation.allocate, 1)
        if operation.transient:
            self._change(operation.transient, 1)
        self.timeline.append((operation.name, self.live))
        if self.live > self.most:
            self.most = self.live
            self.peak = dict(self.now)
            self.peak_at = operation.name
        if operation.transient:
            self._change(operation.transient, -1)
        if operation.free:
            self._change(operation.free, -1)

    def _change(self, kinds: Mapping[str, float], sign: int) -> None:
        for kind, count in kinds.items():
            self.now[kind] = self.now.get(kind, 0.0) + sign * count
            pool = POOLS.get(kind, COMPUTE)
            size = self.pools[pool] = self.pools.get(pool, 0.0) + sign * count
            if size > self.pool_peaks.get(pool, 0.0):
                self.pool_peaks[pool] = size
            self.live += sign * count


class _Clock:
    """The times at which streams become free, and the seconds by kind of operation."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.free_at: dict[str, float] = {}
        self.busy: dict[str, float] = {}
        self.host = self.exposed = self.host_bound = self.repeated = 0.0

    @property
    def end(self) -> float:
        return max(self.free_at.values(), default=0.0)

    def issue(self, operation: Operation) -> None:
        self.host += operation.host_seconds
        before = self.free_at.get(operation.stream, 0.0)
        ready = max([self.ends[number] for number in operation.after]) if operation.after else 0.0
        if operation.stream == COMPUTE:
            self.exposed += max(0.0, ready - max(before, self.host))
            self.host_bound += max(0.0, self.host - max(before, ready))
        end = self.free_at[operation.stream] = max(before, ready, self.host) + operation.seconds
        self.ends.append(end)
        if operation.seconds:
            for name in (operation.stream, operation.kind or operation.name):
                self.busy[name] = self.busy.get(name, 0.0) + operation.seconds

    def state(self) -> tuple[float, float, float, dict[str, float]]:
        return self.end, self.exposed, self.host_bound, dict(self.busy)

    def repeat_since(self, state: tuple[float, float, float, dict[str, float]], times: int) -> None:
        """Repeat the changes since `state` `times` more."""
        end, exposed, host_bound, busy = state
        self.repeated = times * (self.end - end)
        self.exposed += times * (self.exposed - exposed)
        self.host_bound += times * (self.host_bound - host_bound)
        self.busy = {
            name: each + times * (each - busy.get(name, 0.0)) for name, each in self.busy.items()
        }


def simulate(
    operations: Sequence[Operation],
    held: Mapping[str, float],
    repeated: tuple[int, int] = (0, 0),
    times: int = 0,
) -> Simulation:
    """Carry out the operations of one step.

    `held` are the bytes by kind before the first operation.

    Those from the first to before the second number of `repeated` stand for `times` more of their
    kind: their time is added, and their memory is the same.
    """
    memory = _Memory(held)
    clock = _Clock()
    before = clock.state()
    first, after = repeated
    for number, operation in enumerate(operations):
        if times and number == first:
            before = clock.state()
        elif times and number == after:
            clock.repeat_since(before, times)
        memory.issue(operation)
        clock.issue(operation)
    kinds = {kind: count for kind, count in memory.peak.items() if count > 0}
    exposed = clock.exposed + max(0.0, clock.end - clock.free_at.get(COMPUTE, 0.0))
    reserved = sum(memory.pool_peaks.values())
    seconds = clock.end + clock.repeated
    return Simulation(
        seconds,
        kinds,
        memory.peak_at,
        reserved,
        memory.timeline,
        clock.busy,
        exposed,
        clock.host_bound,
    )
