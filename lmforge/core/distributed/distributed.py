"""`DistributedContext`: this rank, its device and its process groups, and how ranks decide
together.

Training uses the default process group. Decisions and errors use a gloo group of their own with a
long time-out, so that they never pair with a gradient's collective; checkpoints have a third group.
"""

import ctypes
import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
import xxhash

from lmforge.core.distributed.environment import (
    LAUNCHER_PID_VARIABLE,
    check_local_ranks,
    count_by_host,
)
from lmforge.core.distributed.folder_marker import FolderMarker
from lmforge.core.distributed.joining import (
    JOIN_SECONDS,
    allow_open_connections,
    choose_gloo_interface,
    connect_to_store,
    find_rank0,
    name_this_start,
    report_missing_ranks,
)
from lmforge.core.distributed.memory import set_allocator_defaults
from lmforge.core.distributed.rank_info import RankInfo, read_rank_info, threads_per_rank
from lmforge.core.distributed.standby import release_standby
from lmforge.core.distributed.waiting import start_in_thread
from lmforge.core.errors import RunFailed, UserError, name_some

CONTROL_TIMEOUT = timedelta(hours=2)
RANK_POLL_SECONDS = 5.0
# Each thread allocates its own stack: thousands of threads on a small machine crash the C library.
THREADS_PER_CORE = 4
MIN_THREADS_LIMIT = 64
T = TypeVar("T")


def choose_device(requested: str, local_rank: int = 0) -> torch.device:
    """`auto`, `cpu` or `cuda` as a device of this process.

    Raises UserError where CUDA is requested but not available.

    Where the launcher shows each process only its own GPU (Slurm's --gpus-per-task=1), that is
    device 0.
    """
    if requested == "cuda" and not torch.cuda.is_available():
        raise UserError("device = cuda: no CUDA device is visible to torch here; use cpu or auto")
    if requested == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", device_index(local_rank, torch.cuda.device_count()))


def device_index(local_rank: int, num_visible: int) -> int:
    """The index of this process's GPU among the `num_visible` that it sees.

    Raises UserError where there are too few.
    """
    if num_visible == 1:
        return 0
    if local_rank >= num_visible:
        raise UserError(
            f"local rank {local_rank} has no GPU of its own: this host shows {num_visible}; start"
            " fewer ranks"
        )
    return local_rank


