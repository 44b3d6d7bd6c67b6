"""An attempt at a run, from the recipe that it writes to its report: what watches it, what it
writes for reports and trackers, and how its failures are described.
"""

import os
import platform
import re
import shlex
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

from lmforge.core import registry
from lmforge.core.distributed import distributed as cluster
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.environment import JOB_VARIABLE, under_launcher
from lmforge.core.distributed.memory import record_memory, write_memory_snapshot
from lmforge.core.distributed.processes import signal_name
from lmforge.core.distributed.rank_info import (
    count_restarts,
    has_used_up_restarts,
    launcher_identity,
    threads_per_rank,
)
from lmforge.core.distributed.standby import describe_standby
from lmforge.core.errors import (
    DISK_FULL_ERRNOS,
    PEER_LOST_PATTERN,
    PeerLost,
    RunFailed,
    UserError,
    name_some,
    typed_command,
)
from lmforge.core.files.atomic_files import atomic_write_json
from lmforge.core.files.untrusted import cut, read_json
from lmforge.core.options.stage import StageConfig
from lmforge.core.parallel.validate import describe_unused_sharding
from lmforge.core.records.runs import Run
from lmforge.core.seams import AttemptObserver, Monitors
from lmforge.core.stages.context import RunContext
from lmforge.core.stages.custom_code import PluginCallbacks
from lmforge.core.stages.run_files import RunEvents
from lmforge.core.steps.determinism import explain_nondeterministic_op
from lmforge.core.steps.resume import last_checkpoint_message

ConfigT = TypeVar("ConfigT", bound=StageConfig)
# In the run's directory, for `again_if_restarted`: `launcher_identity` of every rank of the last
# attempt.
LAUNCHERS = ".launchers.json"
MAX_ERROR_CHARACTERS = 1000  # of an error in events.jsonl


def again_if_restarted(config: ConfigT, run: Run, dist_ctx: DistributedContext) -> ConfigT:
    """The recipe; after a restart by torchrun, without the options that apply only at the first
    start. Restarts are detected by the recorded torchrun processes, since torchrun's own restart
    count is not set on all ranks after a host was lost or has joined. Every rank calls it.
    """
    launchers = dist_ctx.all_gather(launcher_identity())

    def choose() -> ConfigT:
        with suppress(UserError, OSError):
            if not set(read_json(run.path / LAUNCHERS, list[str])).isdisjoint(launchers):
                return config.again()
        return config

    return dist_ctx.decide_on_rank0(choose)


def load_monitors(config: StageConfig) -> None:
    """Import what `start_attempt` opens, before a rank can fail alone at it."""
    for entry in [
        registry.get("monitor", "monitors"),
        *registry.chosen("attempt_observer", config=config),
    ]:
        entry.load()


def start_attempt(
    config: StageConfig, run: Run, dist_ctx: DistributedContext, callbacks: PluginCallbacks
) -> RunContext:
    """Write the recipe, open this rank's log, and start the watchdog.

    Ranks other than 0 print to their logs from now on.
    """
    attempt = dist_ctx.decide_on_rank0(partial(run.start_attempt, config))
    launchers = [each for each in dist_ctx.all_gather(launcher_identity()) if each]
    if dist_ctx.is_rank0 and launchers:
        atomic_write_json(run.path / LAUNCHERS, launchers)
    # Any rank may be the one that reports a stall.
    monitors: Monitors = registry.get("monitor", "monitors").build(
        config, run, dist_ctx, attempt, RunEvents(run).add
    )
    events = RunEvents(run if dist_ctx.is_rank0 else None)
    observers: list[AttemptObserver] = []
    if dist_ctx.is_rank0:
        observers = [
            entry.build(run, config, monitors.console)
            for entry in registry.chosen("attempt_observer", config=config)
        ]
    if config.log.memory_snapshot:
        record_memory(dist_ctx.device)
    return RunContext(config, run, dist_ctx, monitors, events, tuple(observers), callbacks)


