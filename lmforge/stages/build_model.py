"""A recipe's model: whether it can be trained, the model with its first weights, distributed over ranks, and its optimizer."""

from collections.abc import Callable
from functools import partial

import torch

from lmforge.checkpoint import CorruptCheckpoint
from lmforge.cluster.distributed import DistributedContext
from lmforge.config.sections import ParallelOptions
from lmforge.config.stage import StageConfig
from lmforge.config.tuning import TunedConfig
from lmforge.errors import UserError
from lmforge.model import build_model
from lmforge.model.config import ModelConfig
from lmforge.model.init_weights import init_adapters, init_weights
from lmforge.model.layers import LanguageModel
from lmforge.model.lora import add_lora
from lmforge.objectives.objective import Objective
from lmforge.parallel.parallel_model import ParallelModel
from lmforge.parallel.parallelize import parallelize
from lmforge.parallel.precision import DTYPES
from lmforge.plan.parameter_counts import get_lora_config
from lmforge.train.optimizers.optimizer import build_optimizer


def build_model_and_optimizer(
    config: StageConfig,
    model_config: ModelConfig,
    objective: Objective,
    dist_ctx: DistributedContext,
    dtype: torch.dtype,
    compiled: bool,
    options: ParallelOptions,
    load_weights: Callable[[LanguageModel], frozenset[str]] | None,
    resumes: bool = False,
) -> tuple[ParallelModel, torch.optim.Optimizer]:
    """The model of a recipe, distributed over the ranks as `options` say, and its optimizer.

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
        options=options,
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