@dataclass
class DistributedContext:
    """This process among the ranks of a run.

    With one rank there are no process groups, and every method returns at once.

    At the end of a `with` block the process groups are destroyed.

    control_group: for decisions and errors.
    checkpoint_group: for saving, which runs in a thread of its own beside the training.
    wait_context: entered while this rank waits for the others, so that a watchdog knows.
    """

    rank_info: RankInfo
    device: torch.device
    control_group: dist.ProcessGroup | None
    checkpoint_group: dist.ProcessGroup | None = None
    wait_context: Callable[[], AbstractContextManager[None]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        destroy_distributed()

    @property
    def is_rank0(self) -> bool:
        return self.rank_info.is_rank0

    @property
    def world_size(self) -> int:
        return self.rank_info.world_size

    def all_gather(self, value: T) -> list[T]:
        """`value` of every rank, in rank order, on every rank."""
        values = [value] * self.world_size
        self._communicate(dist.all_gather_object, values, value)
        return values

    def gather(self, value: T) -> list[T] | None:
        """`value` of every rank, in rank order, on rank 0; None on the others."""
        values = [value] * self.world_size if self.is_rank0 else None
        self._communicate(dist.gather_object, value, values, dst=0)
        return values

    def scatter(self, values: list[T] | None) -> T:
        """This rank's element of rank 0's `values`, which are in rank order."""
        received: list[Any] = values[:1] if values else [None]
        self._communicate(dist.scatter_object_list, received, values, src=0)
        return received[0]

    def broadcast(self, value: T) -> T:
        """Rank 0's `value`, on every rank."""
        received = [value]
        self._communicate(dist.broadcast_object_list, received, src=0)
        return received[0]

    def _communicate(
        self, collective: Callable[..., object], *arguments: Any, **options: Any
    ) -> None:
        if self.control_group is not None:
            with self.wait_context() if self.wait_context is not None else nullcontext():
                collective(*arguments, **options, group=self.control_group)

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over all ranks in place, on the device; the host does not wait."""
        if self.control_group is not None:
            dist.all_reduce(tensor)
        return tensor

    @contextmanager
    def raise_on_all(self, *, names_host: bool = True) -> Iterator[None]:
        """The block succeeds on all ranks, or raises on all ranks the exception of the lowest rank
        that failed.

        The block must not communicate: a rank that raises inside it would leave the others waiting.
        Where other hosts have not failed, the message begins with the host (`names_host`).
        """
        problem: BaseException | None = None
        try:
            yield
        except (UserError, RunFailed, OSError) as raised:
            problem = raised
        outcomes = self.all_gather(
            (platform.node(), None if problem is None else (type(problem), str(problem)))
        )
        first = next(
            (
                (rank, host, failure)
                for rank, (host, failure) in enumerate(outcomes)
                if failure is not None
            ),
            None,
        )
        if first is None:
            return
        rank, host, (error_class, message) = first
        is_foreseen = issubclass(error_class, (UserError, RunFailed))
        hosts = {each for each, _ in outcomes}
        failed = {each for each, failure in outcomes if failure is not None}
        where = ""
        if names_host and failed < hosts:
            where = f"{host}: "
        elif not is_foreseen and rank != 0:
            where = f"rank {rank}: "
        if problem is not None and rank == self.rank_info.rank and not (where and is_foreseen):
            raise problem
        raised_as: Any = error_class if is_foreseen else RunFailed
        copy = raised_as(f"{where}{message}")
        copy.raised_on_peer = rank != self.rank_info.rank
        raise copy from problem

    def run_once_per_host(self, fn: Callable[[], object]) -> None:
        """Call `fn`, which must not communicate, on one rank of each host while the others wait,
        however long it takes.

        What `fn` raises on any host is raised on every rank.
        """
        self._run_while_others_wait(fn, self.rank_info.local_rank == 0)

    def run_once_per_folder(self, fn: Callable[[], object], folder: Path) -> None:
        """As `run_once_per_host`, but only the first of the hosts that share `folder` calls `fn`,
        which fills it.
        """
        self._run_while_others_wait(fn, self._is_first_with(folder))

    def _is_first_with(self, folder: Path) -> bool:
        """Whether this rank is the first one of its host, and its host the first of those that
        share `folder`.
        """
        info = self.rank_info
        first_of_host = info.local_rank == 0
        if info.local_world_size == info.world_size:
            return first_of_host
        marker = FolderMarker(folder) if first_of_host else None
        try:
            names = self.all_gather(marker and marker.shared_name)
            sees_another = marker is not None and any(
                marker.sees(name) for name in names[: info.rank] if name
            )
            self.all_gather(None)  # every rank looks before the markers are removed
        finally:
            if marker is not None:
                marker.remove()
        return first_of_host and not sees_another

    def _run_while_others_wait(self, fn: Callable[[], object], runs_here: bool) -> None:
        """The others wait in many short collectives, since one long collective would time out."""
        result = start_in_thread(fn if runs_here else lambda: None, "while others wait")
        while not all(self.all_gather(bool(wait([result], RANK_POLL_SECONDS).done))):
            pass
        with self.raise_on_all():
            result.result()

    def run_on_rank0(self, fn: Callable[[], object]) -> None:
        """As `run_once_per_host`, on rank 0 alone."""
        self._run_while_others_wait(fn, self.is_rank0)

    def decide_on_rank0(self, fn: Callable[[], T]) -> T:
        """Call `fn` on rank 0. Every rank returns its result, or raises its exception."""
        result: Any = None
        with self.raise_on_all(names_host=False):
            if self.is_rank0:
                result = fn()
        return self.broadcast(result)


def init_distributed(
    device: str = "auto", threads: int | None = None, timeout: timedelta | None = None
) -> DistributedContext:
    """Join the other ranks as the launcher's variables say (`environment.py`); a process that was
    not launched is alone.

    device: auto, cpu or cuda.
    threads: CPU threads of this rank; by default its part of the cores.
    timeout: after which a collective of the training group fails, and with NCCL aborts the process;
        by default torch's (10 minutes with NCCL, 30 with gloo).

    Raises UserError for a device that is not there or that ranks share, for many more threads than
    cores, and for variables that are no launcher's; RunFailed where rank 0 does not answer.
    """
    info = read_rank_info()
    _terminate_with_launcher()
    chosen = choose_device(device, info.local_rank)
    on_gpu = chosen.type == "cuda"
    if on_gpu:
        set_allocator_defaults()
        torch.cuda.set_device(chosen)
    _check_threads(threads)
    # torchrun sets OMP_NUM_THREADS=1 for every rank, which leaves cores idle on a CPU, and, with
    # cpu_offload, in the optimizer of a rank on a GPU.
    torch.set_num_threads(threads or threads_per_rank(info.local_world_size))
    if not on_gpu:
        keep_freed_memory()
    if info.world_size == 1:
        return DistributedContext(info, chosen, None)
    global _store, _init_count, _reports_errors
    # Flight recorder: the last collectives of each rank, for the report of a stall. It costs 5 µs a
    # collective, and is read when the first group is made.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000" if on_gpu else "64")
    # Each initialization in the same processes has its own prefix, so that it does not find the
    # keys of an earlier one.
    _init_count = _init_count + 1
    _reports_errors = None
    allow_open_connections(info.world_size)
    find_rank0(info)
    with report_missing_ranks(info.rank, info.world_size, f"{_init_count}"):
        rank = info.rank
        world_size = info.world_size
        try:
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                store: dist.Store = connect_to_store(timedelta(seconds=JOIN_SECONDS))
                store = dist.PrefixStore(name_this_start(store, rank, world_size), store)
            else:
                store, rank, world_size = next(dist.rendezvous("env://"))
        except dist.DistNetworkError as problem:
            if "failed to listen" not in str(problem):
                raise
            raise UserError(
                f"environment: MASTER_PORT = {os.environ['MASTER_PORT']}: rank 0 cannot listen on"
                " it; choose a free port"
            ) from None
        _store = dist.PrefixStore(f"lmforge-{_init_count}", store)
        # A launcher may have counted some of the ranks: they tell the others.
        place = platform.node(), info.local_rank
        if places := exchange("host", _store, rank, world_size, place, reads=not info.is_counted):
            check_local_ranks(places)
            info = count_by_host(info, [host for host, _ in places])
            os.environ |= {
                "LOCAL_WORLD_SIZE": f"{info.local_world_size}",
                "GROUP_RANK": f"{info.node}",
            }
            torch.set_num_threads(threads or threads_per_rank(info.local_world_size))
        choose_gloo_interface(several_hosts=info.local_world_size < info.world_size)
        # Before NCCL connects the ranks: its own error for two ranks on one GPU is unclear.
        if on_gpu:
            identity = platform.node(), str(torch.cuda.get_device_properties(chosen).uuid)
            check_gpus_differ(exchange("gpu", _store, rank, world_size, identity))
        # On GPUs gloo too, for tensors in host memory.
        backend, device_id = ("cpu:gloo,cuda:nccl", chosen) if on_gpu else ("gloo", None)
        dist.init_process_group(
            backend,
            store=_store,
            rank=rank,
            world_size=world_size,
            device_id=device_id,
            timeout=timeout,
        )
    with report_missing_ranks(info.rank, info.world_size, f"{_init_count}-groups"):
        control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT, group_desc="control")
        saving = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT, group_desc="saving")
    return DistributedContext(info, chosen, control, saving)


def code_digest() -> str:
    """Hexadecimal digits that differ where the code of lmforge does: a clone on each host may be
    another commit.
    """
    folder = Path(__file__).parents[2]  # the whole package
    digest = xxhash.xxh3_64()
    for path in sorted(folder.rglob("*.py")):
        digest.update(bytes(path.relative_to(folder)))
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def describe_other_code(dist_ctx: DistributedContext) -> list[str]:
    """A line that names the hosts whose code differs from that of rank 0's. Every rank calls it."""
    own = (platform.node(), code_digest()) if dist_ctx.rank_info.local_rank == 0 else None
    (first, usual), *others = [each for each in dist_ctx.all_gather(own) if each]
    differing = [f"{host} has {digest}" for host, digest in others if digest != usual]
    if not differing:
        return []
    return [
        (
            f"the code of lmforge differs: {first} has {usual}, {name_some(differing)}; install the"
            " same on all hosts"
        )
    ]


def use_device_in_thread(device: torch.device) -> None:
    """Make a rank's GPU the current one of this thread.

    A new thread begins with GPU 0, and would open a context on it.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def exchange(
    what: str,
    store: dist.Store,
    rank: int,
    world_size: int,
    value: tuple[Any, ...],
    *,
    reads: bool = True,
) -> list[Any]:
    """`value`, of JSON's types, of every rank, by rank.

    Every rank calls it; it waits for the others as `store.get` does. One that does not read waits
    for none, and gets none.
    """
    store.set(f"{what}-{rank}", json.dumps(value))
    values = store.multi_get([f"{what}-{number}" for number in range(world_size)]) if reads else []
    store.set(f"{what}-read-{rank}", "")
    # Rank 0 serves the store, so it must not end before the others have read.
    if reads and rank == 0:
        store.wait([f"{what}-read-{number}" for number in range(world_size)])
    return [tuple(json.loads(each)) for each in values]


def check_gpus_differ(gpus: Sequence[tuple[str, str]]) -> None:
    """Raise UserError where two ranks have the same (host, GPU).

    NCCL would fail with a message that names neither.
    """
    for rank, gpu in enumerate(gpus):
        if (first := gpus.index(gpu)) < rank:
            raise UserError(
                f"ranks {first} and {rank} have the same GPU of {gpu[0]}; start one rank for each"
                " GPU, or let the launcher show each rank a GPU of its own"
            )


def _check_threads(threads: int | None) -> None:
    cores = threads_per_rank(1)
    most = max(MIN_THREADS_LIMIT, THREADS_PER_CORE * cores)
    if threads and threads > most:
        raise UserError(
            f"train.threads = {threads}: this process may use {cores} cores; leave it out, or give"
            f" at most {most}"
        )


def _terminate_with_launcher() -> None:
    """Make the kernel send SIGTERM when the launcher is killed.

    Otherwise ranks would continue to train, and keep the run locked.
    """
    global _launcher
    library = ctypes.CDLL(None)
    # Removed, because processes that a rank starts have another parent.
    launcher = os.environ.pop(LAUNCHER_PID_VARIABLE, None)
    if (
        launcher is None
        or not launcher.isdecimal()
        or "RANK" not in os.environ
        or not hasattr(library, "prctl")
    ):
        return
    _launcher = int(launcher)
    parent_death_signal = 1
    library.prctl(parent_death_signal, signal.SIGTERM)
    if launcher_is_lost():  # it was killed before the call above
        os.kill(os.getpid(), signal.SIGTERM)


def is_launched_by_us() -> bool:
    """Whether a launcher of `lmforge` started this rank, as `--launch.processes` does."""
    return _launcher is not None


def launcher_is_lost() -> bool:
    """Whether the launcher of `lmforge` that started this rank has ended before it."""
    return _launcher is not None and os.getppid() != _launcher


def keep_freed_memory() -> None:
    """Let glibc keep the memory of freed tensors, as the GPU allocator does.

    By default it returns large blocks to the kernel, which then maps and zeroes memory for every
    activation of every step: 5 to 8 % of a training step on a CPU. On macOS and musl this does
    nothing.
    """
    library = ctypes.CDLL(None)
    if not (hasattr(library, "mallopt") and hasattr(library, "gnu_get_libc_version")):
        return
    trim_threshold = -1
    mmap_threshold = -3
    largest = 2**31 - 1
    library.mallopt(trim_threshold, largest)
    # Before version 2.35 glibc refuses more than 32 MiB.
    library.mallopt(mmap_threshold, largest) or library.mallopt(mmap_threshold, 2**25)


def destroy_distributed() -> None:
    """Destroy the process groups, if there are any, and release the standby ranks."""
    if dist.is_initialized():
        release_standby(dist.get_rank())
        dist.destroy_process_group()
        if "torch.distributed.tensor" in sys.modules:
            # Results are kept by the shape of their mesh: a later run of this process would be
            # given groups that are gone. Private to torch; checked with 2.11 and 2.13.0.
            # torch.distributed.tensor.debug has it too, but its import takes a second.
            from torch.distributed.tensor import DTensor, _redistribute

            DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
            torch._C._clear_DTensor_sharding_propagator_cache()
            _redistribute._gen_transform_infos.cache_clear()


# The store outlives the groups: it still answers when another rank has died and every collective
# fails.
_store: dist.Store | None = None
_init_count = 0
_launcher: int | None = None
_reports_errors: bool | None = None


def claim_error_reporting() -> bool:
    """Whether this rank is the first to call this: the one that reports an error to the user.

    The answer of a process does not change.
    """
    global _reports_errors
    if _store is None:
        return read_rank_info().is_rank0
    if _reports_errors is None:
        try:
            _reports_errors = int(_store.add("lmforge/error-reported", 1)) == 1
        except RuntimeError:  # the store was lost with its host
            _reports_errors = True
    return _reports_errors
