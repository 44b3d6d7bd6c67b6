"""The ranks of a run as one thing: device, process groups, and how ranks agree before any of them goes on.

Training traffic uses the default group. Decisions, checkpoints and errors use a gloo group of their own with a long
time-out, so that they can never pair with a gradient's collective.
"""

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lmforge.cluster.rank_info import LAUNCHER_PID_VARIABLE, RankInfo, read_rank_info, threads_per_rank
from lmforge.cluster.rendezvous import report_missing_ranks
from lmforge.errors import RunFailed, UserError

CONTROL_TIMEOUT = timedelta(hours=2)
RANK_POLL_SECONDS = 5.0
T = TypeVar("T")


def choose_device(requested: str, local_rank: int = 0) -> torch.device:
    """`auto`, `cpu` or `cuda` as a device of this process. Raises UserError where CUDA is asked for and absent."""
    if requested == "cuda" and not torch.cuda.is_available():
        raise UserError("device = cuda: no CUDA device is visible to torch here; use cpu or auto")
    if requested == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        there = torch.cuda.device_count()
        raise UserError(f"local rank {local_rank} has no GPU of its own: this host shows {there}; start fewer ranks")
    return torch.device("cuda", local_rank)


@dataclass
class DistributedContext:
    """This process among its peers. With one rank there are no process groups and every method is immediate."""

    rank_info: RankInfo
    device: torch.device
    control_group: dist.ProcessGroup | None
    # For what is written beside the training, in a thread of its own.
    checkpoint_group: dist.ProcessGroup | None = None
    # What is entered around waiting for the others, where somebody watches.
    wait_context: Callable[[], AbstractContextManager[None]] | None = None

    @property
    def is_rank0(self) -> bool:
        return self.rank_info.is_rank0

    @property
    def world_size(self) -> int:
        return self.rank_info.world_size

    def all_gather(self, value: T) -> list[T]:
        """`value` of every rank, in rank order, on every rank."""
        if self.control_group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        with self._while_waiting():
            dist.all_gather_object(values, value, group=self.control_group)
        return values

    def gather(self, value: T) -> list[T] | None:
        """`value` of every rank, in rank order, on the first rank; None on the others."""
        if self.control_group is None:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.is_rank0 else None
        with self._while_waiting():
            dist.gather_object(value, values, dst=0, group=self.control_group)
        return values

    def scatter(self, values: list[T] | None) -> T:
        """The value for this rank of the first rank's `values`, which are in rank order."""
        if self.control_group is None:
            assert values is not None
            return values[0]
        mine: list[Any] = [None]
        with self._while_waiting():
            dist.scatter_object_list(mine, values, src=0, group=self.control_group)
        return mine[0]

    def broadcast(self, value: T) -> T:
        """The first rank's `value`, on every rank."""
        if self.control_group is None:
            return value
        box = [value]
        with self._while_waiting():
            dist.broadcast_object_list(box, src=0, group=self.control_group)
        return box[0]

    def _while_waiting(self) -> AbstractContextManager[None]:
        return self.wait_context() if self.wait_context is not None else nullcontext()

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over all ranks in place, on the device; the host does not wait."""
        if self.control_group is not None:
            dist.all_reduce(tensor)
        return tensor

    @contextmanager
    def raise_on_all(self) -> Iterator[None]:
        """What is done inside succeeds on all ranks, or raises on all: the first rank's problem that there is.

        The block must not communicate: a rank that raised inside it would leave its peers waiting.
        """
        problem: BaseException | None = None
        try:
            yield
        except (UserError, RunFailed, OSError) as raised:
            problem = raised
        kinds = self.all_gather(None if problem is None else (type(problem), str(problem)))
        for rank, kind in enumerate(kinds):
            if kind is None:
                continue
            if problem is not None and rank == self.rank_info.rank:
                raise problem
            raised_as = kind[0] if issubclass(kind[0], (UserError, RunFailed)) else RunFailed
            where = "" if rank == 0 or not issubclass(kind[0], OSError) else f"rank {rank}: "
            raise raised_as(where + kind[1])

    def run_once_per_host(self, fn: Callable[[], object]) -> None:
        """Carry out `work`, which must not communicate, on one rank of each host while the others wait, however long it takes.

        Waiting is many short collectives instead of one long one, which would time out. What `work` raises on any host is
        raised on every rank.
        """
        problems: list[BaseException] = []
        ended = threading.Event()

        def carry_out() -> None:
            try:
                fn()
            except BaseException as problem:
                problems.append(problem)
            finally:
                ended.set()

        if self.rank_info.local_rank == 0:
            threading.Thread(target=carry_out, daemon=True).start()
        else:
            ended.set()
        while not all(self.all_gather(ended.wait(RANK_POLL_SECONDS))):
            pass
        with self.raise_on_all():
            if problems:
                raise problems[0]

    def decide_on_rank0(self, fn: Callable[[], T]) -> T:
        """What `choose` returns on the first rank, on every rank; what it raises there is raised on every rank."""
        answer: list[T] = []
        with self.raise_on_all():
            if self.is_rank0:
                answer.append(fn())
        return self.broadcast(answer[0] if answer else None)  # type: ignore[return-value]


def init_distributed(device: str = "auto", threads: int | None = None) -> DistributedContext:
    """Join the other ranks as the launcher's variables say; alone where nobody launched this process."""
    place = read_rank_info()
    _terminate_with_launcher()
    chosen = choose_device(device, place.local_rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    # torchrun sets OMP_NUM_THREADS=1 for every rank: on a CPU that leaves cores idle, so it is decided here.
    if chosen.type == "cpu" or threads:
        torch.set_num_threads(threads or threads_per_rank(place.local_world_size))
    if chosen.type == "cpu":
        keep_freed_memory()
    if place.world_size == 1:
        return DistributedContext(place, chosen, None)
    global _store, _init_count, _reports_errors
    # The last few collectives of each rank, for the report of a stall: 5 µs a collective. Read when the first group is made.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "64" if chosen.type == "cpu" else "2000")
    # A second start in the same processes finds the first one's keys in the store: each has its own names.
    _init_count, _reports_errors = _init_count + 1, None
    with report_missing_ranks(place.rank, place.world_size, _init_count):
        shared, rank, count = next(dist.rendezvous("env://"))
        _store = dist.PrefixStore(f"lmforge-{_init_count}", shared)
        dist.init_process_group(
            # gloo too, for what is kept in host memory.
            "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo",
            store=_store,
            rank=rank,
            world_size=count,
            device_id=chosen if chosen.type == "cuda" else None,
        )
    control, saving = (
        dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT, group_desc=purpose) for purpose in ("control", "saving")
    )
    return DistributedContext(place, chosen, control, saving)


