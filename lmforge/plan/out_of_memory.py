"""When memory runs out: how much was requested, how much there was, and what would have fitted.

What would have fitted is arithmetic on the model config and the options (`MemoryEstimator`), compared with the memory that
was free before this process built anything. The failure is itself a measurement: where the arithmetic says that the run
should have fitted, all estimates are scaled up by the same factor, until it does not.
"""

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Self

import torch

from lmforge.cluster.distributed import DistributedContext
from lmforge.cluster.memory import (
    available_memory,
    check_fits,
    describe_request,
    format_memory,
    is_out_of_memory,
    write_memory_snapshot,
)
from lmforge.config.batch_plan import BatchPlan, divisors
from lmforge.config.sections import ParallelOptions
from lmforge.config.stage import StageConfig
from lmforge.data.labels import CHUNK_TOKENS, fused_chunk_tokens
from lmforge.errors import RunFailed
from lmforge.model.attention import MAX_STORED_KEYS
from lmforge.model.config import ModelConfig
from lmforge.model.flops import parameter_count
from lmforge.parallel.dims import ParallelDims, parallel_dims
from lmforge.parallel.precision import choose_compile, choose_dtype
from lmforge.parallel.validate import choose_engine
from lmforge.plan.activations import activation_bytes, block_activation_bytes
from lmforge.plan.memory import DTYPE_BYTES, ParameterCounts, checkpoint_bytes
from lmforge.plan.parameter_counts import count_parameters

# What the arithmetic leaves out: short-lived copies, and fragmentation. On a CPU, where the C library fragments memory between
# what is kept and what is recomputed, up to 1.35, 1.9 and 2.9 times the estimate was measured, by
# `parallel.activation_checkpointing`, beside what libraries and threads take whatever is trained (290 MiB).
GPU_MARGIN = 1.1
HOST_MARGINS = {"none": 1.4, "selective-blocks": 2.0, "selective-ops": 2.0, "full": 3.0}
HOST_OVERHEAD_BYTES = 320 * 2**20
# Of a GPU's memory, what a run may take: the rest is of NCCL, of CUDA's context and of the desktop.
USABLE_FRACTION = 0.9
# Of a token in a batch: tokens, labels, positions and rng keys in int64, document ids in int32.
BATCH_BYTES_PER_TOKEN = 36


@dataclass(frozen=True)
class MemorySetting:
    """What decides the memory of a rank, of all that a user can choose. `options.engine` is not auto."""

    micro_batch_size: int
    options: ParallelOptions
    world_size: int
    local_world_size: int

    def with_options(self, **changes: Any) -> "MemorySetting":
        return replace(self, options=self.options.model_copy(update=changes))

    @property
    def is_fsdp(self) -> bool:
        return self.options.engine in ("fsdp1", "fsdp2")

    @property
    def dims(self) -> ParallelDims:
        return parallel_dims(self.options, self.world_size, self.local_world_size)

    def fully_sharded(self) -> "MemorySetting":
        """The same with one copy of the model, sharded over all ranks."""
        sharding = "full-shard" if self.options.sharding else None
        return self.with_options(engine=self.options.engine if self.is_fsdp else "fsdp2", sharding=sharding, shard_degree=None)


