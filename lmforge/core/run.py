"""The stages of training, pretrain, sft, align and distill, from beginning to end: enter the run, build the
model, attach what observes it, train, and report how it ended. What a stage does in its own way is
in specs.py.
"""

import time
from contextlib import ExitStack
from datetime import timedelta
from functools import partial

import torch

from lmforge.core.distributed.distributed import (
    CONTROL_TIMEOUT,
    destroy_distributed,
    init_distributed,
)
from lmforge.core.distributed.standby import leave_out_ranks, stand_by
from lmforge.core.errors import LockLost, RunFailed, UserError, format_duration
from lmforge.core.loop import train
from lmforge.core.losses.objective import Objective
from lmforge.core.optim.schedules import build_schedule
from lmforge.core.options.stage import StageConfig
from lmforge.core.parallel.peak_flops import rank_peak_flops
from lmforge.core.parallel.precision import choose_compile
from lmforge.core.records.runs import Run
from lmforge.core.stages.attempt import (
    describe_failure,
    describe_stop,
    describe_used_up_restarts,
    end_attempt,
    explain_failures,
    is_lost_peer,
    notes_on_ranks,
    start_attempt,
    write_memory,
)
from lmforge.core.stages.build_model import build, build_checkpointer
from lmforge.core.stages.context import RunContext
from lmforge.core.stages.custom_code import NO_CUSTOM_CODE, CustomCode
from lmforge.core.stages.enter_run import describe_config_changes, enter_run
from lmforge.core.stages.inputs import RunInputs, describe_long_sequences
from lmforge.core.stages.observer import ObservedRun
from lmforge.core.stages.observers import Observers, build_throughput, log_summary
from lmforge.core.stages.out_of_memory import explain_out_of_memory
from lmforge.core.stages.run_memory import RunMemory
from lmforge.core.stages.specs import StageSpec, spec_of
from lmforge.core.steps.checkpoints import Checkpoints
from lmforge.core.steps.determinism import set_determinism
from lmforge.core.steps.resume import ResumePoint, last_checkpoint_message, verify_finished


