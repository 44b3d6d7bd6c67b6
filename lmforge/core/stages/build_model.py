"""A recipe's model with its first weights, distributed over ranks, its optimizer, and its
checkpointer.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from lmforge.core import registry
from lmforge.core.checkpoint import AsyncCheckpointer, CorruptCheckpoint, RetentionPolicy
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.losses.objective import Objective
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import init_adapters, init_weights
from lmforge.core.model.layers import LanguageModel
from lmforge.core.model.parametrization import relative_to_base
from lmforge.core.model.setup import ModelSetup
from lmforge.core.model.state_bytes import checkpoint_bytes
from lmforge.core.optim.optimizer import build_optimizer, named_optimizer_state
from lmforge.core.options.stage import StageConfig
from lmforge.core.parallel.parallel_model import ParallelModel
from lmforge.core.parallel.parallelize import parallelize
from lmforge.core.parallel.precision import DTYPES, choose_compile
from lmforge.core.records.run_records import higher_is_better
from lmforge.core.stages.context import RunContext
from lmforge.core.stages.inputs import RunInputs
from lmforge.core.stages.parameter_counts import count_parameters, get_lora_config
from lmforge.core.stages.weight_source import find_weights
from lmforge.core.steps.bad_steps import BadStepDetector
from lmforge.core.steps.resume import ResumePoint, load_resume_point

DEFAULT_BIAS_UPDATE_SPEED = 0.001  # of pretraining


@dataclass(frozen=True)
class BuiltModel:
    """The model of a run, ready to train from `point` on: in `dtype`, its blocks `compiled` or not,
    and why.
    """

    parallel_model: ParallelModel
    optimizer: torch.optim.Optimizer
    objective: Objective
    detector: BadStepDetector
    point: ResumePoint
    dtype: torch.dtype
    compiled: bool
    compile_reason: str


def build(
    ctx: RunContext, inputs: RunInputs, point: ResumePoint, objective: Objective
) -> BuiltModel:
    """Build the model of a run and its optimizer, with the weights of `point`.

    Every rank calls it. Raises UserError or RunFailed where they do not fit the ranks.
    """
    config = ctx.config
    faults = ctx.config.faults
    dist_ctx = ctx.dist_ctx
    ctx.watch.set_phase("building", point.step)
    dtype = DTYPES[config.train.dtype]
    with dist_ctx.raise_on_all():
        compiled, compile_reason = choose_compile(
            config, dist_ctx.device, config.train.steps - point.step
        )
    resumes = point.manifest is not None
    parallel_model, optimizer = build_model_and_optimizer(
        config,
        inputs.model_config,
        objective,
        dist_ctx,
        dtype,
        compiled,
        inputs.load_weights,
        resumes,
    )
    if compiled:
        ctx.watch.follow_compilation()
    detector = BadStepDetector(dist_ctx, spike_sigmas=faults.spike_sigmas)
    if resumes:
        ctx.watch.set_phase("loading", point.step)
        point = load_resume_point(
            ctx.run, config.train.steps, point, parallel_model, optimizer, ctx.console.info
        )
        assert point.manifest is not None
        detector.load_state_dict(point.manifest.bad_step_detector, point.manifest.batch_offset)
    return BuiltModel(
        parallel_model, optimizer, objective, detector, point, dtype, compiled, compile_reason
    )


def empty_model(config: StageConfig, model_config: ModelConfig) -> LanguageModel:
    """The model of a recipe without memory for its weights, in their dtype."""
    model = build_model(model_config, "meta").to(DTYPES[config.train.master_dtype])
    model.setup = ModelSetup(relative_to_base(config.model, model_config))
    return model


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

    The model has the weights that `load_weights` reads, or random ones. If it `resumes`, they are
    unset, since a checkpoint is loaded later.

    Every rank calls it. Raises UserError, on every rank, where the recipe does not fit them.
    """
    model = empty_model(config, model_config)
    model.setup = replace(
        model.setup,
        dropout=config.model.dropout,
        neftune_noise_alpha=config.neftune_noise_alpha,
    )
    if model.balance is not None:
        options = config.model
        speed = options.bias_update_speed
        if speed is None:
            speed = 0.0 if config.is_fine_tuning else DEFAULT_BIAS_UPDATE_SPEED
        model.balance.config = replace(
            model.balance.config,
            scope=options.router_aux_loss_scope,
            z_loss_coef=options.router_z_loss_coef,
            bias_update_speed=speed,
        )
    if (adapters := get_lora_config(config)) is not None:
        registry.get("transform", "lora").load()(model, adapters)

    def fill_weights(model: LanguageModel) -> None:
        """Fill the weights of this rank, from files or at random; nothing is sent between ranks."""
        with dist_ctx.raise_on_all():
            try:
                if load_weights is None:
                    init_weights(model, config.train.seed, config.model.embedding_initializer_range)
                else:
                    init_adapters(model, config.train.seed)
                    init_adapters(model, config.train.seed, ends=load_weights(model))
            except CorruptCheckpoint as reason:
                raise CorruptCheckpoint(
                    f"{config.model.source}: {reason}; name another checkpoint"
                ) from None

    parallel_model = parallelize(
        model,
        objective.loss,
        dist_ctx=dist_ctx,
        dtype=dtype,
        compile_model=compiled,
        float8=config.train.float8,
        options=config.parallel,
        init_weights=(lambda model: None) if resumes else fill_weights,
        loads_weights=load_weights is not None,
    )
    return parallel_model, build_optimizer(
        parallel_model.model, config.optimizer, parallel_model.parameter_shapes
    )