@dataclass(frozen=True)
class MemoryEstimator:
    """What a run needs on each rank.

    compute_dtype_bytes: of one number of the compute dtype.
    counts: parameters of the trained model.
    has_reference: whether a frozen copy of the model's first weights is kept too.
    gpu_bytes: memory of the smallest GPU of a rank; None on a CPU.
    compiles: whether blocks and loss are compiled, as `train.compile` says or `auto` turns out to be.
    """

    config: StageConfig
    model_config: ModelConfig
    plan: BatchPlan
    compute_dtype_bytes: int
    on_gpu: bool
    counts: ParameterCounts
    has_reference: bool = False
    gpu_bytes: int | None = None
    compiles: bool = False

    @classmethod
    def of_run(
        cls,
        config: StageConfig,
        model_config: ModelConfig,
        plan: BatchPlan,
        dist_ctx: DistributedContext,
        has_reference: bool = False,
    ) -> Self:
        """The estimator of a recipe on these ranks. Every rank calls it."""
        gpu_bytes = None
        if dist_ctx.device.type == "cuda":
            gpu_bytes = min(dist_ctx.all_gather(torch.cuda.get_device_properties(dist_ctx.device).total_memory))
        dtype, _ = choose_dtype(config.train.dtype, dist_ctx.device)
        counts, on_gpu = count_parameters(config, model_config), dist_ctx.device.type == "cuda"
        compiles, _ = choose_compile(config.train.compile, dist_ctx.device, config.train.steps)
        return cls(config, model_config, plan, dtype.itemsize, on_gpu, counts, has_reference, gpu_bytes, compiles)

    def setting(self, dist_ctx: DistributedContext) -> MemorySetting:
        """The setting of the recipe, with what `parallel.engine` and `reduce_every_micro_batch` are by default."""
        options, local_world_size = self.config.parallel, dist_ctx.rank_info.local_world_size
        engine = choose_engine(options, dist_ctx.world_size, dist_ctx.device.type)
        options = options.model_copy(update={"engine": engine})
        setting = MemorySetting(self.plan.micro_batch_size, options, dist_ctx.world_size, local_world_size)
        if options.reduce_every_micro_batch is not None:
            return setting
        return setting.with_options(reduce_every_micro_batch=not self.can_reduce_once(setting))

    def can_reduce_once(self, setting: MemorySetting) -> bool:
        """Whether full fp32 gradients fit until the last micro-batch of a step reduces them, and that saves anything.

        It depends on the GPU's whole memory, not on what is free: a resumed run decides alike, and computes the same bits.
        """
        options = setting.options
        reduces = setting.is_fsdp and setting.dims.fsdp_degree > 1 and options.pipeline_parallel_degree == 1
        if self.gpu_bytes is None or not reduces or self.plan.accumulation == 1:
            return False
        try:
            needed = self.required_bytes(setting.with_options(reduce_every_micro_batch=False))
        except ValueError:  # there is no formula for the model
            return False
        return needed <= USABLE_FRACTION * self.gpu_bytes

    def model_state_bytes(self, setting: MemorySetting) -> int:
        """Bytes of a rank that do not depend on the batch: parameters, gradients and optimizer states, and gathered weights."""
        options, counts, number_bytes = setting.options, self.counts, self.compute_dtype_bytes
        tensor = options.tensor_parallel_degree
        master = DTYPE_BYTES[self.config.train.master_dtype]
        frozen = counts.total if self.has_reference else 0
        at_rest = checkpoint_bytes(self.config.optimizer, self.config.train.master_dtype, counts)
        at_rest += (counts.trained + frozen) * master
        bytes_now = 0
        if not (options.cpu_offload and self.on_gpu):
            bytes_now = at_rest // (tensor * (setting.dims.fsdp_degree if setting.is_fsdp else 1))
        total, trained = counts.total // tensor, counts.trained // tensor
        if setting.is_fsdp:
            matrix = self.model_config.vocab_size * self.model_config.hidden_size
            block = (parameter_count(self.model_config).active_matmul - matrix) // self.model_config.num_hidden_layers
            unit = max(matrix, block)
            gathered = 2 * unit if setting.dims.reshard_after_forward else total
            # A unit's gradients in the compute dtype before they are reduced, and in fp32 after that.
            bytes_now += gathered * number_bytes + min(unit, trained) * (number_bytes + 4)
            if options.reduce_every_micro_batch is False:
                bytes_now += trained * 4
        elif number_bytes < master:
            bytes_now += total * number_bytes  # the working weights of a step
        return bytes_now

    def activation_bytes(self, setting: MemorySetting) -> int:
        """Upper estimate of the bytes of one micro-batch, between its forward and its backward pass and within them.

        Activations that tensor parallelism splits are not subtracted. Raises ValueError where there is no formula for the
        model.
        """
        options, model_config, number_bytes = setting.options, self.model_config, self.compute_dtype_bytes
        length, checkpointing = self.plan.sequence_length // options.context_parallel_degree, options.activation_checkpointing
        size, dense_mask = setting.micro_batch_size, not self.on_gpu
        of_attention = {"dense_mask": dense_mask, "stores_weights": self._stores_weights()}
        block = block_activation_bytes(model_config, size, length, dtype_bytes=number_bytes, **of_attention)
        bytes_now = activation_bytes(
            model_config,
            size,
            length,
            dtype_bytes=number_bytes,
            **of_attention,
            activation_checkpointing=checkpointing,
            activation_checkpointing_every=options.activation_checkpointing_every,
            has_dropout=self.config.model.dropout > 0,
        )
        # The backward pass of a block, and what is recomputed for it.
        bytes_now += block * (1 if checkpointing == "none" else 2)
        logits = self._logits_bytes(size * length)
        bytes_now += max(logits, model_config.vocab_size * model_config.hidden_size * 4)
        if dense_mask:
            bytes_now += 3 * size * length * self.plan.sequence_length  # the mask, while it is built
        return bytes_now

    def _stores_weights(self) -> bool:
        """Whether compiled blocks keep the weights of attention (model/attention.py)."""
        in_bf16_on_cpu = self.compute_dtype_bytes == 2 and not self.on_gpu
        return in_bf16_on_cpu and self.compiles and self.plan.sequence_length <= MAX_STORED_KEYS

    def _logits_bytes(self, tokens: int) -> int:
        """What the loss of that many tokens keeps of the logits of a chunk: compiled passes nothing but these."""
        vocab_size, number_bytes = self.model_config.vocab_size, self.compute_dtype_bytes
        if self.on_gpu and self.compiles:
            return min(fused_chunk_tokens(vocab_size, number_bytes), tokens) * vocab_size * number_bytes
        return min(CHUNK_TOKENS, tokens) * vocab_size * (2 * 4 + number_bytes)

    def required_bytes(self, setting: MemorySetting) -> int:
        """All that a rank needs for a step, margins included."""
        margin = GPU_MARGIN if self.on_gpu else HOST_MARGINS[setting.options.activation_checkpointing]
        return int(GPU_MARGIN * self.model_state_bytes(setting) + margin * self.activation_bytes(setting))

    def check(self, dist_ctx: DistributedContext) -> None:
        """Raise UserError where this rank cannot hold the run, whatever the arithmetic leaves out: asked before it is built.

        The model's state is exact, and so is the batch. A compiler keeps fewer activations than are estimated: they count only
        with their smallest part, the input of each block.
        """
        setting, plan, model = self.setting(dist_ctx), self.plan, self.model_config
        tokens = plan.micro_batch_size * plan.sequence_length // setting.options.context_parallel_degree
        layers = model.num_hidden_layers // setting.options.pipeline_parallel_degree
        hidden = tokens * model.hidden_size * layers * self.compute_dtype_bytes
        batch = plan.accumulation * plan.micro_batch_size * plan.sequence_length * BATCH_BYTES_PER_TOKEN
        way = partial(suggest_what_fits, self, setting)
        state = self.model_state_bytes(setting) // setting.options.pipeline_parallel_degree
        what, ranks = "model, gradients, optimizer and activations of a rank", setting.local_world_size
        check_fits(state + hidden, dist_ctx.device, what, way, num_ranks=ranks)
        what = f"a batch of {plan.tokens:,} tokens"
        check_fits(batch, torch.device("cpu"), what, "use a smaller global batch", num_ranks=ranks)

    @property
    def overhead_bytes(self) -> int:
        """Bytes that a process needs whatever it trains."""
        return 0 if self.on_gpu else HOST_OVERHEAD_BYTES