def run_stage(config: StageConfig, custom: CustomCode = NO_CUSTOM_CODE) -> int:
    """Train a model as the config of its stage says: from random or given weights, or from this
    run's newest checkpoint.

    Every rank calls it, with objective and callbacks of the program that calls it in `custom`.
    Returns the exit status: 0, or 128 + signal where the run was interrupted and saved. Raises
    UserError before anything of the run is written, of alignment also where what samples cannot be
    opened, and RunFailed after that.
    """
    spec = spec_of(config)
    set_determinism(config.train.deterministic)
    if leave_out_ranks(config.parallel.model_parallel_size):
        return stand_by()
    dist_ctx = init_distributed(
        config.train.device, config.train.threads, collective_timeout(config)
    )
    run = Run.from_config(config)
    try:
        with explain_failures(run):
            config, inputs, point = enter_run(
                config, run, dist_ctx, spec.prepare_data, spec.open_inputs
            )
            with dist_ctx.raise_on_all():
                memory = RunMemory.of_run(
                    config,
                    inputs.model_config,
                    inputs.batch_plan,
                    dist_ctx,
                    step=point.step,
                    teacher=inputs.teacher,
                )
                # Refuses what cannot be compiled here.
                choose_compile(config, dist_ctx.device, config.train.steps - point.step)
                if point.step < config.train.steps:
                    memory.check()
                objective, callbacks = custom.build(config)
            ctx = start_attempt(config, run, dist_ctx, callbacks)
            final_phase = "failed"
            error = None
            try:
                status = _train(ctx, spec, inputs, point, memory, objective)
                final_phase = "interrupted" if status else "done"
                return status
            except BaseException as problem:
                error = describe_failure(problem)
                if isinstance(problem, Exception):
                    ctx.log.write_failure(problem, ctx.watch.describe_progress())
                callbacks.run_failed(ctx)
                if isinstance(problem, RunFailed) and not isinstance(problem, LockLost):
                    raise type(problem)(
                        f"{problem}; {last_checkpoint_message(run)}; log: {ctx.log.path}"
                    ) from problem
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
    memory: RunMemory,
    objective: Objective,
) -> int:
    """Train from `point` to the end of the recipe. Returns the exit status."""
    config = ctx.config
    steps = ctx.config.train.steps
    dist_ctx = ctx.dist_ctx
    log = ctx.console.info
    if point.step >= steps:
        point = dist_ctx.decide_on_rank0(partial(verify_finished, ctx.run, point, steps))
    notes = [
        *notes_on_ranks(config, dist_ctx),
        *describe_used_up_restarts(dist_ctx),
        *describe_long_sequences(config, inputs),
    ]
    for line in [*point.messages, *describe_config_changes(point, config), *notes]:
        log(line)
    hosts = dist_ctx.world_size // dist_ctx.rank_info.local_world_size
    device = dist_ctx.device
    hardware = {"device": device.type, "threads": torch.get_num_threads()}
    if device.type == "cuda":
        hardware["gpu"] = torch.cuda.get_device_name(device)
    ctx.events.add("start", point.step, ranks=dist_ctx.world_size, hosts=hosts, **hardware)
    if point.step >= steps:
        log(
            f"{ctx.run.path}: trained to step {point.step} already; give a larger --train.steps to"
            " continue"
        )
        return 0
    with explain_out_of_memory(
        memory.suggest_what_fits,
        dist_ctx,
        ctx.watch.describe_progress,
        ctx.memory_snapshot,
        ctx.run.holds_lock,
    ):
        built = build(ctx, inputs, point, objective)
        peak_flops = rank_peak_flops(dist_ctx, built.dtype)
        log_summary(ctx, inputs, built, peak_flops)
        checkpointer = build_checkpointer(ctx, inputs, built)
        began = time.perf_counter()
        batches = None
        try:
            with ExitStack() as stack:
                # A save that waits for a lost rank would not end, and other ranks learn from this
                # one that it is lost.
                stack.push(
                    lambda _, problem, __: checkpointer.close(
                        drain=not (problem and is_lost_peer(problem))
                    )
                )
                batches = spec.build_batches(ctx, inputs, built)
                stack.callback(batches.close)
                throughput = build_throughput(ctx, inputs, built, batches, peak_flops)
                observers = Observers(
                    ObservedRun(ctx, inputs, built, batches, throughput, memory), checkpointer
                )
                stack.callback(observers.close)
                done, stopped_by = train(
                    built.parallel_model,
                    built.optimizer,
                    build_schedule(config.schedule, steps, config.optimizer.lr),
                    objective,
                    batches,
                    built.detector,
                    Checkpoints(
                        checkpointer,
                        config,
                        built.parallel_model,
                        built.optimizer,
                        batches,
                        built.detector,
                    ),
                    throughput,
                    observers,
                    start_step=built.point.step,
                    steps=steps,
                    max_grad_norm=config.optimizer.max_grad_norm,
                    max_bad_steps=config.faults.max_bad_steps,
                    log_every_steps=config.log.every_steps,
                )
                ctx.callbacks.call("on_run_end", ctx, done, "interrupted" if stopped_by else "done")
        except UserError as problem:
            # Such as a server that does not start.
            if batches is None and config.of_stage == "align":
                raise
            # Such as a corrupt shard: the run has begun, so it has failed.
            raise RunFailed(str(problem)) from problem
    # A rank that hangs while it ends is named by those that wait for it here; once they have ended,
    # nobody is left to name it.
    with dist_ctx.raise_on_all():
        ctx.run.ensure_lock()
    write_memory(ctx)
    if stopped_by:
        log(describe_stop(ctx, stopped_by, done))
        return 128 + stopped_by
    seconds = format_duration(time.perf_counter() - began)
    log(f"trained {done - built.point.step} steps in {seconds}: {ctx.run.checkpoint_path(done)}")
    return 0


def collective_timeout(config: StageConfig) -> timedelta:
    """Twice the watchdog's timeout, so that it can report the rank that hangs and end the ranks
    before NCCL aborts them.
    """
    return max(CONTROL_TIMEOUT, timedelta(seconds=2 * (config.watch.timeout_seconds or 0.0)))