def build_checkpointer(ctx: RunContext, inputs: RunInputs, built: BuiltModel) -> AsyncCheckpointer:
    """What writes the checkpoints of a run, with what their manifests say of it.

    Every rank calls it.

    Raises RunFailed where the disk has no space for one.
    """
    options = ctx.config.checkpoint
    counts = count_parameters(inputs.model_config, get_lora_config(ctx.config))
    metadata = inputs.manifest_fields(ctx.config)
    model = built.parallel_model
    writer: dict[str, Any] = {
        "ranks": ctx.dist_ctx.world_size,
        "engine": model.description,
        "dtype": str(built.dtype),
    }
    point = built.point
    if point.manifest is not None:
        writer["multimodal"] = point.manifest.written_by.get("multimodal")
    elif ctx.config.model.source is not None and inputs.load_weights is not None:
        with ctx.dist_ctx.raise_on_all():
            writer["multimodal"] = find_weights(ctx.config.model.source).multimodal
    metadata["written_by"] = writer | metadata["written_by"]
    checkpointer = AsyncCheckpointer(
        ctx.run,
        ctx.dist_ctx,
        RetentionPolicy(
            options.keep_last,
            options.keep_best,
            options.best_metric,
            higher_is_better(options.best_metric),
        ),
        metadata=metadata,
        tokenizer=inputs.tokenizer,
        log=ctx.console.warn,
        async_save=options.async_save,
        expected_bytes=checkpoint_bytes(
            ctx.config.optimizer, ctx.config.train.master_dtype, counts
        ),
    )
    ctx.watch.watch_disk(ctx.run.checkpoints_folder, lambda: checkpointer.expected_bytes)
    with ctx.dist_ctx.raise_on_all():
        if ctx.dist_ctx.is_rank0:
            checkpointer.check_free_space()
            done = point.step
            steps = ctx.config.train.steps
            saves, kept = (
                steps // every - done // every if every else 0
                for every in (ctx.config.checkpoint_every_steps, options.keep_every_steps)
            )
            for line in checkpointer.describe_missing_room(kept, saves):
                ctx.console.warn(line)
    if model.engine != "fsdp1":  # FSDP1 runs an optimizer step to list its tensors
        checkpointer.prepare(model.state_dict(built.optimizer, named_optimizer_state))
    return checkpointer
