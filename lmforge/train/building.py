"""A recipe's model, spread over the ranks and filled, with its optimizer; and what it will take and can reach."""

from functools import partial

import torch

from lmforge.checkpoint import Unsound
from lmforge.cluster.ranks import Ranks
from lmforge.config import StageConfig
from lmforge.config_post import TunedConfig
from lmforge.errors import Mistake
from lmforge.model import build
from lmforge.model.flops import peak_flops
from lmforge.model.initial import initialise, initialise_adapters
from lmforge.model.layers import LanguageModel
from lmforge.model.lora import add_lora
from lmforge.model.shapes import ModelConfig
from lmforge.objectives.objective import Objective
from lmforge.parallel.apply import Strategy, spread
from lmforge.parallel.engine import Spread
from lmforge.train.material import adapters_of, counted
from lmforge.train.metrics import measured_peak_flops
from lmforge.train.optim import build_optimizer
from lmforge.train.origin import Origin

MASTERS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def prepare_model(
    config: StageConfig,
    shape: ModelConfig,
    objective: Objective,
    ranks: Ranks,
    dtype: torch.dtype,
    compiled: bool,
    fresh: bool,
    origin: Origin | None = None,
) -> tuple[Spread, torch.optim.Optimizer]:
    """The model of a recipe spread over the ranks, with first weights unless others are about to be loaded, and its optimizer.

    Raises Mistake, on every rank, where the recipe does not fit them.
    """
    model = build(shape, seed=None, device="meta").to(MASTERS[config.train.master_dtype])
    model.dropout = config.model.dropout
    if isinstance(config, TunedConfig):
        model.neftune_alpha = config.model.neftune_alpha
        if (adapters := adapters_of(config)) is not None:
            add_lora(model, adapters)
    trained = spread(
        model,
        objective.loss,
        ranks=ranks,
        dtype=dtype,
        compiled=compiled,
        float8=config.train.float8,
        strategy=Strategy(**config.parallel.model_dump()),
        fill=partial(_fill, config, origin, ranks, fresh=fresh),
    )
    return trained, build_optimizer(trained.model, config.optimizer, trained.shapes())


def _fill(config: StageConfig, origin: Origin | None, ranks: Ranks, model: LanguageModel, fresh: bool) -> None:
    """Give a model its first weights; with `fresh` false they are about to be loaded. Nothing is sent between ranks."""
    if not fresh:
        return
    with ranks.agreeing():
        try:
            if origin is not None:
                initialise_adapters(model, config.train.seed, new=origin.fill(model))
            else:
                initialise(model, config.train.seed, config.model.embedding_initializer_range)
        except Unsound as reason:
            raise Mistake(f"{config.model.source}: {reason}; name another checkpoint") from None


def noise_seed(config: StageConfig) -> int | None:
    """What the keys of tokens are made from; None where nothing is drawn from them."""
    drawn = config.model.dropout > 0
    if isinstance(config, TunedConfig):
        drawn = drawn or config.model.neftune_alpha > 0 or (config.lora.rank is not None and config.lora.dropout > 0)
    return config.train.seed if drawn else None


def checkpoint_bytes(config: StageConfig, shape: ModelConfig) -> int:
    """About what a checkpoint takes: the masters, and what the optimizer keeps of each."""
    of_state = config.optimizer.state_dtype if config.train.master_dtype == "fp32" else config.train.master_dtype
    states = 2 if config.optimizer.name == "adamw" else 1
    total, trained = counted(config, shape)
    return total * MASTERS[config.train.master_dtype].itemsize + trained * states * MASTERS[of_state].itemsize


def peak_of(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s of a rank at best: a GPU's from its data sheet (None if unknown), a CPU's timed now."""
    if device.type == "cuda":
        return peak_flops(torch.cuda.get_device_name(device), "bf16" if dtype == torch.bfloat16 else "fp32")
    return measured_peak_flops(dtype)


def peak_words(peak: float | None, device: torch.device) -> str:
    if peak is None:
        return "an unknown peak (this GPU is not in the table), so it is left out"
    source = "a large matrix product, timed just now" if device.type == "cpu" else "data sheet"
    return f"{peak / 1e9:,.0f} GFLOP/s a rank ({source})"
