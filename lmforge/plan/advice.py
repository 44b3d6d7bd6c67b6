"""Which settings would fit where one does not, in words: with one changed option if that is enough, else with several. No
torch."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import chain

from lmforge.config.batch_plan import divisors
from lmforge.errors import UserError, format_bytes
from lmforge.plan.prediction.search import check_setting
from lmforge.plan.prediction.setting import Setting

# The options that an advice may change.
CHANGED = ("engine", "sharding", "activation_checkpointing", "cpu_offload", "reduce_every_micro_batch")


def suggest_what_fits(current: Setting, needed_bytes: Callable[[Setting], float], available_bytes: float) -> str:
    """What to do instead of `current`, which does not fit: only what fits into `available_bytes` on each rank.

    `needed_bytes` says what a rank needs in a setting.
    """
    known: dict[str, float] = {}

    def needed(setting: Setting) -> float:
        key = f"{setting.options!r} {setting.micro_batch_size} {setting.world_size}"
        if key not in known:
            known[key] = needed_bytes(setting)
        return known[key]

    def first_fitting(settings: Iterable[Setting]) -> Setting | None:
        return next((setting for setting in settings if needed(setting) <= available_bytes), None)

    def largest_batch(setting: Setting, at_most: int) -> Setting | None:
        sizes = [size for size in reversed(divisors(local_batch)) if size <= at_most]
        return first_fitting(map(setting.with_micro_batch_size, sizes))

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
    settings = [*single_changes, *(each.with_options(activation_checkpointing="full") for each in single_changes)]
    for setting in settings:
        if fitting := largest_batch(setting, current.micro_batch_size):
            return f"by estimate would fit: {describe(fitting)}"
    smallest = min((each.with_micro_batch_size(1) for each in settings), key=needed)
    sizes = [(current.world_size * factor, local_batch // factor) for factor in divisors(local_batch)[1:]]
    more = (replace(smallest.fully_sharded(), world_size=size, accumulation=batch) for size, batch in sizes)
    enough = first_fitting(more)
    on_more = f"; on {enough.world_size} ranks under parallel.engine = {enough.options.engine} that would fit" if enough else ""
    least = format_bytes(needed(smallest))
    return f"by estimate nothing fits: {describe(smallest) or 'this'} needs at least {least} per rank{on_more}"


def _is_allowed(setting: Setting) -> bool:
    try:
        check_setting(setting)
    except UserError:
        return False
    return True


def _alternatives(current: Setting) -> list[list[Setting]]:
    """Settings that need less memory: recompute more, reduce more often, shard more, offload."""
    sharded = current.fully_sharded()
    recompute = [current.with_options(activation_checkpointing=mode) for mode in ("selective-ops", "full")]
    reshard = []
    if current.world_size > 1:
        sharding = (current.options.sharding or "full-shard").replace("grad-shard", "full-shard")
        reshard = [current.with_options(sharding=sharding) if current.options.sharding else current, sharded]
    offload = [(current if current.is_fsdp else sharded).with_options(cpu_offload=True)] if current.on_gpu else []
    reduce = [current.with_options(reduce_every_micro_batch=True)]
    if not current.is_fsdp or current.options.reduce_every_micro_batch is not False:
        reduce = []
    return [[] if current.options.activation_checkpointing == "full" else recompute, reduce, reshard, offload]


def _describe_changes(current: Setting, suggested: Setting) -> str:
    """How to get from one setting to the other, in options."""
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
