"""The stages of training, pretrain, sft and align, from beginning to end: enter the run, build the model, attach what observes
it, train, and report how it ended.

A stage is three functions (StageSpec). Those of pretraining are in pretrained.py; examples.py, prompt_inputs.py and align.py
have the others.
"""

import shlex
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch

from lmforge.cluster.distributed import CONTROL_TIMEOUT, DistributedContext, destroy_distributed, init_distributed
from lmforge.cluster.memory import record_memory, write_memory_snapshot
from lmforge.cluster.rank_info import threads_per_rank
from lmforge.cluster.standby import describe_standby, leave_out_ranks, stand_by
from lmforge.config.align import AlignConfig
from lmforge.config.stage import PretrainConfig, StageConfig
from lmforge.config.tuning import SftConfig
from lmforge.errors import RunFailed, UserError, format_duration, typed_command
from lmforge.objectives.objective import Objective
from lmforge.plan.out_of_memory import MemoryEstimator, explain_out_of_memory
from lmforge.plan.parameter_counts import training_flops_per_token
from lmforge.plan.peak_flops import rank_peak_flops
from lmforge.plugins import freeze_plugins
from lmforge.runs import Run
from lmforge.stages.alignment.align import build_preference_batches, build_rollouts
from lmforge.stages.alignment.prompt_inputs import open_prompt_inputs, prepare_prompts
from lmforge.stages.attempt import RunContext, describe_failure, end_attempt, explain_failures, start_attempt
from lmforge.stages.build_model import BuiltModel, build, build_checkpointer, log_summary
from lmforge.stages.custom_code import NO_CUSTOM_CODE, CustomCode, PluginCallbacks
from lmforge.stages.dataset_batches import DatasetBatches
from lmforge.stages.enter_run import describe_config_changes, enter_run
from lmforge.stages.examples import open_example_inputs, prepare_examples
from lmforge.stages.inputs import RunInputs
from lmforge.stages.objectives import build_objective, check_objective
from lmforge.stages.observers import Observers
from lmforge.stages.pretrained import download_pretrained, open_pretrain_inputs
from lmforge.train.callbacks import BatchSource
from lmforge.train.checkpoints import Checkpoints
from lmforge.train.determinism import set_determinism
from lmforge.train.loop import train
from lmforge.train.metrics import Throughput
from lmforge.train.optimizers.optimizer import named_optimizer_state
from lmforge.train.optimizers.schedules import build_schedule
from lmforge.train.resume import ResumePoint, last_checkpoint_message, verify_finished


@dataclass(frozen=True)
class StageSpec:
    """What a stage does in its own way.

    prepare_data     downloads and converts what the recipe names; every rank calls it
    open_inputs      opens and checks data, tokenizer and model config for a number of ranks
    build_batches    where batches come from, once the model is built; every rank calls it
    """

    prepare_data: Callable[[Any, DistributedContext], None]
    open_inputs: Callable[[Any, int], RunInputs]
    build_batches: Callable[[RunContext, RunInputs, BuiltModel], BatchSource]


def pretrain(config: PretrainConfig, custom: CustomCode = NO_CUSTOM_CODE) -> int:
    """Train a model on token shards: from random or given weights, or from this run's newest checkpoint.

    Every rank calls it, with objective and callbacks of the program that calls it in `custom`. Returns the exit status: 0, or
    128 + signal where the run was interrupted and saved. Raises UserError before anything of the run is written, and RunFailed
    after that.
    """
    return run_stage(config, StageSpec(download_pretrained, open_pretrain_inputs, DatasetBatches), custom)


def sft(config: SftConfig, custom: CustomCode = NO_CUSTOM_CODE) -> int:
    """Fine-tune a model on conversations. See `pretrain`."""
    return run_stage(config, StageSpec(prepare_examples, open_example_inputs, DatasetBatches), custom)


def align(config: AlignConfig, custom: CustomCode = NO_CUSTOM_CODE) -> int:
    """Align a model with preferences, or optimize it for a reward. See `pretrain`."""
    if config.align.method == "grpo":
        return run_stage(config, StageSpec(prepare_prompts, open_prompt_inputs, build_rollouts), custom)
    return run_stage(config, StageSpec(prepare_examples, open_example_inputs, build_preference_batches), custom)