def notes_on_ranks(config: StageConfig, dist_ctx: DistributedContext) -> list[str]:
    """Lines about standby ranks, hosts with other code and sharding that is not used, and a hint
    where several ranks share one machine's cores, since one process would be faster.
    """
    ranks = dist_ctx.world_size
    if ranks == 1:
        return describe_unused_sharding(config.parallel, ranks, dist_ctx.device.type)
    if dist_ctx.rank_info.local_world_size < ranks:
        return [*describe_standby(), *cluster.describe_other_code(dist_ctx)]
    if dist_ctx.device.type != "cpu":
        return describe_standby()
    cores = f"{threads_per_rank(1)} cores"
    shared = (
        f"{ranks} ranks share the {cores} of one machine: one process trains faster; leave"
        " --launch.processes out"
    )
    return [*describe_standby(), shared]


def describe_used_up_restarts(dist_ctx: DistributedContext) -> list[str]:
    """A line that names the hosts where torchrun restarts ranks no more. Every rank calls it."""
    restarts = dist_ctx.all_gather(
        (platform.node(), count_restarts()) if has_used_up_restarts() else None
    )
    used_up = sorted({each for each in restarts if each})
    hosts = name_some([f"{host} ({count} of {count})" for host, count in used_up])
    return (
        [
            (
                f"torchrun's --max-restarts is used up on {hosts}: a rank that is lost there now ends"
                " the run"
            )
        ]
        if used_up
        else []
    )


def describe_stop(ctx: RunContext, stopped_by: int, step: int) -> str:
    """What ended a run that is saved, and the command that continues it: of a job, by its
    launcher.
    """
    by = "the loss of its launcher" if cluster.launcher_is_lost() else signal_name(stopped_by)
    info = ctx.dist_ctx.rank_info
    command = typed_command()
    if JOB_VARIABLE in os.environ:
        command += " launch"
    elif info.world_size > 1 and not cluster.is_launched_by_us():
        command = under_launcher(info, command)
    again = f"{command} {ctx.config.of_stage} {shlex.quote(str(ctx.run.recipe_path))}"
    return f"stopped by {by} after step {step}, which is saved; to continue: {again}"


def write_memory(ctx: RunContext) -> None:
    """Write what the GPU's memory holds, where the recipe asks for it."""
    if ctx.config.log.memory_snapshot:
        write_memory_snapshot(ctx.memory_snapshot)
        ctx.console.info(
            f"memory     what the GPU held: {ctx.memory_snapshot} (open it at"
            " https://pytorch.org/memory_viz)"
        )


def end_attempt(ctx: RunContext, final_phase: str, error: str | None) -> None:
    """Write how the attempt ended, `error` in one line if it failed, and close what `start_attempt`
    has opened.
    """
    ctx.watch.stop(final_phase)
    ctx.events.add("end", None, state=final_phase, error=error)
    for observer in ctx.observers:
        observer.close()
        if ctx.run.holds_lock():
            observer.end(final_phase)
    ctx.console.close()
    ctx.log.close()


def describe_failure(problem: BaseException) -> str:
    """What ended the run, in one line: the text of an expected error, and the type of any other."""
    is_foreseen = isinstance(problem, RunFailed | UserError)
    text = str(problem) if is_foreseen else traceback.format_exception_only(problem)[-1]
    return cut(" ".join(text.split()), MAX_ERROR_CHARACTERS)


def is_lost_peer(problem: BaseException) -> re.Match[str] | None:
    """Where in its text a collective says that the connection to another rank was lost."""
    return PEER_LOST_PATTERN.search(str(problem)) if isinstance(problem, RuntimeError) else None


@contextmanager
def explain_failures(run: Run) -> Iterator[None]:
    """Turn a lost rank, an operator without a deterministic form and a full disk into errors of one
    line.
    """
    try:
        yield
    except Exception as problem:
        # Peers fail too once they lose their groups: the rank that knows the cause claims the
        # report before that.
        cluster.claim_error_reporting()
        failed = RunFailed
        reason = explain_nondeterministic_op(problem)
        if lost := is_lost_peer(problem):
            failed = PeerLost
            reason = f"another rank was lost ({lost[0].lower()})"
        elif isinstance(problem, OSError) and problem.errno in DISK_FULL_ERRNOS:
            reason = f"no room to write ({problem.strerror})"
        if reason is None:
            raise
        raise failed(f"{run.path}: {reason}; {last_checkpoint_message(run)}") from problem
