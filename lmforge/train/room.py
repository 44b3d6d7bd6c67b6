"""When memory runs out: how much was asked for, how much there was, and what would have fitted.

What would have fitted is arithmetic on the shape and the options (`Need`), held against the room that this process
had before it built anything. The failure is itself a measurement: where the arithmetic says that it should have fitted,
everything is counted larger by what it was short.
"""

import re
import resource
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch

from lmforge.cluster.ranks import Ranks
from lmforge.config import BatchPlan, StageConfig
from lmforge.errors import RunFailed
from lmforge.model.activations import block_bytes, saved_bytes
from lmforge.model.flops import parameters
from lmforge.model.shapes import ModelConfig
from lmforge.objectives.chunked import CHUNK_TOKENS
from lmforge.parallel.fits import choose_engine
from lmforge.parallel.mesh import sharding_of
from lmforge.train.material import counted
from lmforge.train.policy import has_reference

GIB = 2**30
# What arithmetic leaves out: short-lived copies, and memory in pieces too small for what is asked. On a CPU, where the C
# library leaves many such pieces between what is kept and what is recomputed, up to 1.35, 1.9 and 2.9 times the estimate was
# measured, by `parallel.recompute`, beside what libraries and threads take whatever is trained (290 MiB).
GPU_MARGIN = 1.1
HOST_MARGINS = {"none": 1.4, "blocks": 2.0, "operators": 2.0, "full": 3.0}
HOST_BYTES = 320 * 2**20
_SAID = re.compile(r"can't allocate memory|[Cc]annot allocate memory|out of memory|bad_alloc|[Uu]nable to allocate")
_ASKED = re.compile(r"(?:tried to allocate|Tried to allocate|Unable to allocate) ([\d.]+) (bytes|KiB|MiB|GiB|TiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB, "TiB": 2**40}


def out_of_memory(problem: BaseException) -> bool:
    """Whether torch, numpy or Python found no memory; on a GPU or in the host."""
    if isinstance(problem, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(problem, RuntimeError) and _SAID.search(str(problem)) is not None


@dataclass(frozen=True)
class Room:
    """Bytes that this process has and may still take, and what says so, in words."""

    used: int
    free: int
    bound: str


def room(device: torch.device, local_ranks: int) -> Room | None:
    """The tightest bound on the memory in which a model trains on `device`; None where the system does not tell.

    What the ranks of a host have in common is shared out equally.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return Room(total - free - idle, free + idle, f"this GPU's {_size(total)}")
    status = _numbers(Path("/proc/self/status"))
    if not status:
        return None
    resident = status["VmRSS"]
    bounds = [Room(resident, _numbers(Path("/proc/meminfo"))["MemAvailable"] // local_ranks, "the memory of this host")]
    for which, used, words in (
        (resource.RLIMIT_AS, status["VmSize"], "address space (ulimit -v)"),
        (resource.RLIMIT_DATA, status["VmData"], "data (ulimit -d)"),
    ):
        limit, _ = resource.getrlimit(which)
        if limit != resource.RLIM_INFINITY:
            bounds.append(Room(used, max(0, limit - used), f"{_size(limit)} of {words}"))
    for folder, limit_name, used_name in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            limit, used = (int(Path(folder, name).read_text()) for name in (limit_name, used_name))
        except (OSError, ValueError):  # "max"
            continue
        bounds.append(Room(resident, max(0, limit - used) // local_ranks, f"{_size(limit)} of this container"))
    return min(bounds, key=lambda bound: bound.free)


def _size(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"


def _numbers(path: Path) -> dict[str, int]:
    """Bytes by name, of a file in the form of /proc/meminfo; empty where there is none."""
    try:
        return {name: int(kib) * 2**10 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", path.read_text(), re.M)}
    except OSError:
        return {}


@dataclass(frozen=True)
class Setting:
    """What the memory of a rank goes by, of all that can be chosen."""

    rows: int
    engine: str
    shards: int
    keep_gathered: bool
    recompute: str
    offload: bool


@dataclass(frozen=True)
class Need:
    """What a run needs on each rank. `number_bytes` is that of the compute dtype."""

    config: StageConfig
    shape: ModelConfig
    plan: BatchPlan
    number_bytes: int
    on_gpu: bool

    def weights_bytes(self, setting: Setting) -> int:
        """Bytes of a rank that do not go with its rows: parameters, gradients and states, at rest and gathered."""
        chosen, shape, number_bytes = self.config.parallel, self.shape, self.number_bytes
        total, trained = (count // chosen.tensor_ranks for count in counted(self.config, shape))
        master = 4 if self.config.train.master_dtype == "fp32" else 2
        states = (1 if self.config.optimizer.name == "sgd" else 2) * (4 if self.config.optimizer.state_dtype == "fp32" else 2)
        resting = total // setting.shards * master + trained // setting.shards * (master + states)
        if has_reference(self.config):
            resting += parameters(shape).total // setting.shards * master
        bytes_now = 0 if setting.offload and self.on_gpu else resting
        if setting.engine in ("fsdp1", "fsdp2"):
            matrix = shape.vocab_size * shape.hidden_size
            block = (parameters(shape).multiplied - matrix) // shape.num_hidden_layers
            unit = max(matrix, block)
            whole = total if setting.keep_gathered else 2 * unit
            # Gradients of a unit before they are reduced, and as they are: in fp32.
            bytes_now += whole * number_bytes + min(unit, trained) * (number_bytes + 4)
            if not chosen.reduce_every_micro_batch:
                bytes_now += trained * 4
        elif number_bytes < master:
            bytes_now += total * number_bytes  # autocast keeps what it has cast
        return bytes_now

    def rows_bytes(self, setting: Setting) -> int:
        """Bytes of one micro-batch at most, between its forward and its backward pass and within them.

        Raises ValueError where there is no formula for the shape. What tensor ranks share of activations is not
        subtracted: the estimate errs upwards.
        """
        chosen, shape, number_bytes = self.config.parallel, self.shape, self.number_bytes
        length = self.plan.length // chosen.context_ranks
        dense = not self.on_gpu
        block_now = block_bytes(shape, setting.rows, length, number_bytes=number_bytes, dense_mask=dense)
        bytes_now = saved_bytes(
            shape,
            setting.rows,
            length,
            number_bytes=number_bytes,
            dense_mask=dense,
            recompute=setting.recompute,
            every=chosen.recompute_every,
            dropout=self.config.model.dropout > 0,
        )
        # The backward pass of a block, and what it computes again for it.
        bytes_now += block_now * (1 if setting.recompute == "none" else 2)
        chunk = min(CHUNK_TOKENS, setting.rows * length)
        logits = chunk * shape.vocab_size * (2 * 4 + number_bytes)
        bytes_now += max(logits, shape.vocab_size * shape.hidden_size * 4)
        if dense:
            bytes_now += 3 * setting.rows * length * self.plan.length  # the mask, as it is made
        return bytes_now

    def cautious_bytes(self, setting: Setting) -> int:
        """All that a rank needs for a step, with what the arithmetic leaves out."""
        margin = GPU_MARGIN if self.on_gpu else HOST_MARGINS[setting.recompute]
        return int(GPU_MARGIN * self.weights_bytes(setting) + margin * self.rows_bytes(setting))

    @property
    def beside(self) -> int:
        """Bytes that come to it whatever is trained."""
        return 0 if self.on_gpu else HOST_BYTES

    def setting(self, ranks: Ranks) -> Setting:
        """That of the recipe."""
        chosen = self.config.parallel
        sharding = sharding_of(chosen, ranks.count, ranks.place.local_ranks)
        engine = choose_engine(chosen, ranks.count, ranks.device.type)
        return Setting(
            self.plan.micro_batch_rows,
            engine,
            sharding.shards if engine in ("fsdp1", "fsdp2") else 1,
            sharding.keep_gathered,
            chosen.recompute,
            chosen.offload,
        )


def what_fits(need: Need, now: Setting, ranks: int, available: int) -> str:
    """What to do, in words, after `now` did not fit into `available` bytes on each of `ranks`; only what fits by estimate."""
    if need.config.parallel.pipeline_ranks > 1:
        return "for a pipeline there is no estimate of what would fit"
    try:
        estimated = need.cautious_bytes(now)
    except ValueError:
        return f"there is no estimate of what would fit a {need.shape.model_type} model"
    available -= need.beside
    # It did not fit, whatever the arithmetic says.
    larger = max(1.0, available / estimated)

    def needed(setting: Setting) -> int:
        return int(need.cautious_bytes(setting) * larger)

    def largest(setting: Setting, below: int) -> Setting | None:
        rows = need.plan.micro_batch_rows * need.plan.accumulation
        sizes = [size for size in range(1, min(rows, below) + 1) if rows % size == 0]
        return _first(lambda each: needed(each) <= available, [replace(setting, rows=size) for size in reversed(sizes)])

    ways = [_words(need, now, found)] if (found := largest(now, now.rows - 1)) else []
    # One thing at a time, the cheapest of each kind first.
    engine = now.engine if now.engine.startswith("fsdp") else "fsdp2"
    full = replace(now, engine=engine, shards=ranks // need.config.parallel.tensor_ranks, keep_gathered=False)
    alone = ranks == 1
    kinds = [
        [replace(now, recompute=how) for how in ("operators", "full")] if now.recompute != "full" else [],
        [replace(now, keep_gathered=False), full] if not alone else [],
        [replace(now if now.engine == engine else full, offload=True)] if need.on_gpu else [],
    ]
    candidates = [[each for each in kind if each != now and needed(each) < needed(now)] for kind in kinds]
    ways += [_words(need, now, found) for kind in candidates if (found := _first(lambda each: needed(each) <= available, kind))]
    if ways:
        return f"by estimate would fit: {', or '.join(ways)}"
    several = (now, *chain(*candidates))
    least = [*several, *(replace(each, recompute="full") for each in several)]
    for setting in least:
        if found := largest(setting, now.rows):
            return f"by estimate would fit: {_words(need, now, found)}"
    smallest = min((replace(each, rows=1) for each in least), key=needed)
    short = _size(needed(smallest) + need.beside)
    more = [ranks * times for times in range(2, need.plan.rows + 1) if need.plan.rows % (need.plan.ranks * times) == 0]
    share = [replace(smallest, engine="fsdp2", shards=count, keep_gathered=False) for count in more]
    enough = _first(lambda each: needed(each) <= available, share)
    on_more = f"; on {enough.shards} ranks under parallel.engine = fsdp2 that would fit" if enough else ""
    return f"by estimate nothing fits: {_words(need, now, smallest) or 'this'} needs at least {short} a rank{on_more}"


def _first(fits: Callable[[Setting], bool], settings: list[Setting]) -> Setting | None:
    return next(filter(fits, settings), None)


def _words(need: Need, now: Setting, then: Setting) -> str:
    """How to get from one setting to the other, in options."""
    words = []
    if then.rows != now.rows:
        words.append(f"train.micro_batch_rows = {then.rows} (it was {now.rows})")
    if then.engine != now.engine:
        words.append(f"parallel.engine = {then.engine}")
    said = need.config.parallel
    if (then.shards, then.keep_gathered) != (now.shards, now.keep_gathered) and (then.engine == now.engine or said.sharding):
        words.append("parallel.sharding = full-shard" + (" (and no hybrid_ranks)" if said.hybrid_ranks else ""))
    if then.recompute != now.recompute:
        words.append(f"parallel.recompute = {then.recompute}")
    if then.offload != now.offload:
        words.append("parallel.offload = true")
    return " with ".join(words)


@contextmanager
def within_memory(need: Need, ranks: Ranks, where: Callable[[], str]) -> Iterator[None]:
    """RunFailed, in one line that says what would have fitted, where memory runs out inside. `where` says how far it got.

    Entered before anything large is built.
    """
    before = room(ranks.device, ranks.place.local_ranks)
    try:
        yield
    except (MemoryError, RuntimeError) as problem:
        if not out_of_memory(problem):
            raise
        then = room(ranks.device, ranks.place.local_ranks)
        # What the frames of the failed step hold could leave no room to tell of it.
        traceback.clear_frames(problem.__traceback__)
        asked = _ASKED.search(str(problem))
        told = f"{_size(float(asked[1]) * _UNITS[asked[2]])} were asked for" if asked else "a request was refused"
        if then is not None:
            told += f", with {_size(then.used)} in use and {_size(then.free)} left of {then.bound}"
        way = what_fits(need, need.setting(ranks), ranks.count, before.free) if before else "how much there was is not known"
        raise RunFailed(f"rank {ranks.place.rank}, {where()}: out of memory: {told}; {way}") from problem
