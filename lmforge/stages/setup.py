"""The one place where a Trainer is built: model, optimizer, weights, checkpointer; and the summary that is logged."""

from functools import cache, partial

import torch

from lmforge.checkpoint import AsyncCheckpointer, RetentionPolicy
from lmforge.errors import format_count
from lmforge.interop.config_json import to_config_json
from lmforge.model.attention_backend import describe_attention_backend
from lmforge.monitor.usage.other_trainings import other_trainings
from lmforge.objectives.objective import Objective
from lmforge.parallel.parallel_model import ParallelModel
from lmforge.parallel.precision import choose_compile, choose_dtype
from lmforge.plan.memory import checkpoint_bytes
from lmforge.plan.out_of_memory import MemoryEstimator
from lmforge.plan.parameter_counts import count_parameters, training_flops_per_token
from lmforge.plan.peak_flops import rank_peak_flops
from lmforge.plugins import describe_plugins
from lmforge.stages.build_model import build_model_and_optimizer
from lmforge.train.bad_steps import BadStepDetector
from lmforge.train.inputs import ResumePoint, RunContext, RunInputs
from lmforge.train.metrics import MetricsFile, PredictionCheck, describe_device
from lmforge.train.optimizers.optimizer import named_optimizer_state
from lmforge.train.resume import load_resume_point
from lmforge.train.trainer import Trainer


def build_trainer(
    ctx: RunContext, inputs: RunInputs, point: ResumePoint, objective: Objective, estimator: MemoryEstimator
) -> Trainer:
    """Everything that the loop drives, with the weights of `point`; `batch_source` is left to the stage.

    `estimator` predicts what the run will need. Every rank calls it. Raises UserError or RunFailed where they do not
    fit together.
    """
    config, faults, dist_ctx = ctx.config, ctx.config.faults, ctx.dist_ctx
    ctx.watch.set_phase("building", point.step)
    dtype, dtype_reason = choose_dtype(config.train.dtype, dist_ctx.device)
    with dist_ctx.raise_on_all():
        compiled, compile_reason = choose_compile(config, dist_ctx.device, config.train.steps - point.step)
    resumes = point.manifest is not None
    parallel_model, optimizer = build_model_and_optimizer(
        config,
        inputs.model_config,
        objective,
        dist_ctx,
        dtype,
        compiled,
        config.parallel,
        inputs.load_weights,
        resumes,
    )
    if compiled:
        ctx.watch.follow_compilation()
    detector = BadStepDetector(dist_ctx, spike_sigmas=faults.spike_sigmas, window_steps=faults.spike_window_steps)
    if resumes:
        ctx.watch.set_phase("loading", point.step)
        point = load_resume_point(ctx, point, parallel_model, optimizer)
        assert point.manifest is not None
        detector.load_state_dict(point.manifest.bad_step_detector, point.manifest.batch_offset)
    checkpointer = _build_checkpointer(ctx, inputs, parallel_model, dtype)
    ctx.watch.watch_disk(ctx.run.checkpoints_folder, lambda: checkpointer.expected_bytes)
    trainer = Trainer(
        ctx,
        inputs,
        point,
        objective,
        dtype,
        parallel_model,
        optimizer,
        detector,
        checkpointer,
        MetricsFile(ctx.run.metrics_path) if dist_ctx.is_rank0 else None,
        flops_per_token=cache(partial(training_flops_per_token, config, inputs.model_config)),
        peak_flops=rank_peak_flops(dist_ctx, dtype),
        compiled=compiled,
    )
    if dist_ctx.is_rank0:
        prediction = estimator.predict_run(config, dist_ctx.device)
        trainer.prediction_check = PredictionCheck(prediction, inputs.batch_plan.tokens, point.step, ctx.console.info)
    _log_summary(trainer, f"compile {'on' if compiled else 'off'} ({compile_reason})", dtype_reason)
    with dist_ctx.raise_on_all():
        if dist_ctx.is_rank0:
            checkpointer.check_free_space()
    if parallel_model.engine != "fsdp1":  # FSDP1 runs an optimizer step to list its tensors
        checkpointer.prepare(parallel_model.state_dict(optimizer, named_optimizer_state))
    return trainer


