"""The search for configurations of a run that fit.

`search` finds the fastest of all, `suggest_what_fits` those near one that does not fit. A search
estimates all and predicts the best of them in full. The estimate extrapolates linearly from two
models with few blocks, since all blocks with one window are identical. The global batch, the model
and the numbers that training computes stay what they are. What changes numbers comes last
(optimizer states in 8 bits, frozen matrices in 8 or 4 bits), and float8 is tried only on request.
fsdp1 does what fsdp2 does, and is not tried.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, product
from typing import Any

from lmforge.core.errors import UserError, format_bytes
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.quantization.formats import Bits
from lmforge.core.options.activation_checkpointing import (
    CHECKPOINTING_MODES,
    FullCheckpointing,
    NoCheckpointing,
)
from lmforge.core.options.batch_plan import BatchPlan, divisors
from lmforge.core.parallel.validate import check_compiled, check_lora, check_parallel
from lmforge.lab.options.plan import FINALISTS
from lmforge.lab.plan.hardware import GPU
from lmforge.lab.plan.prediction.predict import (
    MEMORY_INTERVAL,
    Prediction,
    can_reduce_once,
    check_estimated,
    predict,
)
from lmforge.lab.plan.prediction.rates import Rates
from lmforge.lab.plan.prediction.step_config import StepConfig

SHARDINGS = ("full-shard", "grad-shard", "hybrid-full-shard", "hybrid-grad-shard")
# Blocks of a pipeline stage in the two estimates.
FEW_BLOCKS = (2, 4)
MAX_DEGREE = 16
MAX_MICRO_BATCH = 64
# The options that advice may change.
CHANGED = (
    "engine",
    "sharding",
    "activation_checkpointing",
    "activation_offload",
    "cpu_offload",
    "reduce_every_micro_batch",
)


@dataclass(frozen=True)
class Candidate:
    """A configuration, with its estimated needs. parts: `Prediction.parts`."""

    step_config: StepConfig
    device_bytes: float
    host_bytes: float
    step_seconds: float
    parts: dict[str, float]

    @property
    def needs(self) -> str:
        """The memory of a GPU, and of a host where something is offloaded."""
        words = format_bytes(self.device_bytes)
        if self.host_bytes:
            words += f" and {format_bytes(self.host_bytes)} on a host"
        return words


@dataclass(frozen=True)
class SearchResult:
    """The configurations that a search tried.

    best: those that fit, the fastest first, predicted in full. fitting: all estimates that fit, the
    fastest first.
    too_large: the estimates that do not fit, those nearest to it first. refused: how many the
    checks of a run refuse.
    """

    best: list[Prediction]
    fitting: list[Candidate]
    too_large: list[Candidate]
    tried: int
    refused: int
    left_out: int


def search(
    base: StepConfig,
    global_batch_size: int,
    gpu: GPU,
    rates: Rates,
    budget: float,
    most: int,
    float8: bool,
) -> SearchResult:
    """Try the configurations of `base`'s model, batch and GPUs, at most `most`.

    `budget` is the memory of a GPU in bytes. What is offloaded has to fit into the host.
    """
    on_host = gpu.host_memory_gb * 2**30 * min(base.gpus_per_host, base.world_size)

    def fits(candidate: Candidate | Prediction) -> bool:
        return candidate.device_bytes <= budget and candidate.host_bytes <= on_host

    fitting = list[Candidate]()
    too_large = list[Candidate]()
    refused = 0
    tried = 0
    left_out = 0
    for step_config in candidates(base, global_batch_size, float8):
        if tried == most:
            left_out += 1
            continue
        tried += 1
        try:
            check_step_config(step_config)
            candidate = estimate(step_config, gpu, rates, budget)
        except UserError:
            refused += 1
            continue
        group = fitting if fits(candidate) else too_large
        group.append(candidate)
    fitting.sort(key=lambda each: each.step_seconds)
    too_large.sort(key=lambda each: max(each.device_bytes / budget, each.host_bytes / on_host))
    predicted = (predict(each.step_config, gpu, rates) for each in fitting[:FINALISTS])
    best = sorted(filter(fits, predicted), key=lambda each: each.step_seconds)
    return SearchResult(best, fitting, too_large, tried, refused, left_out)


def candidates(base: StepConfig, global_batch_size: int, float8: bool) -> Iterator[StepConfig]:
    """All configurations, first those that split the model least."""
    world = base.world_size
    sizes_of_groups = [each for each in divisors(world) if each <= MAX_DEGREE]
    splits = [
        (t, c, p)
        for t, c, p in product(sizes_of_groups, repeat=3)
        if world % (t * c * p) == 0 and t <= base.gpus_per_host
    ]
    splits.sort(key=lambda split: (math.prod(split), split[0], split[2]))
    for tensor, context, pipeline in splits:
        data_parallel = world // (tensor * context * pipeline)
        if global_batch_size < data_parallel or global_batch_size % data_parallel:
            continue
        local = global_batch_size // data_parallel
        sizes = [each for each in divisors(local) if each <= MAX_MICRO_BATCH]
        dtypes = (False, True) if float8 and tensor == 1 else (False,)
        for engine, sharding, offload in _engines(base, tensor * context * pipeline):
            experts = _expert_degrees(base) if engine == "fsdp2" else [1]
            for degree, savings, size in product(experts, _savings(base), reversed(sizes)):
                step_config = base.with_options(
                    engine=engine,
                    sharding=sharding,
                    cpu_offload=offload,
                    shard_degree=None,
                    reduce_every_micro_batch=True,
                    tensor_parallel_degree=tensor,
                    context_parallel_degree=context,
                    pipeline_parallel_degree=pipeline,
                    expert_parallel_degree=degree,
                    **savings,
                )
                for eight in dtypes:
                    yield replace(
                        step_config, micro_batch_size=size, accumulation=local // size, float8=eight
                    )


def in_fewer_bits(base: StepConfig) -> list[StepConfig]:
    """StepConfigs with optimizer states or a frozen base in fewer bits.

    They change what training computes; the one that changes least comes first.
    """
    if base.lora is not None:
        if base.lora.base_dtype or base.reference == "copy":
            return []
        bits: tuple[Bits, ...] = ("int8", "nf4")
        return [replace(base, lora=replace(base.lora, base_dtype=each)) for each in bits]
    if base.optimizer.name not in ("adamw", "muon") or base.optimizer.state_dtype == "8bit":
        return []
    return [replace(base, optimizer=base.optimizer.model_copy(update={"state_dtype": "8bit"}))]


def _savings(base: StepConfig) -> list[dict[str, Any]]:
    """Options that say which activations are recomputed, and whether the rest is offloaded."""
    modes = [(mode, False) for mode in CHECKPOINTING_MODES]
    if base.on_gpu:
        modes += [(NoCheckpointing.name, True), (FullCheckpointing.name, True)]
    return [
        {"activation_checkpointing": mode, "activation_offload": offload} for mode, offload in modes
    ]


def _expert_degrees(base: StepConfig) -> list[int]:
    """Degrees of expert parallelism within a host: dense models have one."""
    fitting = 1
    if any(base.model.sparse_layers):
        fitting = math.gcd(base.model.num_experts, base.world_size)
    return [each for each in divisors(fitting) if each <= base.gpus_per_host]


def _engines(base: StepConfig, splits: int) -> Iterator[tuple[str, str | None, bool]]:
    """The combinations (engine, sharding, cpu_offload) to try."""
    if base.world_size == 1:
        yield "single", None, False
        if base.on_gpu:
            yield "fsdp2", None, True
        return
    if splits == 1:
        yield "ddp", None, False
    for sharding in SHARDINGS:
        if not sharding.startswith("hybrid") or base.world_size > base.gpus_per_host:
            yield "fsdp2", sharding, False
    if base.on_gpu:
        yield "fsdp2", "full-shard", True


def check_step_config(step_config: StepConfig) -> None:
    """Raise UserError where a run with this StepConfig would be refused, or is not estimated."""
    check_estimated(step_config)
    data_parallel = step_config.world_size // step_config.options.model_parallel_size
    size = step_config.micro_batch_size
    global_batch_size = data_parallel * size * step_config.accumulation
    plan = BatchPlan(
        global_batch_size,
        step_config.sequence_length,
        data_parallel,
        size,
        step_config.accumulation,
    )
    check_parallel(step_config.options, step_config.model, plan)
    if step_config.teacher is not None:
        check_parallel(step_config.options, step_config.teacher.model, plan)
    if step_config.distillation is not None and step_config.pipeline > 1:
        raise UserError(
            "parallel.pipeline_parallel_degree: distillation computes losses of whole models"
        )
    if step_config.lora is not None:
        check_lora(step_config.options, step_config.float8, step_config.lora.base_dtype)
    if step_config.options.cuts_rows and step_config.optimizer.state_dtype == "8bit":
        raise UserError("optimizer.state_dtype = 8bit: their blocks end with rows")
    if step_config.compiled:
        check_compiled(step_config.options, "cuda" if step_config.on_gpu else "cpu")
    _ = step_config.dims


@cache
def _shorter(model: ModelConfig, layers: int, like: int) -> ModelConfig:
    return model.with_layers(layers, like)


def estimate(step_config: StepConfig, gpu: GPU, rates: Rates, budget: float) -> Candidate:
    """Estimated memory and time, with gradients reduced once per step if that certainly fits."""
    if can_reduce_once(step_config):
        once = _on_straight_line(
            step_config.with_options(reduce_every_micro_batch=False), gpu, rates
        )
        if once.device_bytes * MEMORY_INTERVAL[1] <= budget:
            return once
    return _on_straight_line(step_config, gpu, rates)


def _on_straight_line(step_config: StepConfig, gpu: GPU, rates: Rates) -> Candidate:
    """Memory and time, extrapolated linearly from two models of few blocks.

    There are two for each kind of layers; their results count as often as the model has such
    layers.
    """
    layers = step_config.model.num_hidden_layers
    few, more = (count * step_config.pipeline for count in FEW_BLOCKS)
    if layers <= more:
        prediction = predict(step_config, gpu, rates)
        return Candidate(
            step_config,
            prediction.device_bytes,
            prediction.host_bytes,
            prediction.step_seconds,
            prediction.parts,
        )

    def line(below: float, above: float) -> float:
        return above + (layers - more) / (more - few) * (above - below)

    memory = 0.0
    host = 0.0
    seconds = 0.0
    parts = dict[str, float]()
    model = step_config.model
    kinds = [*zip(model.layer_windows, model.blocks, strict=True)]
    for kind, count in Counter(kinds).items():
        first = kinds.index(kind)
        low, high = (
            predict(replace(step_config, model=_shorter(model, blocks, first)), gpu, rates)
            for blocks in (few, more)
        )
        share = count / layers
        low_parts = low.parts
        memory += share * line(low.device_bytes, high.device_bytes)
        host += share * line(low.host_bytes, high.host_bytes)
        seconds += share * line(low.step_seconds, high.step_seconds)
        for name, above in high.parts.items():
            parts[name] = parts.get(name, 0.0) + share * line(low_parts.get(name, 0.0), above)
    return Candidate(step_config, memory, host, seconds, parts)


def why_slower(candidate: Candidate | Prediction, winner: Candidate | Prediction) -> str:
    """The kind of operation in which a configuration loses most time to the winner."""
    losses = {
        name: seconds - winner.parts.get(name, 0.0) for name, seconds in candidate.parts.items()
    }
    name = max(losses, key=lambda each: losses[each])
    slower = candidate.step_seconds / winner.step_seconds - 1
    if slower > 0.0005:
        return f"{slower:.0%} slower: {name} (+{1e3 * losses[name]:,.0f} ms)"
    return "as fast"


def suggest_what_fits(
    current: StepConfig, needed_bytes: Callable[[StepConfig], float], available_bytes: float
) -> str:
    """Advice on what to change where `current` does not fit into `available_bytes` on each rank.

    It names only what fits. `needed_bytes` returns what a rank needs with a StepConfig.
    """
    known: dict[str, float] = {}

    def needed(step_config: StepConfig) -> float:
        key = repr(
            (
                step_config.options,
                step_config.micro_batch_size,
                step_config.world_size,
                step_config.bits,
                step_config.teacher,
            )
        )
        if key not in known:
            known[key] = needed_bytes(step_config)
        return known[key]

    def first_fitting(step_configs: Iterable[StepConfig]) -> StepConfig | None:
        return next((each for each in step_configs if needed(each) <= available_bytes), None)

    def largest_batch(step_config: StepConfig, at_most: int) -> StepConfig | None:
        sizes = [size for size in reversed(divisors(local_batch)) if size <= at_most]
        return first_fitting(map(step_config.with_micro_batch_size, sizes))

    local_batch = current.micro_batch_size * current.accumulation
    # One change at a time, the cheapest of each kind first.
    kinds = [
        [
            each
            for each in kind
            if each != current and _is_allowed(each) and needed(each) < needed(current)
        ]
        for kind in _alternatives(current)
    ]
    suggestions = [
        largest_batch(current, current.micro_batch_size - 1),
        *(first_fitting(kind) for kind in kinds),
    ]
    describe = partial(_describe_changes, current)
    ways = [describe(each) for each in suggestions if each]
    if ways:
        return f"by estimate would fit: {', or '.join(ways)}"
    single_changes = [current, *chain(*kinds)]
    full = {"activation_checkpointing": FullCheckpointing.name}
    step_configs = [*single_changes, *(each.with_options(**full) for each in single_changes)]
    for step_config in step_configs:
        fitting = largest_batch(step_config, current.micro_batch_size)
        if fitting:
            return f"by estimate would fit: {describe(fitting)}"
    smallest = min((each.with_micro_batch_size(1) for each in step_configs), key=needed)
    sizes = [
        (current.world_size * factor, local_batch // factor) for factor in divisors(local_batch)[1:]
    ]
    more = (
        replace(smallest.fully_sharded(), world_size=size, accumulation=batch)
        for size, batch in sizes
    )
    enough = first_fitting(more)
    on_more = ""
    if enough:
        on_more = (
            f"; on {enough.world_size} ranks under parallel.engine = {enough.options.engine} that"
            " would fit"
        )
    least = format_bytes(needed(smallest))
    return (
        f"by estimate nothing fits: {describe(smallest) or 'this'} needs at least {least} per"
        f" rank{on_more}"
    )


def _is_allowed(step_config: StepConfig) -> bool:
    try:
        check_step_config(step_config)
    except UserError:
        return False
    return True


def _alternatives(current: StepConfig) -> list[list[StepConfig]]:
    """StepConfigs that need less memory, in groups of one kind.

    Recompute, offload activations, reduce more often, shard more, offload weights; and, since that
    changes what is computed, run a teacher once before, and store weights and states in fewer bits.
    """
    sharded = current.fully_sharded()
    recompute = [
        current.with_options(activation_checkpointing=mode) for mode in CHECKPOINTING_MODES
    ]
    hosted = []
    offload = []
    if current.on_gpu:
        fsdp = current if current.is_fsdp else sharded
        hosted = [current.with_options(activation_offload=True)]
        offload = [fsdp.with_options(cpu_offload=True)]
    reshard = []
    if current.world_size > 1:
        sharding = current.options.sharding
        if sharding:
            full = sharding.replace("grad-shard", "full-shard")
            reshard.append(current.with_options(sharding=full))
        reshard.append(sharded)
    reduce = []
    if current.is_fsdp and not current.options.reduce_every_micro_batch:
        reduce = [current.with_options(reduce_every_micro_batch=True)]
    before = []
    if current.distillation is not None:
        before = [replace(current, distillation=replace(current.distillation, teacher=None))]
    return [recompute, hosted, reduce, reshard, offload, before, in_fewer_bits(current)]


def _describe_changes(current: StepConfig, suggested: StepConfig) -> str:
    """The options to change to get from one StepConfig to the other."""
    words = []
    if suggested.micro_batch_size != current.micro_batch_size:
        words.append(
            f"train.micro_batch_size = {suggested.micro_batch_size} (it was"
            f" {current.micro_batch_size})"
        )
    before = current.options.model_dump()
    after = suggested.options.model_dump()
    for name in CHANGED:
        if after[name] != before[name]:
            value = "true" if after[name] is True else after[name]
            words.append(f"parallel.{name} = {value}")
    words += [
        f"{name} = {value}"
        for name, value in suggested.bits.items()
        if current.bits.get(name) != value
    ]
    if suggested.teacher != current.teacher and suggested.teacher is None:
        words.append("distill.logprobs = FOLDER")
    if after["shard_degree"] != before["shard_degree"]:
        words.append("no parallel.shard_degree")
    return " with ".join(words)
