"""A recipe's model, spread over the ranks and filled, with its optimizer; and what it will take and can reach."""

from functools import partial

import torch

from lmforge.cluster.ranks import Ranks
from lmforge.config import Config
from lmforge.data.hub import local_folder
from lmforge.model import build
from lmforge.model.flops import parameters, peak_flops
from lmforge.model.initial import initialise
from lmforge.model.layers import LanguageModel
from lmforge.model.shapes import ModelConfig
from lmforge.model.weights import load_folder
from lmforge.objectives.language import NextToken
from lmforge.parallel.apply import Strategy, spread
from lmforge.parallel.engine import Spread
from lmforge.train.material import has_weights
from lmforge.train.metrics import measured_peak_flops
from lmforge.train.optim import build_optimizer

MASTERS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def prepare_model(
    config: Config,
    shape: ModelConfig,
    objective: NextToken,
    ranks: Ranks,
    dtype: torch.dtype,
    compiled: bool,
    fresh: bool,
) -> tuple[Spread, torch.optim.Optimizer]:
    """The model of a recipe spread over the ranks, with first weights unless others are about to be loaded, and its optimizer.

    Raises Mistake, on every rank, where the recipe does not fit them.
    """
    model = build(shape, seed=None, device="meta").to(MASTERS[config.train.master_dtype])
    model.dropout = config.model.dropout
    trained = spread(
        model,
        objective.loss,
        ranks=ranks,
        dtype=dtype,
        compiled=compiled,
        float8=config.train.float8,
        strategy=Strategy(**config.parallel.model_dump()),
        fill=partial(_fill, config, ranks, fresh=fresh),
    )
    return trained, build_optimizer(trained.model, config.optimizer, trained.shapes())


def _fill(config: Config, ranks: Ranks, model: LanguageModel, fresh: bool) -> None:
    """Give a model its first weights; with `fresh` false they are about to be loaded. Nothing is sent between ranks."""
    source = config.model.source
    if not fresh:
        return
    with ranks.agreeing():
        if has_weights(config):
            assert source is not None
            load_folder(local_folder(source), model)
        else:
            initialise(model, config.train.seed, config.model.embedding_initializer_range)


def noise_seed(config: Config) -> int | None:
    """What the keys of tokens are made from; None where nothing is drawn from them."""
    return config.train.seed if config.model.dropout else None


def checkpoint_bytes(config: Config, shape: ModelConfig) -> int:
    """About what a checkpoint takes: the masters, and what the optimizer keeps of each."""
    of_state = config.optimizer.state_dtype if config.train.master_dtype == "fp32" else config.train.master_dtype
    states = 2 if config.optimizer.name == "adamw" else 1
    return parameters(shape).total * (MASTERS[config.train.master_dtype].itemsize + states * MASTERS[of_state].itemsize)


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
