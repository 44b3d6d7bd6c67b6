"""The stages of a model's life: each builds the parts and calls the one loop."""

import re
import shlex
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from lmforge import checkpoint
from lmforge.atomic_files import DISK_FULL_ERRNOS
from lmforge.checkpoint import AsyncCheckpointer, RetentionPolicy
from lmforge.cluster import distributed as cluster
from lmforge.cluster.distributed import DistributedContext
from lmforge.config.align import AlignConfig
from lmforge.config.pretrain import PretrainConfig
from lmforge.config.sft import SftConfig
from lmforge.config.stage import StageConfig
from lmforge.data.batch import Batch
from lmforge.data.loader import BatchLoader
from lmforge.errors import PeerLost, RunFailed, UserError
from lmforge.evaluate.perplexity import evaluate_loss, local_batches
from lmforge.generate.engine import generate
from lmforge.generate.sampling import SamplingParams
from lmforge.interop.config_json import to_config_json
from lmforge.model.attention import attention_backend_name
from lmforge.model.flops import FLOPS_CONVENTION
from lmforge.monitor import loss_curve as report
from lmforge.monitor.disk import DiskMonitor
from lmforge.monitor.watchdog import Watchdog
from lmforge.objectives.language import NextTokenObjective, score_text
from lmforge.objectives.objective import Objective
from lmforge.parallel.dims import data_parallel_rank_and_size, parallel_dims
from lmforge.parallel.parallel_model import ParallelModel
from lmforge.parallel.precision import choose_compile, choose_dtype
from lmforge.parallel.validate import choose_engine
from lmforge.plan.memory import checkpoint_bytes
from lmforge.plan.out_of_memory import MemoryEstimator, explain_out_of_memory
from lmforge.runs import Run, is_local
from lmforge.stages.align import build_preference_batches, build_preference_objective
from lmforge.stages.examples import open_example_inputs, prepare_examples
from lmforge.stages.feed import StageBatches, StageContext
from lmforge.stages.grpo import (
    build_policy_objective,
    build_rollout_batches,
    check_prompts_and_rewards,
    has_frozen_reference,
    open_prompt_inputs,
)
from lmforge.stages.inputs import (
    RunInputs,
    check_tracker,
    count_parameters,
    download_pretrained,
    open_pretrain_inputs,
    training_flops_per_token,
)
from lmforge.stages.pretrained import pin_checkpoints, with_original_sources
from lmforge.stages.setup import (
    build_model_and_optimizer,
    describe_peak_flops,
    device_peak_flops,
    token_rng_seed,
)
from lmforge.stages.validation import build_task_evaluator, open_validation_tasks
from lmforge.train.bad_steps import BadStepDetector
from lmforge.train.checkpoint_schedule import CheckpointSchedule
from lmforge.train.determinism import explain_nondeterministic_op, set_determinism
from lmforge.train.loop import Trainer, train
from lmforge.train.metrics import ConsoleLogger, MetricsAccumulator, MetricsFile, format_duration
from lmforge.train.optimizer import learning_rate, named_optimizer_state
from lmforge.train.resume import (
    ResumePoint,
    check_resumable,
    describe_config_changes,
    find_resume_point,
    last_checkpoint_message,
    load_resume_point,
    lock_run,
    verify_finished,
)
from lmforge.train.rollback import Rollback

# What gloo and NCCL say when the other end is gone.
PEER_LOST_PATTERN = re.compile(
    r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|remote process exited|NCCL communicator was aborted"
)


@dataclass(frozen=True)
class StageSpec:
    """What one stage of a model's life does its own way.

    fetch      has what the recipe names on this host; called once a host
    open       data, tokenizer, shape and plan, for so many ranks
    objective  what a batch is worth
    feed       where batches come from once the model is there; every rank calls it
    """

    prepare_data: Callable[[Any], None]
    open_inputs: Callable[[Any, int], RunInputs]
    build_objective: Callable[[Any], Objective]
    build_batches: Callable[[StageContext, Any], StageBatches] = lambda built, config: StageBatches(built.loader)


def pretrain(config: PretrainConfig) -> int:
    """Train a model on token shards: from random or given weights, or on from this run's newest checkpoint.

    Every rank calls it. Returns the exit status: 0, or 128 + signal where the run was interrupted and saved. Raises
    UserError before anything of the run is touched, and RunFailed after that.
    """
    return run_stage(config, StageSpec(download_pretrained, open_pretrain_inputs, lambda config: NextTokenObjective()))