def suggest_what_fits(estimator: MemoryEstimator, current: MemorySetting, available_bytes: int) -> str:
    """What to do, in words, after `current` did not fit into `available_bytes` on each rank: only what fits by estimate."""
    if current.options.pipeline_parallel_degree > 1:
        return "for a pipeline there is no estimate of what would fit"
    try:
        estimated = estimator.required_bytes(current)
    except ValueError:
        return f"there is no estimate of what would fit a {estimator.model_config.model_type} model"
    available_bytes -= estimator.overhead_bytes
    # `current` did not fit, whatever the arithmetic says.
    scale = max(1.0, available_bytes / estimated)

    def needed(setting: MemorySetting) -> int:
        return int(estimator.required_bytes(setting) * scale)

    def first_fitting(settings: Iterable[MemorySetting]) -> MemorySetting | None:
        return next((setting for setting in settings if needed(setting) <= available_bytes), None)

    def largest_batch(setting: MemorySetting, at_most: int) -> MemorySetting | None:
        local_batch = estimator.plan.micro_batch_size * estimator.plan.accumulation
        sizes = [size for size in reversed(divisors(local_batch)) if size <= at_most]
        return first_fitting(replace(setting, micro_batch_size=size) for size in sizes)

    # One change at a time, the cheapest of each kind first.
    kinds = [
        [each for each in kind if each != current and needed(each) < needed(current)]
        for kind in _alternatives(current, estimator.on_gpu)
    ]
    found = [largest_batch(current, current.micro_batch_size - 1), *(first_fitting(kind) for kind in kinds)]
    if ways := [_describe_changes(current, each) for each in found if each]:
        return f"by estimate would fit: {', or '.join(ways)}"
    single_changes = [current, *chain(*kinds)]
    settings = [*single_changes, *(each.with_options(activation_checkpointing="full") for each in single_changes)]
    for setting in settings:
        if fitting := largest_batch(setting, current.micro_batch_size):
            return f"by estimate would fit: {_describe_changes(current, fitting)}"
    smallest = min((replace(each, micro_batch_size=1) for each in settings), key=needed)
    per_rank = estimator.plan.local_batch_size
    sizes = [current.world_size * factor for factor in divisors(per_rank)[1:]]
    enough = first_fitting(replace(smallest.fully_sharded(), world_size=size) for size in sizes)
    on_more = f"; on {enough.world_size} ranks under parallel.engine = {enough.options.engine} that would fit" if enough else ""
    least = format_memory(needed(smallest) + estimator.overhead_bytes)
    changes = _describe_changes(current, smallest) or "this"
    return f"by estimate nothing fits: {changes} needs at least {least} a rank{on_more}"