def run_stage(config: StageConfig, spec: StageSpec, custom: CustomCode) -> int:
    """Run a stage on the ranks of this process group. Returns the exit status. See `pretrain`."""
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
                    step=point.step,
                )
                if point.step < config.train.steps:
                    estimator.check(dist_ctx)
                objective = build_objective(config) if custom.objective is None else check_objective(custom.objective)
                plugins = PluginCallbacks.of_run(config, custom.callbacks)
            ctx = start_attempt(config, run, dist_ctx, plugins)
            final_phase, error = "failed", None
            try:
                dist_ctx.decide_on_rank0(partial(freeze_plugins, config.plugins, run.path))
                status = _train(ctx, spec, inputs, point, estimator, objective)
                final_phase = "interrupted" if status else "done"
                return status
            except BaseException as problem:
                error = describe_failure(problem)
                if isinstance(problem, Exception):
                    ctx.log.write_failure(problem, ctx.watch.describe_progress())
                plugins.run_failed(ctx)
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
    """Train from `point` to the end of the recipe. Returns the exit status."""
    config, steps, dist_ctx, log = ctx.config, ctx.config.train.steps, ctx.dist_ctx, ctx.console.info
    if point.step >= steps:
        point = dist_ctx.decide_on_rank0(partial(verify_finished, ctx.run, point, steps))
    for line in [*point.messages, *describe_config_changes(point, config), *_notes_on_ranks(dist_ctx)]:
        log(line)
    hosts = dist_ctx.world_size // dist_ctx.rank_info.local_world_size
    device = dist_ctx.device
    hardware = {"device": device.type, "threads": torch.get_num_threads()}
    if device.type == "cuda":
        hardware["gpu"] = torch.cuda.get_device_name(device)
    ctx.events.add("start", point.step, ranks=dist_ctx.world_size, hosts=hosts, **hardware)
    if point.step >= steps:
        log(f"{ctx.run.path}: trained to step {point.step} already; give a larger --train.steps to continue")
        return 0
    snapshot = ctx.log.path.with_suffix(".memory.pickle")
    if config.log.memory_snapshot:
        record_memory(dist_ctx.device)
    with explain_out_of_memory(estimator, dist_ctx, ctx.watch.describe_progress, snapshot):
        built = build(ctx, inputs, point, objective)
        checkpointer = build_checkpointer(ctx, inputs, built)
        ctx.watch.watch_disk(ctx.run.checkpoints_folder, lambda: checkpointer.expected_bytes)
        flops_per_token = cache(partial(training_flops_per_token, config, inputs.model_config))
        peak_flops = rank_peak_flops(dist_ctx, built.dtype)
        prediction = estimator.predict_run(config, dist_ctx.device) if dist_ctx.is_rank0 else None
        log_summary(ctx, inputs, built, flops_per_token(config.data.sequence_length), peak_flops, prediction)
        with dist_ctx.raise_on_all():
            if dist_ctx.is_rank0:
                checkpointer.check_free_space()
        if built.parallel_model.engine != "fsdp1":  # FSDP1 runs an optimizer step to list its tensors
            checkpointer.prepare(built.parallel_model.state_dict(built.optimizer, named_optimizer_state))
        began = time.perf_counter()
        try:
            with ExitStack() as stack:
                stack.callback(checkpointer.close)
                batches = spec.build_batches(ctx, inputs, built)
                stack.callback(batches.close)
                intervals = {
                    "validation": config.validation.every_steps,
                    "save": config.checkpoint_every_steps,
                    "sample": config.sample.every_steps,
                }
                throughput = Throughput(built.parallel_model, batches, flops_per_token, peak_flops, steps, intervals)
                observers = Observers(ctx, inputs, built, batches, checkpointer, throughput, prediction)
                stack.callback(observers.close)
                done, stopped_by = train(
                    built.parallel_model,
                    built.optimizer,
                    build_schedule(config.schedule, steps, config.optimizer.lr),
                    objective,
                    batches,
                    built.detector,
                    Checkpoints(checkpointer, config, built.parallel_model, built.optimizer, batches, built.detector),
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
            # Such as a corrupt shard: the run has begun, so it has failed.
            raise RunFailed(str(problem)) from problem
    # A rank that hangs while it ends is named by those that wait for it here; once they have ended, nobody is left to name it.
    dist_ctx.all_gather(None)
    if config.log.memory_snapshot:
        write_memory_snapshot(snapshot)
        log(f"memory     what the GPU held: {snapshot} (open it at https://pytorch.org/memory_viz)")
    if stopped_by:
        again = f"{typed_command()} {config.of_stage} {shlex.quote(str(ctx.run.recipe_path))}"
        log(f"stopped by {signal.Signals(stopped_by).name} after step {done}, which is saved; to continue: {again}")
        return 128 + stopped_by
    seconds = format_duration(time.perf_counter() - began)
    log(f"trained {done - built.point.step} steps in {seconds}: {ctx.run.checkpoint_path(done)}")
    return 0


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