def sft(config: SftConfig) -> int:
    """Fine-tune a model on conversations; as `pretrain` in all else."""
    return run_stage(config, StageSpec(prepare_examples, open_example_inputs, lambda config: NextTokenObjective()))


def align(config: AlignConfig) -> int:
    """Align a model with what people prefer, or what a function rewards; as `pretrain` in all else."""
    if config.align.method == "grpo":
        return run_stage(
            config, StageSpec(check_prompts_and_rewards, open_prompt_inputs, build_policy_objective, build_rollout_batches)
        )
    return run_stage(
        config, StageSpec(prepare_examples, open_example_inputs, build_preference_objective, build_preference_batches)
    )


def run_stage(config: StageConfig, stage: StageSpec) -> int:
    """Carry out a stage: enter the run, open what it is made from, build, train. See `pretrain`."""
    set_determinism(config.train.deterministic)
    ranks = cluster.init_distributed(config.train.device, config.train.threads)
    run = Run.from_config(config)
    try:
        goes_on = ranks.decide_on_rank0(partial(lock_run, run, config))
        with ranks.raise_on_all():
            check_tracker(config)
            choose_engine(config.parallel, ranks.world_size, ranks.device.type)
            parallel_dims(config.parallel, ranks.world_size, ranks.rank_info.local_world_size)
        config = ranks.decide_on_rank0(partial(pin_checkpoints, config))
        ranks.run_once_per_host(partial(stage.prepare_data, config))
        with ranks.raise_on_all():
            material = stage.open_inputs(config, ranks.world_size)
            config = config.with_steps(
                material.sequences_per_sample * material.train_dataset.sequences_per_epoch, material.batch_plan.rows
            )
        material = replace(material, tasks=ranks.decide_on_rank0(partial(open_validation_tasks, config, material)))
        entry = (
            ranks.decide_on_rank0(partial(find_resume_point, run, config.train.steps))
            if goes_on
            else ResumePoint(None, None, [])
        )
        config, noted = with_original_sources(config, entry.manifest)
        entry = replace(entry, messages=[*entry.messages, *noted])
        with ranks.raise_on_all():
            check_resumable(entry, config, material)
        attempt = ranks.decide_on_rank0(partial(run.start_attempt, config))
        log = run.log_path(attempt, ranks.rank_info.rank)
        if not ranks.is_rank0:
            sys.stdout = sys.stderr = open(log, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - until the process ends
        watch = Watchdog(
            ranks,
            run.health_folder,
            log,
            stall_seconds=config.watch.stall_seconds,
            timeout_seconds=config.watch.timeout_seconds,
            disk_monitor=DiskMonitor(run.checkpoints_folder, partial(next_checkpoint_bytes, run))
            if is_local(run.checkpoints_folder)
            else None,
        )
        teller = ConsoleLogger(ranks, config.train.steps, log)
        phase = "failed"
        try:
            number_bytes = choose_dtype(config.train.dtype, ranks.device)[0].itemsize
            need = MemoryEstimator(
                config,
                material.model_config,
                material.batch_plan,
                number_bytes,
                ranks.device.type == "cuda",
                count_parameters(config, material.model_config),
                has_frozen_reference(config),
            )
            with explain_out_of_memory(need, ranks, watch.describe_progress):
                status = _train(config, stage, run, entry, material, ranks, watch, teller)
            phase = "interrupted" if status else "done"
            return status
        except RunFailed as failed:
            raise type(failed)(f"{failed}; {last_checkpoint_message(run)}; log: {log}") from failed
        finally:
            watch.stop(phase)
            teller.close()
    except Exception as problem:
        # Peers that lose their groups fail too: whoever knows the cause asks for the word while it still has them.
        cluster.claim_error_reporting()
        if isinstance(problem, RuntimeError) and (found := PEER_LOST_PATTERN.search(str(problem))):
            raise PeerLost(
                f"{run.path}: another rank was lost ({found[0].lower()}); {last_checkpoint_message(run)}"
            ) from problem
        if nondeterministic := explain_nondeterministic_op(problem):
            raise RunFailed(f"{run.path}: {nondeterministic}; {last_checkpoint_message(run)}") from problem
        if isinstance(problem, OSError) and problem.errno in DISK_FULL_ERRNOS:
            raise RunFailed(f"{run.path}: no room to write ({problem.strerror}); {last_checkpoint_message(run)}") from problem
        raise
    finally:
        cluster.destroy_distributed()
        run.unlock()


def next_checkpoint_bytes(run: Run) -> int:
    """What the next checkpoint is going to take: as much as the newest; 0 where there is none yet."""
    steps = run.checkpoint_steps()
    if not steps:
        return 0
    try:
        return sum(described["bytes"] for described in checkpoint.read_manifest(run.checkpoint_path(steps[-1])).files.values())
    except (UserError, OSError):
        return 0  # it is being written, or deleted


def _train(
    config: StageConfig,
    stage: StageSpec,
    run: Run,
    resume_point: ResumePoint,
    inputs: RunInputs,
    dist_ctx: DistributedContext,
    watch: Watchdog,
    console: ConsoleLogger,
) -> int:
    if (
        resume_point.checkpoint_folder is not None
        and resume_point.manifest is not None
        and resume_point.manifest.step >= config.train.steps
    ):
        resume_point = dist_ctx.decide_on_rank0(partial(verify_finished, run, resume_point, config.train.steps))
    for line in [*resume_point.messages, *describe_config_changes(resume_point, config)]:
        console.info(line)
    start = resume_point.manifest.step if resume_point.manifest else 0
    if start >= config.train.steps:
        console.info(f"{run.path}: trained to step {start} already; give a larger --train.steps to go on")
        return 0
    watch.set_phase("building", start)
    dtype, dtype_why = choose_dtype(config.train.dtype, dist_ctx.device)
    with dist_ctx.raise_on_all():
        compiled, compile_why = choose_compile(config.train.compile, dist_ctx.device, config.train.steps - start)
    objective = stage.build_objective(config)
    trained, optimizer = build_model_and_optimizer(
        config,
        inputs.model_config,
        objective,
        dist_ctx,
        dtype,
        compiled,
        init_weights=resume_point.checkpoint_folder is None,
        pretrained=inputs.pretrained,
    )
    guard = BadStepDetector(dist_ctx, spike_sigmas=config.faults.spike_sigmas, window_steps=config.faults.spike_window_steps)
    if resume_point.checkpoint_folder is not None:
        watch.set_phase("loading", start)
        resume_point = load_resume_point(run, resume_point, config.train.steps, trained, optimizer, console.info)
        assert resume_point.manifest is not None
        start = resume_point.manifest.step
        guard.load_state_dict(resume_point.manifest.bad_step_detector, resume_point.manifest.skipped_batches)
    peak = device_peak_flops(dist_ctx.device, dtype)
    _log_summary(config, inputs, trained, console, is_new_run=resume_point.checkpoint_folder is None)
    attention = (
        "transformers', dense mask" if inputs.model_config.family == "transformers" else attention_backend_name(dist_ctx.device)
    )
    console.info(
        f"compute    {_dtype_name(dtype)} ({dtype_why}){_float8_note(config)}, masters {config.train.master_dtype},"
        f" attention {attention}, compile {_on_or_off(compiled)} ({compile_why})"
    )
    if config.train.deterministic:
        console.info(
            "bits       the same from run to run on these ranks, this hardware and these versions (train.deterministic)"
        )
    console.info(f"MFU is of  {describe_peak_flops(peak, dist_ctx.device)}: {FLOPS_CONVENTION}")

    place, places = data_parallel_rank_and_size(config.parallel, dist_ctx.rank_info.rank, dist_ctx.world_size)
    loader = BatchLoader(
        inputs.train_dataset,
        global_batch_size=inputs.batch_plan.rows,
        micro_batch_size=inputs.batch_plan.micro_batch_size,
        data_parallel_rank=place,
        data_parallel_size=places,
        device=dist_ctx.device,
        rng_seed=token_rng_seed(config),
    )
    metrics = (
        MetricsFile(run.metrics_path, run.path / "tensorboard" if config.log.tensorboard else None)
        if dist_ctx.is_rank0
        else None
    )
    saver = _build_checkpointer(run, config, inputs, trained, dtype, console)
    with dist_ctx.raise_on_all():
        if dist_ctx.is_rank0:
            saver.check_free_space()

    def about_step(step: int) -> dict[str, Any]:
        samples = (step + guard.skipped_batches) * inputs.batch_plan.rows
        return {"consumed_sequences": samples, "rng": checkpoint.get_rng_state(), "bad_step_detector": guard.state_dict()}

    def state(kinds: tuple[str, ...]) -> dict[str, Any]:
        whole = trained.state_dict(optimizer, named_optimizer_state)
        if feed.get_state is not None and "optimizer" in kinds:
            return whole | {"rollouts": feed.get_state()}
        return {kind: whole[kind] for kind in kinds}

    built = StageContext(
        run, inputs, objective, trained, loader, watch, dtype, start, resume_point.checkpoint_folder, console.info, console.warn
    )
    ask = build_task_evaluator(config, inputs, trained, watch, console)
    feed = StageBatches(loader)
    began = time.perf_counter()
    try:
        feed = stage.build_batches(built, config)
        measure = _build_validate(config, inputs, trained, watch, objective, feed)
        done, stopped = train(
            Trainer(
                parallel_model=trained,
                num_items=objective.num_items,
                optimizer=optimizer,
                lr_schedule=lambda step: learning_rate(step, config.train.steps, config.schedule, config.optimizer.lr),
                batch_source=feed.batch_source,
                batch_plan=inputs.batch_plan,
                dist_ctx=dist_ctx,
                watch=watch,
                console=console,
                metrics_file=metrics,
                steps=config.train.steps,
                max_grad_norm=config.optimizer.max_grad_norm,
                log_every=config.log.every_steps,
                validate_every=config.validation.every_steps,
                validate_at_start=config.validation.at_start,
                sample_every=config.sample.every_steps,
                bad_step_detector=guard,
                max_bad_steps=config.faults.max_bad_steps,
                rollback=Rollback(run, config, inputs, trained, optimizer, guard, saver, console.warn),
                checkpoint_schedule=CheckpointSchedule(
                    saver,
                    config.checkpoint,
                    every_steps=config.checkpoint_every_steps,
                    total_steps=config.train.steps,
                    is_rank0=dist_ctx.is_rank0,
                    get_state=state,
                    get_metadata=about_step,
                ),
                validate=lambda step: measure(step) | ask(step),
                sample=_build_sample(config, inputs, trained, console),
                flops_per_token=training_flops_per_token(config, inputs.model_config),
                peak_flops=peak,
            ),
            start,
        )
    except UserError as problem:  # such as a shard that went bad: the run is on its way, so it has failed
        raise RunFailed(str(problem)) from problem
    finally:
        saver.drain()
        feed.close()
        loader.close()
        if metrics is not None:
            metrics.close()
    if stopped:
        console.info(
            f"stopped by {signal.Signals(stopped).name} after step {done}, which is saved;"
            f" to continue: lmforge {config.of_stage} {shlex.quote(str(run.recipe_path))}"
        )
        return 128 + stopped
    console.info(f"trained {done - start} steps in {format_duration(time.perf_counter() - began)}: {run.checkpoint_path(done)}")
    if dist_ctx.is_rank0 and any(record.get("loss") is not None for record in run.read_metrics()):
        console.info(f"loss curve: {report.draw_loss_curve(run)}")
    return 0


def _build_checkpointer(
    run: Run, config: StageConfig, inputs: RunInputs, parallel_model: ParallelModel, dtype: torch.dtype, console: ConsoleLogger
) -> AsyncCheckpointer:
    chosen = config.checkpoint
    return AsyncCheckpointer(
        run,
        parallel_model.dist_ctx,
        RetentionPolicy(chosen.keep_last, chosen.keep_best, chosen.best_metric, chosen.best_mode == "max"),
        metadata={
            "plan_hash": inputs.train_dataset.plan_hash,
            "global_batch_size": inputs.batch_plan.rows,
            "hf_config": to_config_json(inputs.model_config),
            "recipe": config.model_dump(mode="json"),
            "tokenizer_hash": inputs.tokenizer.hash,
            "written_by": {
                "ranks": parallel_model.dist_ctx.world_size,
                "engine": parallel_model.description,
                "dtype": str(dtype),
                "data": inputs.data_source,
            },
        },
        tokenizer=inputs.tokenizer,
        log=console.warn,
        async_save=chosen.async_save,
        expected_bytes=checkpoint_bytes(
            config.optimizer, config.train.master_dtype, count_parameters(config, inputs.model_config)
        ),
    )


def _log_summary(
    config: StageConfig, inputs: RunInputs, parallel_model: ParallelModel, console: ConsoleLogger, is_new_run: bool
) -> None:
    """Say what is about to be trained, on what, and by whom."""
    ranks, shape = parallel_model.dist_ctx, inputs.model_config
    counts = count_parameters(config, shape)
    total, learnt = counts.total, counts.trained
    on_gpu = ranks.device.type == "cuda"
    where = torch.cuda.get_device_name(ranks.device) if on_gpu else f"cpu, {torch.get_num_threads()} threads a rank"
    console.info(
        f"model      {total:,} parameters ({shape.model_type}){'' if learnt == total else f', {learnt:,} of them trained'},"
        f" {training_flops_per_token(config, shape):.3g} FLOPs a token"
    )
    if is_new_run:
        console.info(f"weights    {f'of {config.model.source}' if inputs.pretrained else f'random, seed {config.train.seed}'}")
    console.info(f"data       {inputs.data_summary}")
    console.info(f"batch      {inputs.batch_plan}")
    console.info(
        f"engine     {parallel_model.description}, {ranks.world_size} {'rank' if ranks.world_size == 1 else 'ranks'} on {where}"
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _float8_note(config: StageConfig) -> str:
    return ", products of the blocks in float8 (MFU is of the bf16 peak all the same)" if config.train.float8 else ""


def _on_or_off(enabled: bool) -> str:
    return "on" if enabled else "off"


def _build_validate(
    config: StageConfig,
    inputs: RunInputs,
    parallel_model: ParallelModel,
    watch: Watchdog,
    objective: Objective,
    batches: StageBatches,
) -> Callable[[int], dict[str, float]]:
    if batches.validate is not None:
        return batches.validate
    if (held_out := inputs.validation_dataset) is None:
        return lambda step: {}
    token_bytes = torch.from_numpy(inputs.tokenizer.token_byte_lengths()).to(parallel_model.dist_ctx.device)
    place = data_parallel_rank_and_size(
        config.parallel, parallel_model.dist_ctx.rank_info.rank, parallel_model.dist_ctx.world_size
    )

    def validate(step: int) -> dict[str, float]:
        def score(batch: Batch) -> torch.Tensor:
            watch.set_phase("evaluate", step)  # each batch is progress, however many there are
            with torch.no_grad():
                return parallel_model.score(batch, score_fn=partial(score_text, token_bytes=token_bytes))

        measured = evaluate_loss(
            score,
            held_out,
            parallel_model.dist_ctx,
            num_sequences=config.validation.sequences,
            batch_size=inputs.batch_plan.micro_batch_size,
            shard=place,
        )
        return {"val/loss": measured["loss"], "val/bits_per_byte": measured["bits_per_byte"]}

    def validate_objective(step: int) -> dict[str, float]:
        meter = MetricsAccumulator(parallel_model.dist_ctx)
        for batch in local_batches(
            held_out, place, num_sequences=config.validation.sequences, batch_size=inputs.batch_plan.micro_batch_size
        ):
            watch.set_phase("evaluate", step)
            with torch.no_grad():
                _, metrics = parallel_model.score(
                    batches.add_extras(batch.to(parallel_model.dist_ctx.device)), score_fn=objective.loss
                )
            meter.add(metrics)
        return {f"val/{name}": value for name, value in meter.reduce_and_reset().items()}

    return validate if isinstance(objective, NextTokenObjective) else validate_objective


def _build_sample(config: StageConfig, inputs: RunInputs, parallel_model: ParallelModel, console: ConsoleLogger) -> Any:
    def sample(step: int) -> None:
        # Every rank writes the same text: sharded weights are gathered together, and nobody waits for one that writes.
        with parallel_model.unsharded() as model, torch.compiler.set_stance("force_eager"), parallel_model.autocast():
            completions = generate(
                model,
                inputs.tokenizer,
                config.sample.prompts,
                max_tokens=config.sample.max_tokens,
                sampling=SamplingParams(config.sample.temperature),
                seed=config.train.seed + step,
            )
        for prompt, completion in zip(config.sample.prompts, completions, strict=True):
            console.info(f"  sample: {(prompt + completion.text)!r}")

    return sample