def _terminate_with_launcher() -> None:
    """Be asked to stop when the launcher is killed: ranks that nobody watches would train on, and hold the run."""
    library = ctypes.CDLL(None)
    # Taken out: what a rank starts in its turn has another parent.
    launcher = os.environ.pop(LAUNCHER_PID_VARIABLE, None)
    if launcher is None or not hasattr(library, "prctl"):
        return
    parent_death_signal = 1
    library.prctl(parent_death_signal, signal.SIGTERM)
    if os.getppid() != int(launcher):  # it was killed before this was asked for
        os.kill(os.getpid(), signal.SIGTERM)


def keep_freed_memory() -> None:
    """Let glibc keep the memory of freed tensors, as the GPU allocator does.

    It returns large blocks to the kernel, so that every activation of every step is mapped, zeroed and faulted in anew:
    5 to 8 % of a training step on a CPU. Elsewhere (macOS, musl) nothing is changed.
    """
    library = ctypes.CDLL(None)
    if not (hasattr(library, "mallopt") and hasattr(library, "gnu_get_libc_version")):
        return
    trim_threshold, mmap_threshold, largest = -1, -3, 2**31 - 1
    library.mallopt(trim_threshold, largest)
    # Before version 2.35 glibc takes no more than 32 MiB.
    library.mallopt(mmap_threshold, largest) or library.mallopt(mmap_threshold, 2**25)


def destroy_distributed() -> None:
    """Leave the process groups, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()


# The store outlives the groups: it still answers when a peer has died and every collective fails.
_store: dist.Store | None = None
_init_count = 0
_reports_errors: bool | None = None


def claim_error_reporting() -> bool:
    """Whether this process is the first of its peers to ask: the one that tells the user what went wrong.

    It stays the one: asking again gets the same answer.
    """
    global _reports_errors
    if _store is None:
        return read_rank_info().is_rank0
    if _reports_errors is None:
        try:
            _reports_errors = int(_store.add("lmforge/told", 1)) == 1
        except RuntimeError:  # the store went with the host that kept it
            _reports_errors = True
    return _reports_errors
