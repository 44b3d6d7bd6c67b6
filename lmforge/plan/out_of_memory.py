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

from lmforge.cluster.distributed import DistributedContext
from lmforge.config.post_training import AlignConfig
from lmforge.config.run import BatchPlan, StageConfig
from lmforge.errors import RunFailed
from lmforge.model.config import ModelConfig
from lmforge.model.flops import parameter_count
from lmforge.objectives.cross_entropy import CHUNK_TOKENS
from lmforge.objectives.policy import build_policy_loss_config
from lmforge.parallel.dims import parallel_dims
from lmforge.parallel.validate import choose_engine
from lmforge.plan.activations import activation_bytes, block_activation_bytes
from lmforge.plan.parameter_counts import count_parameters

GIB = 2**30
# What arithmetic leaves out: short-lived copies, and memory in pieces too small for what is asked. On a CPU, where the C
# library leaves many such pieces between what is kept and what is recomputed, up to 1.35, 1.9 and 2.9 times the estimate was
# measured, by `parallel.activation_checkpointing`, beside what libraries and threads take whatever is trained (290 MiB).
GPU_MARGIN = 1.1
HOST_MARGINS = {"none": 1.4, "selective-blocks": 2.0, "selective-ops": 2.0, "full": 3.0}
HOST_OVERHEAD_BYTES = 320 * 2**20
_OUT_OF_MEMORY_PATTERN = re.compile(
    r"can't allocate memory|[Cc]annot allocate memory|out of memory|bad_alloc|[Uu]nable to allocate"
)
_REQUESTED_BYTES_PATTERN = re.compile(
    r"(?:tried to allocate|Tried to allocate|Unable to allocate) ([\d.]+) (bytes|KiB|MiB|GiB|TiB)"
)
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB, "TiB": 2**40}


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether torch, numpy or Python found no memory; on a GPU or in the host."""
    if isinstance(problem, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(problem, RuntimeError) and _OUT_OF_MEMORY_PATTERN.search(str(problem)) is not None


@dataclass(frozen=True)
class AvailableMemory:
    """Bytes that this process has and may still take, and what says so, in words."""

    used_bytes: int
    free_bytes: int
    limited_by: str


def available_memory(device: torch.device, local_world_size: int) -> AvailableMemory | None:
    """The tightest bound on the memory in which a model trains on `device`; None where the system does not tell.

    What the ranks of a host have in common is shared out equally.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return AvailableMemory(total - free - idle, free + idle, f"this GPU's {_format_bytes(total)}")
    status = _read_kib_table(Path("/proc/self/status"))
    if not status:
        return None
    resident = status["VmRSS"]
    bounds = [
        AvailableMemory(
            resident, _read_kib_table(Path("/proc/meminfo"))["MemAvailable"] // local_world_size, "the memory of this host"
        )
    ]
    for which, used, words in (
        (resource.RLIMIT_AS, status["VmSize"], "address space (ulimit -v)"),
        (resource.RLIMIT_DATA, status["VmData"], "data (ulimit -d)"),
    ):
        limit, _ = resource.getrlimit(which)
        if limit != resource.RLIM_INFINITY:
            bounds.append(AvailableMemory(used, max(0, limit - used), f"{_format_bytes(limit)} of {words}"))
    for folder, limit_name, used_name in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            limit, used = (int(Path(folder, name).read_text()) for name in (limit_name, used_name))
        except (OSError, ValueError):  # "max"
            continue
        bounds.append(
            AvailableMemory(resident, max(0, limit - used) // local_world_size, f"{_format_bytes(limit)} of this container")
        )
    return min(bounds, key=lambda bound: bound.free_bytes)


def _format_bytes(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"


def _read_kib_table(path: Path) -> dict[str, int]:
    """Bytes by name, of a file in the form of /proc/meminfo; empty where there is none."""
    try:
        return {name: int(kib) * 2**10 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", path.read_text(), re.M)}
    except OSError:
        return {}


def _has_frozen_reference(config: StageConfig) -> bool:
    """Whether a run keeps a frozen copy of its first weights beside the policy."""
    if not isinstance(config, AlignConfig) or config.reference != "copy":
        return False
    return config.align.method != "grpo" or build_policy_loss_config(config.rollout).kl_estimator != "none"


@dataclass(frozen=True)
class MemoryOptions:
    """What the memory of a rank goes by, of all that can be chosen."""

    micro_batch_size: int
    engine: str
    fsdp_degree: int
    keep_unsharded: bool
    activation_checkpointing: str
    cpu_offload: bool


@dataclass(frozen=True)
class MemoryEstimator:
    """What a run needs on each rank. `number_bytes` is that of the compute dtype."""

    config: StageConfig
    model_config: ModelConfig
    plan: BatchPlan
    compute_dtype_bytes: int
    on_gpu: bool

    def model_state_bytes(self, options: MemoryOptions) -> int:
        """Bytes of a rank that do not go with its rows: parameters, gradients and states, at rest and gathered."""
        chosen, shape, number_bytes = self.config.parallel, self.model_config, self.compute_dtype_bytes
        total, trained = (count // chosen.tensor_parallel_degree for count in count_parameters(self.config, shape))
        master = 4 if self.config.train.master_dtype == "fp32" else 2
        states = (1 if self.config.optimizer.name == "sgd" else 2) * (4 if self.config.optimizer.state_dtype == "fp32" else 2)
        resting = total // options.fsdp_degree * master + trained // options.fsdp_degree * (master + states)
        if _has_frozen_reference(self.config):
            resting += parameter_count(shape).total // options.fsdp_degree * master
        bytes_now = 0 if options.cpu_offload and self.on_gpu else resting
        if options.engine in ("fsdp1", "fsdp2"):
            matrix = shape.vocab_size * shape.hidden_size
            block = (parameter_count(shape).active_matmul - matrix) // shape.num_hidden_layers
            unit = max(matrix, block)
            whole = total if options.keep_unsharded else 2 * unit
            # Gradients of a unit before they are reduced, and as they are: in fp32.
            bytes_now += whole * number_bytes + min(unit, trained) * (number_bytes + 4)
            if not chosen.reduce_every_micro_batch:
                bytes_now += trained * 4
        elif number_bytes < master:
            bytes_now += total * number_bytes  # autocast keeps what it has cast
        return bytes_now

    def activation_bytes(self, options: MemoryOptions) -> int:
        """Bytes of one micro-batch at most, between its forward and its backward pass and within them.

        Raises ValueError where there is no formula for the shape. What tensor ranks share of activations is not
        subtracted: the estimate errs upwards.
        """
        chosen, shape, number_bytes = self.config.parallel, self.model_config, self.compute_dtype_bytes
        length = self.plan.length // chosen.context_parallel_degree
        dense = not self.on_gpu
        block_now = block_activation_bytes(shape, options.micro_batch_size, length, dtype_bytes=number_bytes, dense_mask=dense)
        bytes_now = activation_bytes(
            shape,
            options.micro_batch_size,
            length,
            dtype_bytes=number_bytes,
            dense_mask=dense,
            activation_checkpointing=options.activation_checkpointing,
            activation_checkpointing_every=chosen.activation_checkpointing_every,
            has_dropout=self.config.model.dropout > 0,
        )
        # The backward pass of a block, and what it computes again for it.
        bytes_now += block_now * (1 if options.activation_checkpointing == "none" else 2)
        chunk = min(CHUNK_TOKENS, options.micro_batch_size * length)
        logits = chunk * shape.vocab_size * (2 * 4 + number_bytes)
        bytes_now += max(logits, shape.vocab_size * shape.hidden_size * 4)
        if dense:
            bytes_now += 3 * options.micro_batch_size * length * self.plan.length  # the mask, as it is made
        return bytes_now

    def required_bytes(self, options: MemoryOptions) -> int:
        """All that a rank needs for a step, with what the arithmetic leaves out."""
        margin = GPU_MARGIN if self.on_gpu else HOST_MARGINS[options.activation_checkpointing]
        return int(GPU_MARGIN * self.model_state_bytes(options) + margin * self.activation_bytes(options))

    @property
    def overhead_bytes(self) -> int:
        """Bytes that come to it whatever is trained."""
        return 0 if self.on_gpu else HOST_OVERHEAD_BYTES

    def current_options(self, dist_ctx: DistributedContext) -> MemoryOptions:
        """That of the recipe."""
        chosen = self.config.parallel
        sharding = parallel_dims(chosen, dist_ctx.world_size, dist_ctx.rank_info.local_world_size)
        engine = choose_engine(chosen, dist_ctx.world_size, dist_ctx.device.type)
        return MemoryOptions(
            self.plan.micro_batch_size,
            engine,
            sharding.fsdp_degree if engine in ("fsdp1", "fsdp2") else 1,
            sharding.keep_unsharded,
            chosen.activation_checkpointing,
            chosen.cpu_offload,
        )


def suggest_what_fits(estimator: MemoryEstimator, current: MemoryOptions, world_size: int, available_bytes: int) -> str:
    """What to do, in words, after `now` did not fit into `available` bytes on each of `ranks`; only what fits by estimate."""
    if estimator.config.parallel.pipeline_parallel_degree > 1:
        return "for a pipeline there is no estimate of what would fit"
    try:
        estimated = estimator.required_bytes(current)
    except ValueError:
        return f"there is no estimate of what would fit a {estimator.model_config.model_type} model"
    available_bytes -= estimator.overhead_bytes
    # It did not fit, whatever the arithmetic says.
    larger = max(1.0, available_bytes / estimated)

    def needed(setting: MemoryOptions) -> int:
        return int(estimator.required_bytes(setting) * larger)

    def largest(setting: MemoryOptions, below: int) -> MemoryOptions | None:
        rows = estimator.plan.micro_batch_size * estimator.plan.accumulation
        sizes = [size for size in range(1, min(rows, below) + 1) if rows % size == 0]
        return _first_fitting(
            lambda each: needed(each) <= available_bytes, [replace(setting, micro_batch_size=size) for size in reversed(sizes)]
        )

    ways = [_option_changes(estimator, current, found)] if (found := largest(current, current.micro_batch_size - 1)) else []
    # One thing at a time, the cheapest of each kind first.
    engine = current.engine if current.engine.startswith("fsdp") else "fsdp2"
    full = replace(
        current, engine=engine, fsdp_degree=world_size // estimator.config.parallel.tensor_parallel_degree, keep_unsharded=False
    )
    alone = world_size == 1
    kinds = [
        [replace(current, activation_checkpointing=how) for how in ("selective-ops", "full")]
        if current.activation_checkpointing != "full"
        else [],
        [replace(current, keep_unsharded=False), full] if not alone else [],
        [replace(current if current.engine == engine else full, cpu_offload=True)] if estimator.on_gpu else [],
    ]
    candidates = [[each for each in kind if each != current and needed(each) < needed(current)] for kind in kinds]
    ways += [
        _option_changes(estimator, current, found)
        for kind in candidates
        if (found := _first_fitting(lambda each: needed(each) <= available_bytes, kind))
    ]
    if ways:
        return f"by estimate would fit: {', or '.join(ways)}"
    several = (current, *chain(*candidates))
    least = [*several, *(replace(each, activation_checkpointing="full") for each in several)]
    for setting in least:
        if found := largest(setting, current.micro_batch_size):
            return f"by estimate would fit: {_option_changes(estimator, current, found)}"
    smallest = min((replace(each, micro_batch_size=1) for each in least), key=needed)
    short = _format_bytes(needed(smallest) + estimator.overhead_bytes)
    more = [
        world_size * times
        for times in range(2, estimator.plan.rows + 1)
        if estimator.plan.rows % (estimator.plan.ranks * times) == 0
    ]
    share = [replace(smallest, engine="fsdp2", fsdp_degree=count, keep_unsharded=False) for count in more]
    enough = _first_fitting(lambda each: needed(each) <= available_bytes, share)
    on_more = f"; on {enough.fsdp_degree} ranks under parallel.engine = fsdp2 that would fit" if enough else ""
    return f"by estimate nothing fits: {_option_changes(estimator, current, smallest) or 'this'} needs at least {short} a rank{on_more}"


def _first_fitting(fits: Callable[[MemoryOptions], bool], settings: list[MemoryOptions]) -> MemoryOptions | None:
    return next(filter(fits, settings), None)


def _option_changes(estimator: MemoryEstimator, current: MemoryOptions, suggested: MemoryOptions) -> str:
    """How to get from one setting to the other, in options."""
    words = []
    if suggested.micro_batch_size != current.micro_batch_size:
        words.append(f"train.micro_batch_size = {suggested.micro_batch_size} (it was {current.micro_batch_size})")
    if suggested.engine != current.engine:
        words.append(f"parallel.engine = {suggested.engine}")
    said = estimator.config.parallel
    if (suggested.fsdp_degree, suggested.keep_unsharded) != (current.fsdp_degree, current.keep_unsharded) and (
        suggested.engine == current.engine or said.sharding
    ):
        words.append("parallel.sharding = full-shard" + (" (and no shard_degree)" if said.shard_degree else ""))
    if suggested.activation_checkpointing != current.activation_checkpointing:
        words.append(f"parallel.activation_checkpointing = {suggested.activation_checkpointing}")
    if suggested.cpu_offload != current.cpu_offload:
        words.append("parallel.cpu_offload = true")
    return " with ".join(words)


@contextmanager
def explain_out_of_memory(
    estimator: MemoryEstimator, dist_ctx: DistributedContext, describe_progress: Callable[[], str]
) -> Iterator[None]:
    """RunFailed, in one line that says what would have fitted, where memory runs out inside. `where` says how far it got.

    Entered before anything large is built.
    """
    before = available_memory(dist_ctx.device, dist_ctx.rank_info.local_world_size)
    try:
        yield
    except (MemoryError, RuntimeError) as problem:
        if not is_out_of_memory(problem):
            raise
        then = available_memory(dist_ctx.device, dist_ctx.rank_info.local_world_size)
        # What the frames of the failed step hold could leave no room to tell of it.
        traceback.clear_frames(problem.__traceback__)
        asked = _REQUESTED_BYTES_PATTERN.search(str(problem))
        told = f"{_format_bytes(float(asked[1]) * _UNITS[asked[2]])} were asked for" if asked else "a request was refused"
        if then is not None:
            told += (
                f", with {_format_bytes(then.used_bytes)} in use and {_format_bytes(then.free_bytes)} left of {then.limited_by}"
            )
        way = (
            suggest_what_fits(estimator, estimator.current_options(dist_ctx), dist_ctx.world_size, before.free_bytes)
            if before
            else "how much there was is not known"
        )
        raise RunFailed(f"rank {dist_ctx.rank_info.rank}, {describe_progress()}: out of memory: {told}; {way}") from problem