def _build_checkpointer(
    ctx: RunContext, inputs: RunInputs, parallel_model: ParallelModel, dtype: torch.dtype
) -> AsyncCheckpointer:
    options, counts = ctx.config.checkpoint, count_parameters(ctx.config, inputs.model_config)
    return AsyncCheckpointer(
        ctx.run,
        ctx.dist_ctx,
        RetentionPolicy(options.keep_last, options.keep_best, options.best_metric, options.best_mode == "max"),
        metadata={
            "global_batch_size": inputs.batch_plan.global_batch_size,
            "hf_config": to_config_json(inputs.model_config),
            "recipe": ctx.config.model_dump(mode="json", exclude={"plugins"}),
            "tokenizer_hash": inputs.tokenizer.hash,
            "written_by": {
                "ranks": ctx.dist_ctx.world_size,
                "engine": parallel_model.description,
                "dtype": str(dtype),
                "data": inputs.data_source,
                "sources": dict(inputs.source_folders),
                "plugins": describe_plugins(ctx.config.plugins),
            },
        },
        tokenizer=inputs.tokenizer,
        log=ctx.console.warn,
        async_save=options.async_save,
        expected_bytes=checkpoint_bytes(ctx.config.optimizer, ctx.config.train.master_dtype, counts),
    )


def _log_summary(trainer: Trainer, compile_words: str, dtype_reason: str) -> None:
    """Log the model, the data and how it will be trained."""
    ctx, inputs, log = trainer.ctx, trainer.inputs, trainer.ctx.console.info
    config, model_config, dist_ctx = ctx.config, inputs.model_config, ctx.dist_ctx
    counts = count_parameters(config, model_config)
    step, kind = trainer.resume_point.step, model_config.model_type
    ctx.events.add("model", step, model_type=kind, parameters=counts.total, trained=counts.trained)
    partly = "" if counts.trained == counts.total else f", {counts.trained:,} of them trained"
    log(
        f"model      {counts.total:,} parameters ({kind}){partly},"
        f" {trainer.flops_per_token(config.data.sequence_length):.3g} FLOPs per token"
    )
    if trainer.resume_point.manifest is None:
        log(f"weights    {f'of {config.model.source}' if inputs.load_weights else f'random, seed {config.train.seed}'}")
    log(f"data       {inputs.data_summary}")
    log(f"batch      {inputs.batch_plan}")
    on_gpu = dist_ctx.device.type == "cuda"
    device = describe_device(dist_ctx.device)
    log(f"engine     {trainer.parallel_model.description}, {format_count(dist_ctx.world_size, 'rank')} on {device}")
    if not on_gpu and (others := other_trainings()):
        log(f"shared     other trainings use these cores too, so each is slower: process {', '.join(map(str, others))}")
    wrapped = model_config.implementation == "transformers"
    attention = "transformers', dense mask"
    if not wrapped:
        context_parallel = config.parallel.context_parallel_degree > 1
        attention = describe_attention_backend(
            dist_ctx.device, trainer.dtype, model_config.head_dim, context_parallel=context_parallel
        )
    float8 = ", products of the blocks in float8 (the MFU is of the bf16 peak)" if config.train.float8 else ""
    log(
        f"compute    {str(trainer.dtype).removeprefix('torch.')} ({dtype_reason}){float8},"
        f" master weights in {config.train.master_dtype}, attention {attention}, {compile_words}"
    )
    if trainer.prediction_check is not None:
        log(f"predicted  {trainer.prediction_check.describe()}")
    if config.train.deterministic:
        log("bits       the same from run to run on these ranks, this hardware and these versions (train.deterministic)")
    if trainer.peak_flops is None:
        log("MFU        left out: the peak of this GPU is not in the table")
    else:
        source = "data sheet" if on_gpu else "measured on this machine"
        log(f"MFU        relative to {trainer.peak_flops / 1e9:,.0f} GFLOP/s per rank ({source})")
