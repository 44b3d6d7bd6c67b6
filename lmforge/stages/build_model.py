"""A recipe's model with its first weights, distributed over ranks, its optimizer, and its checkpointer; and the lines that
describe them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from lmforge.checkpoint import AsyncCheckpointer, CorruptCheckpoint, RetentionPolicy
from lmforge.cluster.distributed import DistributedContext
from lmforge.config.stage import StageConfig
from lmforge.config.tuning import TunedConfig
from lmforge.errors import UserError, format_count
from lmforge.interop.config_json import to_config_json
from lmforge.model import build_model
from lmforge.model.attention_backend import describe_attention_backend
from lmforge.model.config import ModelConfig
from lmforge.model.init_weights import init_adapters, init_weights
from lmforge.model.layers import LanguageModel
from lmforge.model.lora import add_lora
from lmforge.monitor.usage.other_trainings import other_trainings
from lmforge.objectives.objective import Objective
from lmforge.parallel.parallel_model import ParallelModel
from lmforge.parallel.parallelize import parallelize
from lmforge.parallel.precision import DTYPES, choose_compile, choose_dtype
from lmforge.plan.memory import checkpoint_bytes
from lmforge.plan.parameter_counts import count_parameters, get_lora_config
from lmforge.plan.run_prediction import RunPrediction
from lmforge.plugins import describe_plugins
from lmforge.stages.attempt import RunContext
from lmforge.stages.inputs import RunInputs
from lmforge.train.bad_steps import BadStepDetector
from lmforge.train.metrics import describe_device
from lmforge.train.optimizers.optimizer import build_optimizer
from lmforge.train.resume import ResumePoint, load_resume_point


@dataclass(frozen=True)
class BuiltModel:
    """The model of a run, ready to train from `point` on: in `dtype`, its blocks `compiled` or not, and why."""

    parallel_model: ParallelModel
    optimizer: torch.optim.Optimizer
    objective: Objective
    detector: BadStepDetector
    point: ResumePoint
    dtype: torch.dtype
    compiled: bool
    compile_reason: str


def build(ctx: RunContext, inputs: RunInputs, point: ResumePoint, objective: Objective) -> BuiltModel:
    """Build the model of a run and its optimizer, with the weights of `point`.

    Every rank calls it. Raises UserError or RunFailed where they do not fit the ranks.
    """
    config, faults, dist_ctx = ctx.config, ctx.config.faults, ctx.dist_ctx
    ctx.watch.set_phase("building", point.step)
    dtype, _ = choose_dtype(config.train.dtype, dist_ctx.device)
    with dist_ctx.raise_on_all():
        compiled, compile_reason = choose_compile(config, dist_ctx.device, config.train.steps - point.step)
    resumes = point.manifest is not None
    parallel_model, optimizer = build_model_and_optimizer(
        config, inputs.model_config, objective, dist_ctx, dtype, compiled, inputs.load_weights, resumes
    )
    if compiled:
        ctx.watch.follow_compilation()
    detector = BadStepDetector(dist_ctx, spike_sigmas=faults.spike_sigmas, window_steps=faults.spike_window_steps)
    if resumes:
        ctx.watch.set_phase("loading", point.step)
        point = load_resume_point(ctx.run, config.train.steps, point, parallel_model, optimizer, ctx.console.info)
        assert point.manifest is not None
        detector.load_state_dict(point.manifest.bad_step_detector, point.manifest.batch_offset)
    return BuiltModel(parallel_model, optimizer, objective, detector, point, dtype, compiled, compile_reason)


def build_model_and_optimizer(
    config: StageConfig,
    model_config: ModelConfig,
    objective: Objective,
    dist_ctx: DistributedContext,
    dtype: torch.dtype,
    compiled: bool,
    load_weights: Callable[[LanguageModel], frozenset[str]] | None,
    resumes: bool = False,
) -> tuple[ParallelModel, torch.optim.Optimizer]:
    """The model of a recipe, distributed over the ranks as it says, and its optimizer.

    The model has the weights that `load_weights` reads, or random ones. If it `resumes`, they are unset, since a checkpoint is
    loaded later.

    Every rank calls it. Raises UserError, on every rank, where the recipe does not fit them.
    """
    model = build_model(model_config, "meta").to(DTYPES[config.train.master_dtype])
    model.dropout = config.model.dropout
    if isinstance(config, TunedConfig):
        model.neftune_noise_alpha = config.model.neftune_noise_alpha
        if (adapters := get_lora_config(config)) is not None:
            add_lora(model, adapters)
    parallel_model = parallelize(
        model,
        objective.loss,
        dist_ctx=dist_ctx,
        dtype=dtype,
        compile_model=compiled,
        float8=config.train.float8,
        options=config.parallel,
        init_weights=(lambda model: None) if resumes else partial(_fill_weights, config, dist_ctx, load_weights),
        loads_weights=load_weights is not None,
    )
    return parallel_model, build_optimizer(parallel_model.model, config.optimizer, parallel_model.parameter_shapes)


def _fill_weights(
    config: StageConfig,
    dist_ctx: DistributedContext,
    load_weights: Callable[[LanguageModel], frozenset[str]] | None,
    model: LanguageModel,
) -> None:
    """Give a model its first weights: those that `load_weights` reads, or random ones. Nothing is sent between ranks."""
    with dist_ctx.raise_on_all():
        try:
            if load_weights is None:
                init_weights(model, config.train.seed, config.model.embedding_initializer_range)
            else:
                init_adapters(model, config.train.seed, new_names=load_weights(model))
        except CorruptCheckpoint as reason:
            raise UserError(f"{config.model.source}: {reason}; name another checkpoint") from None


def build_checkpointer(ctx: RunContext, inputs: RunInputs, built: BuiltModel) -> AsyncCheckpointer:
    """What writes the checkpoints of a run, with what their manifests say of it."""
    options, counts = ctx.config.checkpoint, count_parameters(inputs.model_config, get_lora_config(ctx.config))
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
                "engine": built.parallel_model.description,
                "dtype": str(built.dtype),
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


def log_summary(
    ctx: RunContext,
    inputs: RunInputs,
    built: BuiltModel,
    flops_per_token: float,
    peak_flops: float | None,
    prediction: RunPrediction | str | None,
) -> None:
    """Log the model, the data and how it will be trained; `prediction` on rank 0."""
    log, config, model_config, dist_ctx = ctx.console.info, ctx.config, inputs.model_config, ctx.dist_ctx
    counts = count_parameters(model_config, get_lora_config(config))
    kind = model_config.model_type
    ctx.events.add("model", built.point.step, model_type=kind, parameters=counts.total, trained=counts.trained)
    partly = "" if counts.trained == counts.total else f", {counts.trained:,} of them trained"
    log(f"model      {counts.total:,} parameters ({kind}){partly}, {flops_per_token:.3g} FLOPs per token")
    if built.point.manifest is None:
        log(f"weights    {f'of {config.model.source}' if inputs.load_weights else f'random, seed {config.train.seed}'}")
    log(f"data       {inputs.data_summary}")
    log(f"batch      {inputs.batch_plan}")
    on_gpu = dist_ctx.device.type == "cuda"
    device = describe_device(dist_ctx.device)
    log(f"engine     {built.parallel_model.description}, {format_count(dist_ctx.world_size, 'rank')} on {device}")
    if not on_gpu and (others := other_trainings()):
        log(f"shared     other trainings use these cores too, so each is slower: process {', '.join(map(str, others))}")
    wrapped = model_config.implementation == "transformers"
    attention = "transformers', dense mask"
    if not wrapped:
        context_parallel = config.parallel.context_parallel_degree > 1
        attention = describe_attention_backend(
            dist_ctx.device, built.dtype, model_config.head_dim, context_parallel=context_parallel
        )
    _, dtype_reason = choose_dtype(config.train.dtype, dist_ctx.device)
    compile_words = f"compile {'on' if built.compiled else 'off'} ({built.compile_reason})"
    float8 = ", products of the blocks in float8 (the MFU is of the bf16 peak)" if config.train.float8 else ""
    log(
        f"compute    {str(built.dtype).removeprefix('torch.')} ({dtype_reason}){float8},"
        f" master weights in {config.train.master_dtype}, attention {attention}, {compile_words}"
    )
    if prediction is not None:
        log(f"predicted  {prediction if isinstance(prediction, str) else prediction.describe()}")
    if config.train.deterministic:
        log("bits       the same from run to run on these ranks, this hardware and these versions (train.deterministic)")
    if peak_flops is None:
        log("MFU        left out: the peak of this GPU is not in the table")
    else:
        source = "data sheet" if on_gpu else "measured on this machine"
        log(f"MFU        relative to {peak_flops / 1e9:,.0f} GFLOP/s per rank ({source})")
