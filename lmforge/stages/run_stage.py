"""A stage from beginning to end: enter the run, build the Trainer, train, and report how it ended."""

import shlex
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from lmforge.cluster.distributed import CONTROL_TIMEOUT, DistributedContext, destroy_distributed, init_distributed
from lmforge.cluster.memory import record_memory, write_memory_snapshot
from lmforge.cluster.rank_info import threads_per_rank
from lmforge.cluster.standby import describe_standby, leave_out_ranks, stand_by
from lmforge.config.stage import StageConfig
from lmforge.errors import RunFailed, UserError, format_duration, typed_command
from lmforge.objectives.objective import Objective
from lmforge.plan.out_of_memory import MemoryEstimator, explain_out_of_memory
from lmforge.runs import Run
from lmforge.stages.alignment.align import has_frozen_reference
from lmforge.stages.attempt import describe_failure, end_attempt, explain_failures, start_attempt
from lmforge.stages.custom_code import CustomCode, copy_plugins
from lmforge.stages.enter_run import enter_run
from lmforge.stages.setup import build_trainer
from lmforge.train.determinism import set_determinism
from lmforge.train.inputs import ResumePoint, RunContext, RunInputs
from lmforge.train.loop import train
from lmforge.train.resume import describe_config_changes, last_checkpoint_message, verify_finished
from lmforge.train.trainer import BatchSource, Trainer


@dataclass(frozen=True)
class StageSpec:
    """What a stage does in its own way.

    prepare_data     downloads and converts what the recipe names; every rank calls it
    open_inputs      opens and checks data, tokenizer and model config for a number of ranks
    build_batches    where batches come from, once the model is built; every rank calls it
    """

    prepare_data: Callable[[Any, DistributedContext], None]
    open_inputs: Callable[[Any, int], RunInputs]
    build_batches: Callable[[Trainer], BatchSource]


def run_stage(config: StageConfig, spec: StageSpec, custom: CustomCode) -> int:
    """Run a stage on the ranks of this process group. Returns the exit status. See `pretrain` in run.py."""
    set_determinism(config.train.deterministic)
    if leave_out_ranks(config.parallel.model_parallel_size):
        return stand_by()
    dist_ctx = init_distributed(config.train.device, config.train.threads, collective_timeout(config))
    run = Run.from_config(config)
    try:
        with explain_failures(run):
            config, inputs, point = enter_run(config, run, dist_ctx, spec.prepare_data, spec.open_inputs)
            with dist_ctx.raise_on_all():
                estimator = MemoryEstimator.of_run(
                    config,
                    inputs.model_config,
                    inputs.batch_plan,
                    dist_ctx,
                    has_reference=has_frozen_reference(config),
                    step=point.step,
                )
                if point.step < config.train.steps:
                    estimator.check(dist_ctx)
                objective, callbacks = custom.open(config)
            ctx = start_attempt(config, run, dist_ctx, callbacks)
            final_phase, error = "failed", None
            try:
                copy_plugins(ctx)
                status = _train(ctx, spec, inputs, point, estimator, objective)
                final_phase = "interrupted" if status else "done"
                return status
            except BaseException as problem:
                error = describe_failure(problem)
                if isinstance(problem, Exception):
                    ctx.log.write_failure(problem, ctx.watch.describe_progress())
                callbacks.run_failed(ctx)
                if isinstance(problem, RunFailed):
                    raise type(problem)(f"{problem}; {last_checkpoint_message(run)}; log: {ctx.log.path}") from problem
                raise
            finally:
                end_attempt(ctx, final_phase, error)
    finally:
        destroy_distributed()
        run.unlock()


def _train(
    ctx: RunContext,
    spec: StageSpec,
    inputs: RunInputs,
    point: ResumePoint,
    estimator: MemoryEstimator,
    objective: Objective,
) -> int:
    config, steps = ctx.config, ctx.config.train.steps
    if point.step >= steps:
        point = ctx.dist_ctx.decide_on_rank0(partial(verify_finished, ctx.run, point, steps))
    for line in [*point.messages, *describe_config_changes(point, config), *_notes_on_ranks(ctx.dist_ctx)]:
        ctx.console.info(line)
    ranks = ctx.dist_ctx.rank_info
    hosts = ranks.world_size // ranks.local_world_size
    ctx.events.add("start", point.step, ranks=ranks.world_size, hosts=hosts, device=ctx.dist_ctx.device.type)
    if point.step >= steps:
        ctx.console.info(f"{ctx.run.path}: trained to step {point.step} already; give a larger --train.steps to continue")
        return 0
    snapshot = ctx.log.path.with_suffix(".memory.pickle")
    if config.log.memory_snapshot:
        record_memory(ctx.dist_ctx.device)
    with explain_out_of_memory(estimator, ctx.dist_ctx, ctx.watch.describe_progress, snapshot):
        trainer = build_trainer(ctx, inputs, point, objective, estimator)
        began = time.perf_counter()
        try:
            trainer.batch_source = spec.build_batches(trainer)
            done, stopped_by = train(trainer)
            ctx.callbacks.call("on_run_end", ctx, done, "interrupted" if stopped_by else "done")
        except UserError as problem:
            # Such as a corrupt shard: the run has begun, so it has failed.
            raise RunFailed(str(problem)) from problem
        finally:
            trainer.close()
    # A rank that hangs while it ends is named by those that wait for it here; once they have ended, nobody is left to name it.
    ctx.dist_ctx.all_gather(None)
    if config.log.memory_snapshot:
        write_memory_snapshot(snapshot)
        ctx.console.info(f"memory     what the GPU held: {snapshot} (open it at https://pytorch.org/memory_viz)")
    return _report_end(trainer, done, stopped_by, time.perf_counter() - began)


def collective_timeout(config: StageConfig) -> timedelta:
    """Twice the watchdog's timeout, so that it can report the rank that hangs and end the ranks before NCCL aborts them."""
    return max(CONTROL_TIMEOUT, timedelta(seconds=2 * (config.watch.timeout_seconds or 0.0)))


def _notes_on_ranks(dist_ctx: DistributedContext) -> list[str]:
    """Lines about standby ranks, and a hint where several ranks share one machine's cores, since one process would be
    faster."""
    ranks = dist_ctx.world_size
    if dist_ctx.device.type != "cpu" or ranks == 1 or dist_ctx.rank_info.local_world_size < ranks:
        return describe_standby()
    cores = f"{threads_per_rank(1)} cores"
    shared = f"{ranks} ranks share the {cores} of one machine: one process trains faster; leave --launch.processes out"
    return [*describe_standby(), shared]


def _report_end(trainer: Trainer, done: int, stopped_by: int, seconds: float) -> int:
    ctx = trainer.ctx
    if stopped_by:
        ctx.console.info(
            f"stopped by {signal.Signals(stopped_by).name} after step {done}, which is saved;"
            f" to continue: {typed_command()} {ctx.config.of_stage} {shlex.quote(str(ctx.run.recipe_path))}"
        )
        return 128 + stopped_by
    ctx.console.info(
        f"trained {done - trainer.start_step} steps in {format_duration(seconds)}: {ctx.run.checkpoint_path(done)}"
    )
    return 0
