"""Advice on options that would fit in memory: one changed option if that is enough, otherwise several. It does not import
torch."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import chain

from lmforge.config.activation_checkpointing import CHECKPOINTING_MODES, FullCheckpointing
from lmforge.config.batch_plan import divisors
from lmforge.errors import UserError, format_bytes
from lmforge.plan.prediction.search import check_step_config
from lmforge.plan.prediction.step_config import StepConfig

# The options that the advice may change.
CHANGED = ("engine", "sharding", "activation_checkpointing", "cpu_offload", "reduce_every_micro_batch")


def suggest_what_fits(current: StepConfig, needed_bytes: Callable[[StepConfig], float], available_bytes: float) -> str:
    """What to do instead of `current`, which does not fit: only what fits into `available_bytes` on each rank.

    `needed_bytes` returns what a rank needs with a StepConfig.
    """
    known: dict[str, float] = {}

    def needed(step_config: StepConfig) -> float:
        key = f"{step_config.options!r} {step_config.micro_batch_size} {step_config.world_size}"
        if key not in known:
            known[key] = needed_bytes(step_config)
        return known[key]

    def first_fitting(step_configs: Iterable[StepConfig]) -> StepConfig | None:
        return next((step_config for step_config in step_configs if needed(step_config) <= available_bytes), None)

    def largest_batch(step_config: StepConfig, at_most: int) -> StepConfig | None:
        sizes = [size for size in reversed(divisors(local_batch)) if size <= at_most]
        return first_fitting(map(step_config.with_micro_batch_size, sizes))

    local_batch = current.micro_batch_size * current.accumulation
    # One change at a time, the cheapest of each kind first.
    kinds = [
        [each for each in kind if each != current and _is_allowed(each) and needed(each) < needed(current)]
        for kind in _alternatives(current)
    ]
    suggestions = [largest_batch(current, current.micro_batch_size - 1), *(first_fitting(kind) for kind in kinds)]
    describe = partial(_describe_changes, current)
    if ways := [describe(each) for each in suggestions if each]:
        return f"by estimate would fit: {', or '.join(ways)}"
    single_changes = [current, *chain(*kinds)]
    full = {"activation_checkpointing": FullCheckpointing.name}
    step_configs = [*single_changes, *(each.with_options(**full) for each in single_changes)]
    for step_config in step_configs:
        if fitting := largest_batch(step_config, current.micro_batch_size):
            return f"by estimate would fit: {describe(fitting)}"
    smallest = min((each.with_micro_batch_size(1) for each in step_configs), key=needed)
    sizes = [(current.world_size * factor, local_batch // factor) for factor in divisors(local_batch)[1:]]
    more = (replace(smallest.fully_sharded(), world_size=size, accumulation=batch) for size, batch in sizes)
    enough = first_fitting(more)
    on_more = f"; on {enough.world_size} ranks under parallel.engine = {enough.options.engine} that would fit" if enough else ""
    least = format_bytes(needed(smallest))
    return f"by estimate nothing fits: {describe(smallest) or 'this'} needs at least {least} per rank{on_more}"


def _is_allowed(step_config: StepConfig) -> bool:
    try:
        check_step_config(step_config)
    except UserError:
        return False
    return True


def _alternatives(current: StepConfig) -> list[list[StepConfig]]:
    """StepConfigs that need less memory: recompute more, reduce more often, shard more, offload."""
    sharded = current.fully_sharded()
    recompute = [current.with_options(activation_checkpointing=mode) for mode in CHECKPOINTING_MODES]
    reshard = []
    if current.world_size > 1:
        sharding = (current.options.sharding or "full-shard").replace("grad-shard", "full-shard")
        reshard = [current.with_options(sharding=sharding) if current.options.sharding else current, sharded]
    offload = [(current if current.is_fsdp else sharded).with_options(cpu_offload=True)] if current.on_gpu else []
    reduce = [current.with_options(reduce_every_micro_batch=True)]
    if not current.is_fsdp or current.options.reduce_every_micro_batch:
        reduce = []
    return [recompute, reduce, reshard, offload]


def _describe_changes(current: StepConfig, suggested: StepConfig) -> str:
    """The options to change to get from one StepConfig to the other."""
    words = []
    if suggested.micro_batch_size != current.micro_batch_size:
        words.append(f"train.micro_batch_size = {suggested.micro_batch_size} (it was {current.micro_batch_size})")
    before, after = current.options.model_dump(), suggested.options.model_dump()
    for name in CHANGED:
        if after[name] != before[name]:
            words.append(f"parallel.{name} = {'true' if after[name] is True else after[name]}")
    if after["shard_degree"] != before["shard_degree"]:
        words.append("no parallel.shard_degree")
    return " with ".join(words)
