"""When memory runs out: how much was requested, how much there was, and what would have fitted."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.host_memory import format_memory
from lmforge.core.distributed.memory import (
    available_memory,
    describe_request,
    is_out_of_memory,
    write_memory_snapshot,
)
from lmforge.core.errors import RunFailed


@contextmanager
def explain_out_of_memory(
    suggest_what_fits: Callable[[float], str],
    dist_ctx: DistributedContext,
    describe_progress: Callable[[], str],
    snapshot: Path,
    may_write: Callable[[], bool],
) -> Iterator[None]:
    """Raise RunFailed, in one line that says what would have fitted, where memory runs out inside.

    Enter it before anything large is built. `suggest_what_fits` gives advice for so many bytes on
    each rank. `describe_progress` says how far the run got. The content of a GPU's memory is
    written to `snapshot` if `may_write` says so.
    """
    before = available_memory(dist_ctx.device, dist_ctx.rank_info.local_world_size)
    try:
        yield
    except (MemoryError, RuntimeError) as problem:
        if not is_out_of_memory(problem):
            raise
        then = available_memory(dist_ctx.device, dist_ctx.rank_info.local_world_size)
        if writes := dist_ctx.device.type == "cuda" and may_write():
            write_memory_snapshot(snapshot)
        # The frames of the failed step hold its tensors, which could leave no memory for this
        # message.
        traceback.clear_frames(problem.__traceback__)
        reason = describe_request(problem)
        if then is not None:
            used = format_memory(then.used_bytes)
            free = format_memory(then.free_bytes)
            reason += f", with {used} in use and {free} left of {then.limited_by}"
        if writes:
            reason += f" (what it held: {snapshot})"
        way = "the free memory is not known"
        if before is not None:
            way = suggest_what_fits(before.free_bytes)
        raise RunFailed(
            f"rank {dist_ctx.rank_info.rank}, {describe_progress()}: out of memory: {reason}; {way}"
        ) from problem
