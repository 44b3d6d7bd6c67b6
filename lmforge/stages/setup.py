"""A recipe's model, spread over the ranks and filled, with its optimizer; and what it will take and can reach."""

from functools import partial

import torch

from lmforge.checkpoint import CorruptCheckpoint
from lmforge.cluster.distributed import DistributedContext
from lmforge.config.stage import StageConfig
from lmforge.config.tuning import TunedConfig
from lmforge.errors import UserError
from lmforge.model import build_model
from lmforge.model.config import ModelConfig
from lmforge.model.flops import peak_flops
from lmforge.model.init_weights import init_adapters, init_weights
from lmforge.model.layers import LanguageModel
from lmforge.model.lora import add_lora
from lmforge.objectives.objective import Objective
from lmforge.parallel.parallel_model import ParallelModel
from lmforge.parallel.parallelize import parallelize
from lmforge.stages.inputs import get_lora_config
from lmforge.stages.pretrained import Pretrained
from lmforge.train.metrics import measured_peak_flops
from lmforge.train.optimizer import build_optimizer

MASTER_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_model_and_optimizer(
    config: StageConfig,
    model_config: ModelConfig,
    objective: Objective,
    dist_ctx: DistributedContext,
    dtype: torch.dtype,
    compiled: bool,
    init_weights: bool,
    pretrained: Pretrained | None = None,
) -> tuple[ParallelModel, torch.optim.Optimizer]:
    """The model of a recipe spread over the ranks, with first weights unless others are about to be loaded, and its optimizer.

    Raises UserError, on every rank, where the recipe does not fit them.
    """
    model = build_model(model_config, "meta").to(MASTER_DTYPES[config.train.master_dtype])
    model.dropout = config.model.dropout
    if isinstance(config, TunedConfig):
        model.neftune_noise_alpha = config.model.neftune_noise_alpha
        if (adapters := get_lora_config(config)) is not None:
            add_lora(model, adapters)
    trained = parallelize(
        model,
        objective.loss,
        dist_ctx=dist_ctx,
        dtype=dtype,
        compile_model=compiled,
        float8=config.train.float8,
        options=config.parallel,
        init_weights=partial(_init_weights, config, pretrained, dist_ctx, fresh=init_weights),
    )
    return trained, build_optimizer(trained.model, config.optimizer, trained.parameter_shapes())


def _init_weights(
    config: StageConfig, pretrained: Pretrained | None, dist_ctx: DistributedContext, model: LanguageModel, fresh: bool
) -> None:
    """Give a model its first weights; with `fresh` false they are about to be loaded. Nothing is sent between ranks."""
    if not fresh:
        return
    with dist_ctx.raise_on_all():
        try:
            if pretrained is not None:
                init_adapters(model, config.train.seed, new_names=pretrained.load_weights(model))
            else:
                init_weights(model, config.train.seed, config.model.embedding_initializer_range)
        except CorruptCheckpoint as reason:
            raise UserError(f"{config.model.source}: {reason}; name another checkpoint") from None


def token_rng_seed(config: StageConfig) -> int | None:
    """What the keys of tokens are made from; None where nothing is drawn from them."""
    drawn = config.model.dropout > 0
    if isinstance(config, TunedConfig):
        drawn = drawn or config.model.neftune_noise_alpha > 0 or (config.lora.rank is not None and config.lora.dropout > 0)
    return config.train.seed if drawn else None


def device_peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s of a rank at best: a GPU's from its data sheet (None if unknown), a CPU's timed now."""
    if device.type == "cuda":
        return peak_flops(torch.cuda.get_device_name(device), "bf16" if dtype == torch.bfloat16 else "fp32")
    return measured_peak_flops(dtype)


def describe_peak_flops(flops_per_second: float | None, device: torch.device) -> str:
    if flops_per_second is None:
        return "an unknown peak (this GPU is not in the table), so it is left out"
    source = "a large matrix product, timed just now" if device.type == "cpu" else "data sheet"
    return f"{flops_per_second / 1e9:,.0f} GFLOP/s a rank ({source})"