def _alternatives(current: MemorySetting, on_gpu: bool) -> list[list[MemorySetting]]:
    """Settings that need less memory: recompute more, reduce more often, shard more, offload."""
    sharded = current.fully_sharded()
    recompute = [current.with_options(activation_checkpointing=mode) for mode in ("selective-ops", "full")]
    reshard = []
    if current.world_size > 1:
        sharding = (current.options.sharding or "full-shard").replace("grad-shard", "full-shard")
        reshard = [current.with_options(sharding=sharding) if current.options.sharding else current, sharded]
    offload = [(current if current.is_fsdp else sharded).with_options(cpu_offload=True)] if on_gpu else []
    reduce = [current.with_options(reduce_every_micro_batch=True)]
    if not current.is_fsdp or current.options.reduce_every_micro_batch is not False:
        reduce = []
    return [[] if current.options.activation_checkpointing == "full" else recompute, reduce, reshard, offload]


def _describe_changes(current: MemorySetting, suggested: MemorySetting) -> str:
    """How to get from one setting to the other, in options."""
    words = []
    if suggested.micro_batch_size != current.micro_batch_size:
        words.append(f"train.micro_batch_size = {suggested.micro_batch_size} (it was {current.micro_batch_size})")
    before, after = current.options.model_dump(), suggested.options.model_dump()
    for name in ("engine", "sharding", "activation_checkpointing", "cpu_offload", "reduce_every_micro_batch"):
        if after[name] != before[name]:
            words.append(f"parallel.{name} = {'true' if after[name] is True else after[name]}")
    if after["shard_degree"] != before["shard_degree"]:
        words.append("no parallel.shard_degree")
    return " with ".join(words)


@contextmanager
def explain_out_of_memory(
    estimator: MemoryEstimator, dist_ctx: DistributedContext, describe_progress: Callable[[], str], snapshot: Path
) -> Iterator[None]:
    """Raise RunFailed, in one line that says what would have fitted, where memory runs out inside.

    Enter it before anything large is built. `describe_progress` says how far the run got. What a GPU's memory held is
    written to `snapshot`.
    """
    before = available_memory(dist_ctx.device, dist_ctx.rank_info.local_world_size)
    try:
        yield
    except (MemoryError, RuntimeError) as problem:
        if not is_out_of_memory(problem):
            raise
        then = available_memory(dist_ctx.device, dist_ctx.rank_info.local_world_size)
        if dist_ctx.device.type == "cuda":
            write_memory_snapshot(snapshot)
        # The frames of the failed step hold its tensors, which could leave no memory for this message.
        traceback.clear_frames(problem.__traceback__)
        reason = describe_request(problem)
        if then is not None:
            used, free = format_memory(then.used_bytes), format_memory(then.free_bytes)
            reason += f", with {used} in use and {free} left of {then.limited_by}"
        if dist_ctx.device.type == "cuda":
            reason += f" (what it held: {snapshot})"
        way = "the free memory is not known"
        if before is not None:
            way = suggest_what_fits(estimator, estimator.setting(dist_ctx), before.free_bytes)
        raise RunFailed(f"rank {dist_ctx.rank_info.rank}, {describe_progress()}: out of memory: {reason}; {way}") from problem
