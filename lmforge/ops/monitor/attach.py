"""What watches an attempt at a run: its log, the watchdog and the console."""

from collections.abc import Callable
from typing import Any

from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.options.stage import StageConfig
from lmforge.core.records.runs import Run, storage_errors
from lmforge.core.seams import Monitors
from lmforge.ops.monitor.console import ConsoleLogger
from lmforge.ops.monitor.rank_log import RankLog
from lmforge.ops.monitor.watchdog import Watchdog


def open_monitors(
    config: StageConfig,
    run: Run,
    dist_ctx: DistributedContext,
    attempt: int,
    add_event: Callable[..., Any],
) -> Monitors:
    """Open this rank's log and start its watchdog.

    Every rank calls it; ranks other than 0 print to their logs from now on. Raises UserError on all
    ranks where one cannot open its log.
    """
    path = run.log_path(attempt, dist_ctx.rank_info.rank)
    # A rank's host may see another folder at this path, or none.
    with (
        dist_ctx.raise_on_all(),
        storage_errors(path, "cannot be opened", "all hosts need the folder of the run"),
    ):
        log = RankLog(path, dist_ctx.rank_info, attempt)
    watch = Watchdog(
        dist_ctx,
        run.health_folder,
        path,
        stall_seconds=config.watch.stall_seconds,
        timeout_seconds=config.watch.timeout_seconds,
        may_write=run.has_own_token,  # a folder that is being moved has none for a moment
        add_event=add_event,
    )
    return Monitors(log, watch, ConsoleLogger(dist_ctx, config.train.steps, path))
